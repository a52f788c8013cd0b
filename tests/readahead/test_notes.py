"""Notes on sources that are read alike, and their memory, in a plan."""

from pathlib import Path

import numpy as np
from support.unwrapped import unwrapped

from pinfeed import Feeder
from pinfeed.readahead.read_plan import ReadNote, notes_of

MAPPED = "read through the OS page cache, by a memory map (the file fits)"


def test_many_columns_share_the_lines_of_a_plan(tmp_path: Path) -> None:
    source = {}
    for i in range(40):
        source[f"c{i}"] = tmp_path / f"c{i}.npy"
        np.save(source[f"c{i}"], np.arange(100.0))
    with Feeder(source, batch_size=10, device="cpu", depth=2) as feeder:
        plan = feeder.plan
        assert plan.notes == (f"c0.npy, c1.npy, c2.npy and 37 more, 800 B each: {MAPPED}",)
        assert len([item for item in plan.items if item.place == "page cache"]) == 40
        assert "page cache: 40 x 800 B for rows of a file" in unwrapped(plan)
        assert len(str(plan).splitlines()) <= 10


def test_few_sources_have_a_note_each() -> None:
    four = [ReadNote(f"x{i}", 1024 * i, "mapped") for i in range(4)]
    other = ReadNote("y", 10, "read in sequence")
    assert notes_of([*four, other]) == (
        *(
            f"x{i}, {size}: mapped"
            for i, size in enumerate(("0 B", "1.0 KiB", "2.0 KiB", "3.0 KiB"))
        ),
        "y, 10 B: read in sequence",
    )
    assert notes_of([*four[:2], other, *four[2:], ReadNote("x4", 7, "mapped")]) == (
        "x0, x1, x2 and 2 more, up to 3.0 KiB each: mapped",
        "y, 10 B: read in sequence",
    )

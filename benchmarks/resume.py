"""A mixture of two sources, killed and resumed: rows that are repeated or lost, and the time.

Run it from the root, with the packages of the group ``bench``:

    python -m benchmarks.resume

Each program runs a whole epoch first. Then it runs again, and SIGKILL ends it at a batch that is
drawn with a seed. A new process continues from the last saved position. Its batches are compared
with those of the whole epoch after this position. A program saves its position after every tenth
batch, and writes a line with the row numbers of each batch:

- *batches equal*: the rows of the resumed process are those of the whole epoch, in their order
- *repeated*: rows of the resumed process that the epoch had before the saved position
- *lost*: rows of the whole epoch that neither the part before the saved position nor the resumed
  process has
- *first batch*: seconds from loading the state to the first batch, without imports; the median of
  several resumed processes
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

import pinfeed
from benchmarks.environment import environment, save
from benchmarks.processes import ROOT

SEED = 1
SHARES = ((0.05, 0.2), (0.4, 0.6), (0.8, 0.95))
"""Parts of the epoch in each of which a batch is drawn."""
N_TIMES = 5
"""Number of processes whose time to the first batch is measured."""

Record = dict[str, Any]


SIZES = {"web": 70_000, "code": 30_000}
"""Rows of each source."""
WEIGHTS = {"web": 0.7, "code": 0.3}
LENGTH = 65
BATCH_SIZE = 64
SAVE_EVERY = 10
# Rows of a file in LitData's format.
_CHUNK_ROWS = 2000


def rows_of(name: str) -> np.ndarray:
    """Return the rows of a source, whose first token is a number that no other row has."""
    names = list(SIZES)
    first = sum(SIZES[one] for one in names[: names.index(name)])
    rows = np.zeros((SIZES[name], LENGTH), np.int32)
    rows[:, 0] = np.arange(first, first + len(rows))
    return rows


def prepare_pinfeed(folder: Path) -> None:
    for name in SIZES:
        np.save(folder / f"{name}.npy", rows_of(name))


def chunk(part: tuple[str, int]) -> Iterator[torch.Tensor]:
    """Yield the tokens of a file in LitData's format."""
    name, begin = part
    yield torch.from_numpy(rows_of(name)[begin : begin + _CHUNK_ROWS].ravel())


def prepare_litdata(folder: Path) -> None:
    """Write the sources in LitData's format for tokens."""
    from litdata import TokensLoader, optimize

    for name, n_rows in SIZES.items():
        optimize(
            chunk,
            [(name, begin) for begin in range(0, n_rows, _CHUNK_ROWS)],
            str(folder / name),
            chunk_size=LENGTH * _CHUNK_ROWS,
            item_loader=TokensLoader(),
            num_workers=1,
            keep_data_ordered=True,
            verbose=False,
        )


def run_pinfeed(folder: Path, state: Any, n_ranks: int, rank: int) -> tuple[Any, Callable[[], Any]]:
    """Return the batches from a state on, and the function that returns the state."""
    sources = {name: pinfeed.NpyStore(folder / f"{name}.npy") for name in SIZES}
    order = pinfeed.rows.mixed(sources, WEIGHTS, seed=42)
    ranks = pinfeed.Ranks("join", rank=rank, world_size=n_ranks, split_batches=True)
    feeder = pinfeed.Feeder(
        pinfeed.concat(sources), batch_size=BATCH_SIZE, rows=order, ranks=ranks, device="cpu"
    )
    if state is not None:
        feeder.load_state_dict(state)
    return feeder, feeder.state_dict


def run_litdata(folder: Path, state: Any, n_workers: int, _: int) -> tuple[Any, Callable[[], Any]]:
    """Return the batches from a state on, and the function that returns the state."""
    from litdata import (
        CombinedStreamingDataset,
        StreamingDataLoader,
        StreamingDataset,
        TokensLoader,
    )

    datasets = [
        StreamingDataset(
            str(folder / name),
            item_loader=TokensLoader(block_size=LENGTH),
            shuffle=True,
            drop_last=True,
        )
        for name in SIZES
    ]
    combined = CombinedStreamingDataset(
        datasets, seed=42, weights=tuple(WEIGHTS.values()), iterate_over_all=False
    )
    loader = StreamingDataLoader(combined, batch_size=BATCH_SIZE, num_workers=n_workers)
    if state is not None:
        loader.load_state_dict(state)
    return loader, loader.state_dict


PREPARE = {"pinfeed": prepare_pinfeed, "litdata": prepare_litdata}
RUN = {"pinfeed": run_pinfeed, "litdata": run_litdata}


def run_program(way: str, folder: Path, n_parts: int, part: int) -> None:
    """Iterate over an epoch, or the rest of it, and report its batches."""
    path = folder / "state.pt"
    if way == "litdata":
        importlib.import_module("litdata")
    begin = time.perf_counter()
    saved = torch.load(path) if path.exists() else {"batches": 0, "state": None}
    batches, state_dict = RUN[way](folder, saved["state"], n_parts, part)
    for number, batch in enumerate(batches, saved["batches"] + 1):
        report: dict[str, Any] = {"batch": number, "rows": batch[:, 0].tolist()}
        if number == saved["batches"] + 1:
            report["first_batch_s"] = time.perf_counter() - begin
        if number % SAVE_EVERY == 0:
            # The file has a complete state at any moment.
            torch.save({"batches": number, "state": state_dict()}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
        print(json.dumps(report), flush=True)


@dataclass(frozen=True)
class Case:
    """A program, and its number of processes before the kill and after it.

    Attributes:
        title: Name in the table.
        way: Name of the program.
        before: Ranks of pinfeed, or worker processes of LitData.
        after: The same number after the kill.
    """

    title: str
    way: str
    before: int
    after: int


CASES = (
    Case("pinfeed", "pinfeed", 1, 1),
    Case("pinfeed, resumed by 2 ranks", "pinfeed", 1, 2),
    Case("LitData, no workers", "litdata", 0, 0),
    Case("LitData, 2 workers", "litdata", 2, 2),
    Case("LitData, 2 workers, resumed with 1", "litdata", 2, 1),
)


class RefusedError(Exception):
    """The program ended with an error."""


def reports(case: Case, folder: Path, n: int, part: int, n_batches: int | None) -> Iterator[Record]:
    """Yield the reports of a program, and kill it after a number of batches.

    Raises:
        RefusedError: If the program ends with an error.
    """
    command = [sys.executable, "-m", "benchmarks.resume", "--run", case.way, folder, n, part]
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    # LitData prints as well.
    lines = filter(lambda line: line.startswith("{"), process.stdout)
    for number, line in enumerate(lines, 1):
        yield json.loads(line)
        if number == n_batches:
            # Its worker processes, too.
            os.killpg(process.pid, 9)
            process.communicate()
            return
    error = process.communicate()[1]
    if process.returncode:
        raise RefusedError(error.strip().splitlines()[-1])


def run(case: Case, folder: Path, n: int, n_batches: int | None = None) -> list[Record]:
    """Run a program with a number of ranks or workers, and return its batches.

    Ranks run one after the other. Each report has the rows of all of them.
    """
    n_ranks = n if case.way == "pinfeed" else 1
    state = (folder / "state.pt").read_bytes() if (folder / "state.pt").exists() else None
    of_ranks = []
    for rank in range(n_ranks):
        if state is not None:
            (folder / "state.pt").write_bytes(state)
        of_ranks.append(list(reports(case, folder, n, rank, n_batches)))
    joined = []
    for parts in zip(*of_ranks, strict=True):
        rows = list(chain.from_iterable(part["rows"] for part in parts))
        joined.append({**parts[0], "rows": rows})
    return joined


def measure(case: Case, folder: Path) -> list[Record]:
    """Return a record for each kill."""
    PREPARE[case.way](folder)
    whole = [report["rows"] for report in run(case, folder, case.before)]
    rng = random.Random(SEED)
    records = []
    for low, high in SHARES:
        killed_at = rng.randrange(int(low * len(whole)), int(high * len(whole)))
        (folder / "state.pt").unlink()
        before = run(case, folder, case.before, killed_at)
        assert [report["rows"] for report in before] == whole[:killed_at], f"{case.title}: varies"
        record = {"killed_at": killed_at, "n_batches": len(whole)}
        records.append(record | resumed(case, folder, whole))
        print(case.title, records[-1], flush=True)
    return records


def resumed(case: Case, folder: Path, whole: list[list[int]]) -> Record:
    """Resume a program, and compare its batches with those of the whole epoch."""
    state = (folder / "state.pt").read_bytes()
    try:
        found = run(case, folder, case.after)
    except RefusedError as error:
        return {"refused": str(error)}
    n_done = found[0]["batch"] - 1
    assert n_done % SAVE_EVERY == 0
    record = compared([one["rows"] for one in found], whole, n_done)
    seconds = [found[0]["first_batch_s"]]
    for _ in range(N_TIMES - 1):
        (folder / "state.pt").write_bytes(state)
        seconds.append(run(case, folder, case.after, 1)[0]["first_batch_s"])
    return record | {"state_bytes": len(state), "first_batch_s": statistics.median(seconds)}


def compared(found: list[list[int]], whole: list[list[int]], n_done: int) -> Record:
    """Compare the batches of a resumed process with a whole epoch, whose rows are distinct.

    Args:
        found: Rows of each batch of the resumed process.
        whole: Rows of each batch of the epoch.
        n_done: Number of batches before the saved position.
    """
    done = set(chain.from_iterable(whole[:n_done]))
    expected = set(chain.from_iterable(whole[n_done:]))
    seen = list(chain.from_iterable(found))
    return {
        "equal": found == whole[n_done:],
        "n_resumed": len(seen),
        "repeated": len(seen) - len(set(seen) - done),
        "lost": len(expected - set(seen)),
    }


def report(results: Record) -> str:
    """Return the figures as a table in Markdown."""
    lines = []
    for title, records in results["cases"].items():
        if any("refused" in record for record in records):
            lines.append([title, "refused", "", "", "", ""])
            continue
        lines.append(
            [
                title,
                f"{sum(record['equal'] for record in records)} of {len(records)}",
                listed(f"{record['repeated']:,}" for record in records),
                listed(f"{record['lost']:,}" for record in records),
                listed(f"{record['first_batch_s']:.2f}" for record in records),
                f"{statistics.median(record['state_bytes'] for record in records) / 1e3:.1f}",
            ]
        )
    heads = ["program", "batches equal", "rows repeated", "rows lost", "first batch, s"]
    return tabulate(lines, [*heads, "state, kB"], tablefmt="github", disable_numparse=True)


def listed(cells: Iterator[str]) -> str:
    return ", ".join(cells)


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        way, folder, n_parts, part = sys.argv[2:]
        run_program(way, Path(folder), int(n_parts), int(part))
        return
    print(environment())
    results: Record = {"litdata": importlib.metadata.version("litdata"), "cases": {}}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            results["cases"][case.title] = measure(case, Path(folder))
    print(report(results))
    path = save("resume", results)
    path.with_suffix(".md").write_text(report(results) + "\n")
    print(path)


if __name__ == "__main__":
    main()

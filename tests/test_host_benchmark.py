"""The benchmark of host work runs pinfeed's CUDA device on the simulated driver."""

import json
import logging
import shutil
import time
from collections.abc import Iterator

import pytest
import torch

from benchmarks.environment import RESULTS
from benchmarks.host import __main__ as host

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture(autouse=True)
def settings_of_the_process() -> Iterator[None]:
    """Restore the settings that the benchmark makes for its process."""
    n_threads = torch.get_num_threads()
    logger = logging.getLogger("pinfeed")
    level = logger.level
    yield
    logger.setLevel(level)
    torch.set_num_threads(n_threads)


@pytest.mark.parametrize(
    "cell",
    ["loader, two tensors of 4 B", "write_back, depth 2", "tables, 1,024 ids, without the step"],
)
def test_a_cell_prints_a_line_for_each_way(cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    host.main(["--quick", "--json", "--only", cell])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ways = ["pinfeed", "by hand", "to"] if "loader" in cell else ["pinfeed"]
    assert [line["way"] for line in lines] == ways
    for line in lines:
        assert line["cell"] == cell
        assert 0 < line["training_us"] <= line["all_us"]
        assert line["gap_us"] > 0
    assert torch.cuda.Stream.__module__.startswith("torch"), "torch is as before"


def test_other_batches_fail() -> None:
    cell = next(cell for cell in host.cells() if "two tensors" in cell.name)
    other = next(cell for cell in host.cells() if "40 tensors" in cell.name)
    with pytest.raises(AssertionError, match="batches differ"):
        host.check(cell, other.expected)


def test_a_copy_takes_the_time_of_the_link() -> None:
    with host.simulated_gpu(moves=True):
        source = torch.rand(1 << 20)
        stream, target = torch.cuda.Stream(), torch.empty_like(source)
        begin_s = time.perf_counter()
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        stream.record_event().synchronize()
        assert time.perf_counter() - begin_s > source.nbytes / 55e9
        assert torch.equal(target, source)


def test_the_table_of_the_page_is_made_of_the_results() -> None:
    for path in RESULTS.glob("host-*.json"):
        results = json.loads(path.read_text())["results"]
        assert path.with_suffix(".md").read_text() == host.report(results) + "\n"

"""Measurements of the benchmark command for GPUs: conditions, prices, rows and loops."""

import importlib
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.simulated_gpu import SimulatedGPU
from torch import nn

from benchmarks.gpu import limits, nvml
from benchmarks.gpu.__main__ import PARTS
from benchmarks.gpu.bench import Bench, Samples, as_rows
from benchmarks.gpu.cache import CACHES, SkewedCell
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.conditions import gpu_state, host_state, memory_state
from benchmarks.gpu.correctness import debugged
from benchmarks.gpu.host_work import measured
from benchmarks.gpu.movers import Staging
from benchmarks.gpu.overlap import Overlap
from benchmarks.gpu.prices import from_c
from benchmarks.gpu.recorder import Recorder, Run, Skipped
from benchmarks.gpu.rows import BY_PAGE, drawn
from benchmarks.gpu.steady import N_WARM, Loop, rounds, timed
from benchmarks.gpu.system import system
from benchmarks.gpu.tables import Contest, _watched
from benchmarks.rowcells import RowCell
from benchmarks.rowsteps import prefetched
from benchmarks.zoo import Case
from pinfeed.stores.host_rows import StoreRows


def recorder(path: Path, seconds: float = 60.0, settle: Any = lambda: None) -> Recorder:
    path.write_text("{}")
    return Recorder(path, time.monotonic() + seconds, settle)


def test_a_debugger_tells_where_a_program_crashes(programs: Path) -> None:
    install(
        programs / "gdb",
        """echo 'Starting program'; for word in "$@"; do last=$word; done
        echo "Program received signal SIGSEGV in $last"; echo '#0 a frame'""",
    )
    found = debugged(("python", "-m", "pytest", "test.py"), lambda: 30.0)
    assert found["stacks"] == ["Program received signal SIGSEGV in test.py", "#0 a frame"]
    (programs / "gdb").unlink()
    with pytest.raises(Skipped, match="neither cuda-gdb nor gdb"):
        debugged(("true",), lambda: 30.0)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only one with programs, besides those that a shell script needs."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def install(program: Path, text: str) -> None:
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


def test_the_system_is_described_by_its_programs(programs: Path, tmp_path: Path) -> None:
    install(programs / "nvidia-smi", "echo Driver Version: 1.2; echo GPU UUID: GPU-00ff; exit 3")
    cells = {str(cell.key): cell for cell in system(Run("cpu", recorder(tmp_path / "part.json")))}
    found = cells["{'command': 'nvidia-smi -q'}"].measure()
    assert found == {"exit_status": 3, "lines": ["Driver Version: 1.2"]}
    with pytest.raises(Skipped, match="lscpu is not installed"):
        cells["{'command': 'lscpu'}"].measure()
    # They take long to list, and the time of the part may end.
    assert list(cells)[-1] == "{'what': 'packages'}"
    assert cells["{'what': 'packages'}"].measure()["versions"]["numpy"] == np.__version__


NVML = """
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **gpu)
{
    *gpu = (void *)7;
    return bus[5] == '1' ? 0 : 6;
}
int nvmlDeviceGetClockInfo(void *gpu, int clock, unsigned *mhz)
{
    *mhz = 1000 * clock + (gpu == (void *)7);
    return 0;
}
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *milliwatt) { *milliwatt = 250500; return 0; }
int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned *celsius) { return 3; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, unsigned long long *reasons)
{
    *reasons = 0x24;
    return 0;
}
"""


def test_conditions_of_the_gpu_are_those_of_nvidias_library(tmp_path: Path) -> None:
    """A value that the GPU or the library does not have is None."""
    library = compiled(tmp_path, NVML)
    gpu = nvml.Gpu("0000:1a:00.0", library)
    found = gpu.state()
    assert set(found) == set(nvml.UNKNOWN) == set(gpu_state())
    assert found["sm_mhz"] == 1001
    assert found["memory_mhz"] == 2001
    assert found["power_w"] == 250.5
    assert found["temperature_c"] is None
    assert found["pcie_gen"] is None
    assert found["throttle_reasons"] == ["power cap", "software thermal slowdown"]
    assert gpu.clocks() == {name: found[name] for name in gpu.clocks()}
    with pytest.raises(OSError, match=r"does not describe the GPU 0000:2a:00\.0: error 6"):
        nvml.Gpu("0000:2a:00.0", library)


CALLS = (
    *("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuStreamCreate"),
    *("cuEventCreate", "cuMemHostAlloc", "cuMemAlloc_v2", "cuModuleLoadData"),
    *("cuModuleGetFunction", "cuEventRecord", "cuStreamWaitEvent", "cuEventQuery"),
    *("cuEventSynchronize", "cuEventDestroy_v2", "cuMemcpyHtoDAsync_v2", "cuLaunchKernel"),
    "cuStreamSynchronize",
)


def test_calls_of_the_driver_have_prices(tmp_path: Path) -> None:
    """Without a driver, the cell is skipped; a call that fails is named."""
    driver = "".join(f"int {name}() {{ return 0; }}\n" for name in CALLS)
    found = from_c(compiled(tmp_path, driver), 30.0)
    assert len(found) == 8
    assert all(0 < median <= p90 for median, p90 in found.values())
    driver = driver.replace("cuEventQuery() { return 0", "cuEventQuery() { return 700")
    with pytest.raises(RuntimeError, match="query_of_done_event failed with CUDA error 700"):
        from_c(compiled(tmp_path, driver), 30.0)
    with pytest.raises(Skipped, match=r"there is no libnone\.so"):
        from_c("libnone.so", 30.0)


def compiled(folder: Path, text: str) -> str:
    """Compile C code into a library that takes the place of one of NVIDIA's."""
    library = folder / "library.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=text, text=True, check=True)
    return str(library)


def test_the_work_of_each_thread_is_counted() -> None:
    def batches() -> Iterator[int]:
        begun = threading.Semaphore(0)
        ended = threading.Event()

        def work() -> None:
            while not ended.is_set():
                begun.acquire()

        thread = threading.Thread(target=work, name="reader-3")
        thread.start()
        try:
            for i in range(200):
                begun.release()
                yield i
        finally:
            ended.set()
            begun.release()
            thread.join()

    found = measured(batches(), lambda _: time.sleep(1e-4), 100, "cpu")
    assert found["batches"] == 100
    assert found["mean_us"] >= 100
    assert found["threads"]["reader"]["switches"] > 0
    assert found["threads"]["MainThread"]["switches"] > 0.5
    assert found["switches"] == pytest.approx(
        sum(one["switches"] for one in found["threads"].values()), abs=0.01
    )


def test_rows_sorted_by_pages_are_random_within_a_page() -> None:
    table = as_rows(Bench("cpu").words(8 << 20), 4096)
    rows = drawn(np.random.default_rng(0), table, 1000, BY_PAGE)
    pages = rows * 4096 >> 21
    assert (np.diff(pages) >= 0).all()
    assert (np.diff(rows) < 0).any()
    assert len(set(rows.tolist())) == 1000


def test_conditions_of_the_host_name_the_mapping_of_an_array() -> None:
    array = np.ones(1 << 20)
    assert memory_state(array)["mapped_bytes"] >= array.nbytes
    assert set(host_state()) >= {"transparent_huge_pages", "gpu_numa_node", "process_numa_nodes"}


def test_ceilings_leave_the_table_as_it_is() -> None:
    bench = Bench("cpu")
    memory = bench.words(2 << 20)
    limits = Ceilings(bench, memory)
    for direction in ("to the host", "both"):
        assert limits.engine(direction) > 0
        assert limits.kernel(8, direction, random=True) > 0
    assert np.array_equal(memory.array, np.arange(memory.n_rows))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_cells_of_every_part_have_keys_of_their_own(tmp_path: Path, device: str) -> None:
    for one in PARTS:
        module, name = one.target.split(":")
        run = Run(device, recorder(tmp_path / "part.json"))
        keys = [str(cell.key) for cell in getattr(importlib.import_module(module), name)(run)]
        assert keys, one.name
        assert len(set(keys)) == len(keys), one.name


def test_rows_gathered_by_the_cpu_are_compared() -> None:
    bench = Bench("cpu")
    table = as_rows(bench.words(1 << 20), 4096)
    samples = Samples(bench, [StoreRows(table, np.arange(i, 256, 2)[::-1].copy()) for i in (0, 1)])
    with Staging(bench, samples) as staging:
        staging.compare()
        table.array[7] += 1
        with pytest.raises(AssertionError, match="gathered by the CPU are wrong"):
            staging.compare()


def test_frequent_ids_are_a_share_of_the_batch_as_by_zipfs_law() -> None:
    cell = SkewedCell(16, 4096, table_bytes=64 << 10, exponent=1.2)
    first, second = cell.batches(2)
    assert np.array_equal(first, cell.batches(1)[0])
    counts = np.bincount(np.concatenate([first, second]), minlength=cell.n_rows)
    expected = np.arange(1, cell.n_rows + 1) ** -1.2
    shares = np.sort(counts)[::-1] / counts.sum()
    assert shares[:10] == pytest.approx((expected / expected.sum())[:10], abs=0.02)


def test_losses_with_a_cache_are_compared_bit_for_bit() -> None:
    cell = SkewedCell(16, 64, table_bytes=64 << 10)

    def wrong(*arguments: Any, **options: Any) -> Iterator[Any]:
        for loss in prefetched(*arguments, **options):
            yield loss * (1 + 1e-6)

    contest = Contest(cell, "cpu", 2, 0.0, 1, 12, {**CACHES, "cache of wrong rows": wrong})
    for name in ("cache of 5%", "cache of 100%"):
        found = contest.small(name)
        assert found["losses"] == "equal"
        assert found["rows_read"] > 0
    assert "different: cache of wrong rows" in contest.small("cache of wrong rows")["losses"]


def test_losses_that_prefetching_changes_are_recorded(tmp_path: Path) -> None:
    class Batches(list[torch.Tensor]):
        """Batches of ids that are others in every epoch."""

        def __iter__(self) -> Iterator[torch.Tensor]:
            for i in range(len(self)):
                self[i] = self[i] + 1
                yield self[i]

    overlap = Overlap(Run("cpu", recorder(tmp_path / "part.json")))
    cell = RowCell(4, 64, 0.0, table_bytes=4096)
    ids = [batch // 2 for batch in cell.batches(2)]
    assert overlap._compared_losses(cell, ids, 1) == "equal"
    assert "different: depth 2 gives [" in overlap._compared_losses(cell, Batches(ids), 1)


def test_a_contestant_that_fails_to_begin_gives_its_own_error() -> None:
    def fails(*arguments: Any, loops: Any) -> Iterator[Any]:
        raise MemoryError("the table does not fit")
        yield

    stats: list[Any] = []
    with pytest.raises(MemoryError, match="does not fit"):
        list(_watched(fails, 1, stats, [])(None, None, []))  # type: ignore[arg-type]
    assert stats == []


def test_times_of_readers_are_compared_with_the_link() -> None:
    cell = SkewedCell(16, 64, table_bytes=64 << 10)
    link = {"to the device": 1e-3, "to the host": 2e-3}
    contest = Contest(cell, "cpu", 8, 10.0, 4, 4, CACHES, link)
    found = contest.small("prefetch")
    # A row has 16 floats, and Adam's state twice as many. GB/s are MB per ms.
    assert found["mb_read"] == found["mb_written"] > 0
    assert found["link_ms"] == pytest.approx(found["mb_read"] / 1e-3, rel=0.1)
    assert found["read_ms"] >= found["source_ms"] > 0
    cached = contest.small("cache of 100%")
    assert cached["mb_written"] == 0, "only the end of a loop writes the rows of such a cache"
    assert 0 < cached["mb_read"] < found["mb_read"]


def test_a_loop_is_timed_after_its_first_batches() -> None:
    steps: list[int] = []
    written: list[int] = []
    closed = []

    def batches() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.append(True)

    found = timed(Loop(batches, steps.append, written.append, "cpu"), 5)
    assert steps == written == list(range(N_WARM + 5))
    assert closed == [True]
    assert len(found.host_s) == 5
    assert found.batch_s > 0


def test_both_at_once_are_compared_with_the_longer_one() -> None:
    moves = Loop(lambda: iter_of(100), lambda _: None, None, "cpu")
    both = Loop(lambda: iter_of(100), lambda _: time.sleep(0.002), None, "cpu")
    found = rounds(moves, both, lambda: time.sleep(0.002), 3)
    assert found["both_to_longer"] == pytest.approx(
        found["both_ms"] / max(found["transfer_ms"], found["compute_ms"]), rel=0.01
    )
    assert len(found["both_rounds_ms"]) == 3


def iter_of(n: int) -> Iterator[int]:
    yield from range(n)


def test_chosen_batches_hold_under_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(lambda: nn.Linear(64, 8), (64,), "float32", (), "int64", nn.functional.nll_loss, ())
    monkeypatch.setattr(limits, "_MODELS", {"one": case, "two": case})
    run = Run("cuda", recorder(tmp_path / "limits.json"))
    cells = limits.limits(run)
    assert [tuple(cell.key.values()) for cell in cells[:3]] == [
        ("one", 0.25),
        ("two", 0.5),
        ("one", 0.5),
    ]
    gpu = SimulatedGPU(monkeypatch, total=64 << 20, context=1 << 20, workspace=1 << 20)
    with gpu:
        found = cells[0].measure()
    assert gpu.cap == gpu.total
    assert found["measured_bytes"] <= found["limit_bytes"] == 16 << 20
    assert found["held"]["fits"]
    assert found["held"]["reserved"] <= 15 << 20
    assert found["larger_fit"] == {1.1: False}

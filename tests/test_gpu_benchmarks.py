"""The benchmark command for GPUs keeps its measurements, whatever happens to a part."""

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from benchmarks.environment import RESULTS, compiled_part
from benchmarks.gpu import nvml
from benchmarks.gpu.__main__ import PARTS, SHORT, SHORT_S, _age_s, chosen_parts
from benchmarks.gpu.bench import Bench, Samples, as_rows, words
from benchmarks.gpu.cache import CACHES, SkewedCell
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.conditions import gpu_state, host_state, memory_state
from benchmarks.gpu.correctness import _pytest, debugged, summary
from benchmarks.gpu.host_work import measured
from benchmarks.gpu.link import routes
from benchmarks.gpu.movers import Staging, batch_copies, movers
from benchmarks.gpu.overlap import Overlap, overlaps
from benchmarks.gpu.packing import packed
from benchmarks.gpu.prices import from_c
from benchmarks.gpu.processes import ROOT, Part, last_lines, new_file, run_part, run_parts
from benchmarks.gpu.recorder import Cell, Recorder, Run, Skipped
from benchmarks.gpu.results import load
from benchmarks.gpu.rows import BY_PAGE, drawn
from benchmarks.gpu.steady import N_WARM, Loop, rounds, timed
from benchmarks.gpu.system import system
from benchmarks.gpu.tables import Contest, _watched
from benchmarks.rowcells import RowCell
from benchmarks.rowsteps import prefetched
from pinfeed.stores.host_rows import StoreRows

MODULE = """
import os
import time

from benchmarks.gpu.recorder import Cell


def quick(run):
    return [Cell({"n": 1}, lambda: {"found": 1})]


def hanging(run):
    return [*quick(run), Cell({"n": 2}, lambda: time.sleep(600)), Cell({"n": 3}, lambda: {})]


def dying(run):
    return [*quick(run), Cell({"n": 2}, lambda: os._exit(3)), Cell({"n": 3}, lambda: {})]
"""


HEADER = {"device": "cpu", "command": "a test", "commit": "0123abcd"}


def recorder(path: Path, seconds: float = 60.0, settle: Any = lambda: None) -> Recorder:
    path.write_text("{}")
    return Recorder(path, time.monotonic() + seconds, settle)


def part(name: str, share: float = 1.0) -> Part:
    return Part(name, "group", share, f"parts_of_a_test:{name}")


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of parts can import the module above."""
    (tmp_path / "parts_of_a_test.py").write_text(MODULE)
    folders = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))


def test_every_cell_is_saved_at_once(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    seen = []

    def measure() -> dict[str, Any]:
        seen.append(json.loads(path.read_text()))
        return {"found": len(seen)}

    record = recorder(path)
    record.add(Cell({"n": n}, measure) for n in range(3))
    record.run()
    assert [[cell["n"] for cell in state["cells"]] for state in seen] == [[], [0], [0, 1]]
    assert [state["running"] for state in seen] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert seen[0]["not_reached"] == [{"n": 1}, {"n": 2}]
    saved = json.loads(path.read_text())
    assert saved["status"] == "ended"
    assert [cell["found"] for cell in saved["cells"]] == [1, 2, 3]
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_is_recorded_and_the_next_cell_runs(tmp_path: Path) -> None:
    def skip() -> dict[str, Any]:
        raise Skipped("there is no GPU")

    record = recorder(tmp_path / "part.json")
    record.add([Cell({"n": 0}, lambda: {"x": 1 // 0}), Cell({"n": 1}, skip), Cell({"n": 2}, dict)])
    record.run()
    failed, skipped, last = json.loads(record.path.read_text())["cells"]
    assert failed["n"] == 0
    assert failed["error"].startswith("ZeroDivisionError: ")
    assert "1 // 0" in failed["traceback"]
    assert skipped["skipped"] == "there is no GPU"
    assert "error" not in last


def test_a_lost_device_ends_the_part(tmp_path: Path) -> None:
    def settle() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    record = recorder(tmp_path / "part.json", settle=settle)
    record.add(Cell({"n": n}, dict) for n in range(2))
    record.run()
    saved = json.loads(record.path.read_text())
    assert "illegal memory access" in saved["note"]
    assert saved["not_reached"] == [{"n": 1}]


def test_cells_beyond_the_deadline_are_listed(tmp_path: Path) -> None:
    record = recorder(tmp_path / "part.json")

    def late() -> dict[str, Any]:
        record.deadline = time.monotonic()
        return {}

    record.add([Cell({"n": 0}, late), Cell({"n": 1}, dict), Cell({"n": 2}, dict)])
    record.run()
    saved = json.loads(record.path.read_text())
    assert saved["status"] == "ended at its deadline"
    assert [cell["n"] for cell in saved["cells"]] == [0]
    assert saved["not_reached"] == [{"n": 1}, {"n": 2}]


def test_files_are_never_overwritten(tmp_path: Path) -> None:
    first = new_file(tmp_path, "gpu-rows", ".json")
    first.write_text("kept")
    second = new_file(tmp_path, "gpu-rows", ".json")
    assert first.name == "gpu-rows-1.json"
    assert second.name == "gpu-rows-2.json"
    assert first.read_text() == "kept"


@pytest.mark.usefixtures("parts")
def test_a_part_that_hangs_is_killed_and_its_cells_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    run_part(part("hanging"), path, {"device": "cpu"}, limit_s=12.0)
    saved = json.loads(path.read_text())
    assert saved["status"] == "killed at its limit of 12 s"
    assert [cell["n"] for cell in saved["cells"]] == [1]
    assert saved["running"] == {"n": 2}
    assert saved["not_reached"] == [{"n": 3}]
    assert saved["exit_status"] is None
    assert any("parts_of_a_test.py" in line for line in saved["output"]), "no traceback of the hang"


@pytest.mark.usefixtures("parts")
def test_a_part_that_dies_is_recorded_and_others_go_on(tmp_path: Path) -> None:
    chosen = [part("dying"), part("quick", share=3.0)]
    out = tmp_path / "out"
    written = run_parts(chosen, seconds=120, out=out, header=HEADER, prefix="test", least_s=0)
    dying, quick = (json.loads(path.read_text()) for path in written)
    assert dying["status"] == "crashed with exit status 3"
    assert [cell["n"] for cell in dying["cells"]] == [1]
    assert dying["limit_s"] == pytest.approx(30, abs=1)
    assert quick["status"] == "ended"
    assert quick["cells"][0]["found"] == 1
    assert quick["environment"].startswith("pinfeed")
    assert quick["compiled_part"] == compiled_part()
    assert quick["commit"] == HEADER["commit"]
    assert quick["launch_us"] > 0
    assert load(written[1]) == quick
    # Its share alone is 90 seconds; the rest is time that the first part did not need.
    assert 90 < quick["limit_s"] <= 120


def test_a_program_ends_with_the_process_that_runs_it(tmp_path: Path) -> None:
    """A call that is killed at a time limit leaves no process that keeps the GPU."""
    number = tmp_path / "number"
    script = f"echo $$ > {number}.aside; mv {number}.aside {number}; exec sleep 600"
    code = "import sys; from benchmarks.gpu.processes import run_program; "
    code += "run_program(('sh', '-c', sys.argv[1]), 600)"
    process = subprocess.Popen([sys.executable, "-c", code, script], cwd=ROOT)
    while not number.exists():
        assert process.poll() is None
    program = os.pidfd_open(int(number.read_text()))
    try:
        process.kill()
        process.wait()
        assert select.select([program], [], [], 60)[0], "the program still runs"
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(program, signal.SIGKILL)
        os.close(program)


def test_the_time_of_a_call_begins_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    born = psutil.Process().create_time()
    monkeypatch.setattr(time, "time", lambda: born + 100)
    assert _age_s() == pytest.approx(100)


def test_a_part_without_time_is_not_started(tmp_path: Path) -> None:
    written = run_parts([part("quick")], seconds=0, out=tmp_path, header=HEADER, prefix="test")
    assert json.loads(written[0].read_text())["status"] == "not started"


def test_results_are_packed_while_they_are_measured(tmp_path: Path) -> None:
    folder, path = tmp_path / "results", tmp_path / "results.tar"
    folder.mkdir()
    with packed(folder, path, every_s=0.001):
        (folder / "one.json").write_text("{}")
        (folder / "one.json.aside").write_text("{")
        while names_in(path) != ["one.json"]:
            pass
        (folder / "two.png").write_bytes(b"picture")
    assert names_in(path) == ["one.json", "two.png"]
    with tarfile.open(path) as archive:
        assert archive.extractfile("two.png").read() == b"picture"  # type: ignore[union-attr]
    assert sorted(tmp_path.iterdir()) == [folder, path]


def test_results_are_packed_again_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, path = tmp_path / "results", tmp_path / "results.tar"
    folder.mkdir()
    failed = threading.Event()
    replace = os.replace

    def fails_once(source: Path, target: Path) -> None:
        if (folder / "one.json").exists() and not failed.is_set():
            failed.set()
            raise OSError("no space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails_once)
    with packed(folder, path, every_s=0.001):
        (folder / "one.json").write_text("{}")
        assert failed.wait(60)
        deadline = time.monotonic() + 60
        while names_in(path) != ["one.json"]:
            assert time.monotonic() < deadline
    assert f"{path} was not replaced: no space left on device" in capsys.readouterr().out


def names_in(path: Path) -> list[str]:
    with tarfile.open(path) as archive:
        return archive.getnames()


def test_warnings_do_not_fail_the_tests_of_a_gpu(tmp_path: Path) -> None:
    """In pyproject.toml, they are errors."""
    test = tmp_path / "test_old.py"
    test.write_text("import warnings\n\ndef test():\n    warnings.warn('old')\n")
    found = _pytest(60, "-c", str(ROOT / "pyproject.toml"), "-p", "no:xdist", str(test))
    assert found["counts"] == {"passed": 1}
    assert "1 warning" in found["output"][-1]


@pytest.mark.parametrize("batch_copies", [False, True])
def test_only_one_part_tries_copies_in_batches(
    batch_copies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their driver may crash or hang. The settings of all tests keep to what is remembered."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests"))))
    test = tmp_path / "test_trial.py"
    test.write_text(
        "from pinfeed.devices.batch_copy_trial import trial_key\n"
        "from pinfeed.devices.route import cached_trial\n"
        "def test():\n"
        "    tried = cached_trial(trial_key('a GPU'), lambda: 'tried again')\n"
        f"    assert (tried == 'tried again') == {batch_copies}\n"
    )
    options = ("-c", str(ROOT / "pyproject.toml"), "-p", "no:xdist", "-p", "conftest")
    found = _pytest(60, *options, str(test), batch_copies=batch_copies)
    assert found["counts"] == {"passed": 1}, found


@pytest.mark.parametrize("group", [SHORT, "correctness", "link", "training"])
def test_groups_fit_a_call_of_ten_minutes(group: str) -> None:
    assert sum(one.share for one in chosen_parts([group])) <= SHORT_S


def test_copies_in_batches_are_the_last_part_of_the_short_run(tmp_path: Path) -> None:
    assert [one.name for one in PARTS if one.group == SHORT][-1] == "batch-copies"
    run = Run("cuda", recorder(tmp_path / "part.json"))
    assert {cell.key["by"] for cell in batch_copies(run)} == {"copies in batches"}
    assert "copies in batches" not in {cell.key["by"] for cell in movers(run)}


@pytest.mark.parametrize("make", [overlaps, routes])
def test_long_rows_are_last(make: Any, tmp_path: Path) -> None:
    """Their feeders measure copies in batches."""
    cells = make(Run("cuda", recorder(tmp_path / "part.json")))
    long = [cell.key.get("row_nbytes", 0) >= 32 << 10 for cell in cells]
    assert any(long)
    assert long == sorted(long)


def test_a_table_that_does_not_fit_is_named() -> None:
    with pytest.raises(Skipped, match=r"tables of 1152921504\.6 GB need 8\.6 GB in addition"):
        words(1 << 60, pin=True)


def test_the_summary_of_tests_names_failures() -> None:
    reports: list[dict[str, Any]] = [
        {"test": "a", "outcome": "started"},
        {"test": "d", "outcome": "started"},
        {"test": "a", "outcome": "passed", "seconds": 1.0},
        {"test": "b", "outcome": "failed", "seconds": 2.0, "message": "no", "text": ["no"]},
        {"test": "c", "outcome": "skipped", "seconds": 0.0, "message": "why", "text": []},
    ]
    found = summary(reports)
    assert found["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert found["failures"] == [reports[3]]
    assert found["unfinished"] == ["d"]
    assert found["skipped"] == [{"test": "c", "message": "why"}]
    assert [row["test"] for row in found["slowest"]] == ["b", "a", "c"]


@pytest.mark.parametrize("missing", ["compiled_part", "commit", "environment"])
def test_a_result_that_does_not_say_how_it_was_measured_is_refused(
    missing: str, tmp_path: Path
) -> None:
    path = tmp_path / "gpu-rows-1.json"
    record = {**HEADER, "environment": "a machine", "compiled_part": "used", "status": "ended"}
    path.write_text(json.dumps(record))
    assert load(path) == record
    del record[missing]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=rf"gpu-rows-1.json lacks '{missing}'.*measure it again"):
        load(path)
    path.write_text(json.dumps(record)[:-1])
    with pytest.raises(ValueError, match=r"gpu-rows-1.json is no complete result"):
        load(path)


def test_committed_results_say_whether_the_compiled_part_was_used() -> None:
    paths = sorted(RESULTS.glob("gpu-*.json"))
    assert paths
    for path in paths:
        assert load(path)["compiled_part"]


def test_the_head_of_a_crash_dump_is_kept(tmp_path: Path) -> None:
    test = tmp_path / "test_crash.py"
    test.write_text("import os\n\ndef test():\n    print(90 * 'line\\n')\n    os.abort()\n")
    found = _pytest(60, "-c", str(ROOT / "pyproject.toml"), "-p", "no:xdist", "-s", str(test))
    assert found["exit_status"] == -signal.SIGABRT
    assert found["output"][0] == "Fatal Python error: Aborted"
    assert any("test_crash.py" in line for line in found["output"][:10])
    long = ["begin", "Fatal Python error: Aborted", *map(str, range(200))]
    assert last_lines("\n".join(long), 2) == [*long[1:41], "198", "199"]


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
    assert found["threads"]["MainThread"]["switches"] >= 1
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

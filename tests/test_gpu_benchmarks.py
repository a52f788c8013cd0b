"""The benchmark command for GPUs keeps its measurements, whatever happens to a part."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.environment import RESULTS, compiled_part
from benchmarks.gpu.__main__ import SHORT, SHORT_S, _age_s, chosen_parts
from benchmarks.gpu.bench import words
from benchmarks.gpu.correctness import _pytest, summary
from benchmarks.gpu.packing import packed
from benchmarks.gpu.processes import ROOT, Part, last_lines, new_file, run_part, run_parts
from benchmarks.gpu.recorder import Cell, Recorder, Skipped
from benchmarks.gpu.results import load

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


@pytest.mark.slow
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


@pytest.mark.parametrize("group", [SHORT, "correctness", "link", "training"])
def test_groups_fit_a_call_of_ten_minutes(group: str) -> None:
    assert sum(one.share for one in chosen_parts([group])) <= SHORT_S


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
def test_a_result_that_lacks_how_it_was_measured_is_refused(missing: str, tmp_path: Path) -> None:
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


def test_committed_results_say_how_they_were_measured() -> None:
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

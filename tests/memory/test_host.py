"""Free host memory: machine, control groups of both versions, limits of the process."""

import re
import resource
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
import torch
from support.programs import Programs
from support.unwrapped import unwrapped

from pinfeed import Feeder, MiB
from pinfeed.memory import host
from pinfeed.memory.host import (
    ProcessMemory,
    core_quota,
    free_host_bytes,
    free_host_memory,
    host_limits,
    lock_limit,
    resident_bytes,
)
from pinfeed.memory.page_locked import locked_bytes
from pinfeed.memory.pages import anonymous

V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
V2 = ("memory.max", "memory.current", "inactive_file", "active_file")


def group(
    directory: Path,
    limit: object,
    usage: object,
    cache: int | None,
    names: tuple[str, ...] = V2,
) -> None:
    """Write the files of a control group, without memory.stat if ``cache`` is None."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{usage}\n")
    if cache is not None:
        (directory / "memory.stat").write_text(
            f"anon 7\ninactive_anon 500\n{names[2]} {cache}\n{names[3]} 900\nx{names[2]} 300\n"
        )


def free(tmp_path: Path, *lines: str) -> int:
    (tmp_path / "cgroup").write_text("".join(f"{line}\n" for line in lines))
    with files(tmp_path):
        return free_host_memory().allocatable


def files(tmp_path: Path) -> AbstractContextManager[Any]:
    """Replace the files of the kernel by those of a test."""
    return mock.patch.multiple(host, PROC=f"{tmp_path}/cgroup", ROOT=f"{tmp_path}/fs")


def is_unbound(nbytes: int) -> bool:
    """Return whether the machine is the limit, and not a group of these tests, which allow less."""
    return nbytes > MiB(1)


def test_version_2(tmp_path: Path) -> None:
    group(tmp_path / "fs/app/job", 10_000, 4000, 1000)
    assert free(tmp_path, "0::/app/job") == 10_000 - 4000 + 1000, "the page cache counts as free"


@pytest.mark.parametrize(("version", "line"), [(V2, "0::/job"), (V1, "4:memory:/job")])
def test_files_in_the_page_cache_count_as_free_for_it(
    tmp_path: Path, version: tuple[str, ...], line: str
) -> None:
    """A file that is mapped and used again stays one that the page cache can hold."""
    base = tmp_path / ("fs" if version is V2 else "fs/memory")
    group(base / "job", 10_000, 4000, 1000, version)
    (tmp_path / "cgroup").write_text(f"{line}\n")
    with files(tmp_path):
        found = free_host_memory()
    assert found.page_cache == free(tmp_path, line) + 900 == 10_000 - 4000 + 1000 + 900


def test_version_2_with_the_limit_on_a_parent(tmp_path: Path) -> None:
    group(tmp_path / "fs/app/job", "max", 100, 0)
    group(tmp_path / "fs/app", 10_000, 9000, 500)
    assert free(tmp_path, "0::/app/job") == 1500


def test_version_2_the_least_of_all_groups_counts(tmp_path: Path) -> None:
    group(tmp_path / "fs/a/b/c", 9000, 1000, 0)
    group(tmp_path / "fs/a/b", 8000, 7000, 0)
    group(tmp_path / "fs/a", 10_000, 1000, 0)
    assert free(tmp_path, "0::/a/b/c") == 1000


def test_version_2_at_the_root(tmp_path: Path) -> None:
    group(tmp_path / "fs", 10_000, 4000, 0)
    assert free(tmp_path, "0::/") == 6000, "a container sees its own group as the root"


def test_version_2_without_any_limit(tmp_path: Path) -> None:
    group(tmp_path / "fs/app", "max", 4000, 0)
    group(tmp_path / "fs", "max", 4000, 0)
    assert is_unbound(free(tmp_path, "0::/app"))


def test_version_1(tmp_path: Path) -> None:
    group(tmp_path / "fs/memory/app/job", 10_000, 4000, 1000, V1)
    assert (
        free(tmp_path, "9:name=systemd:/app/job", "4:cpu,memory:/app/job", "1:cpu:/", "0::/")
        == 7000
    )


def test_version_1_nested(tmp_path: Path) -> None:
    group(tmp_path / "fs/memory/app/job", 10_000, 4000, 0, V1)
    group(tmp_path / "fs/memory/app", 8000, 7000, 300, V1)
    group(tmp_path / "fs/memory", 9223372036854771712, 7000, 0, V1)
    assert free(tmp_path, "4:memory:/app/job") == 1300


def test_version_1_unlimited_is_a_huge_number(tmp_path: Path) -> None:
    group(tmp_path / "fs/memory/app", 9223372036854771712, 4000, 0, V1)
    assert is_unbound(free(tmp_path, "4:memory:/app"))


def test_version_1_in_a_container_that_sees_the_path_of_its_host(tmp_path: Path) -> None:
    group(tmp_path / "fs/memory", 10_000, 4000, 0, V1)
    assert free(tmp_path, "4:memory:/docker/0123456789abcdef") == 6000


def test_both_versions_at_once(tmp_path: Path) -> None:
    group(tmp_path / "fs/memory/old", 10_000, 4000, 0, V1)
    (tmp_path / "fs/unified").mkdir()
    assert free(tmp_path, "4:memory:/old", "0::/new") == 6000


def test_limits_by_name(tmp_path: Path) -> None:
    group(tmp_path / "fs/memory/app/job", 10_000, 4000, 1000, V1)
    group(tmp_path / "fs/new", 20_000, 5000, 0)
    assert free(tmp_path, "4:memory:/app/job", "0::/new") == 7000
    with files(tmp_path):
        machine, *groups = host_limits()
    assert (machine.name, machine.total) == ("machine", psutil.virtual_memory().total)
    assert [tuple(limit) for limit in groups[:2]] == [
        ("control group /memory/app/job", 10_000, 7000, 900),
        ("control group /new", 20_000, 15_000, 900),
    ]


@pytest.mark.parametrize(
    ("texts", "quota"),
    [
        ({"fs/app/cpu.max": "150000 100000"}, 1.5),
        (
            {
                "fs/app/job/cpu.max": "max 100000",
                "fs/app/cpu.max": "400000 100000",
                "fs/cpu.max": "200000 100000",
            },
            2.0,
        ),
        ({"fs/app/job/cpu.max": "max 100000"}, None),
        ({"fs/cpu/app/cpu.cfs_quota_us": "50000", "fs/cpu/app/cpu.cfs_period_us": "100000"}, 0.5),
        ({"fs/cpu/app/cpu.cfs_quota_us": "-1", "fs/cpu/app/cpu.cfs_period_us": "100000"}, None),
        ({"fs/app/cpu.max": "what"}, None),
        ({}, None),
    ],
)
def test_cores_that_groups_grant(
    texts: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "cgroup").write_text("4:cpu,cpuacct:/app/job\n0::/app/job\n")
    with files(tmp_path):
        assert core_quota() == quota


def test_the_lock_limit_is_that_of_the_process() -> None:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert lock_limit() == (None if soft == resource.RLIM_INFINITY else soft)


def test_controllers_are_matched_by_their_whole_name(tmp_path: Path) -> None:
    group(tmp_path / "fs/memory/app", 10_000, 4000, 0, V1)
    assert is_unbound(free(tmp_path, "4:hugememory:/app", "5:name=memory:/app"))


def test_a_path_with_a_colon(tmp_path: Path) -> None:
    group(tmp_path / "fs/app:1", 10_000, 4000, 0)
    assert free(tmp_path, "0::/app:1") == 6000


def test_a_group_without_cache_statistics_still_limits(tmp_path: Path) -> None:
    group(tmp_path / "fs/app", 10_000, 4000, None)
    assert free(tmp_path, "0::/app") == 6000


@pytest.mark.parametrize(
    "stat", ["", "\n", "inactive_file\n", "inactive_file many\n", "inactive_anon 5\n"]
)
def test_a_cache_that_cannot_be_read_counts_as_used(tmp_path: Path, stat: str) -> None:
    group(tmp_path / "fs/app", 10_000, 4000, None)
    (tmp_path / "fs/app/memory.stat").write_text(stat)
    assert free(tmp_path, "0::/app") == 6000


@pytest.mark.parametrize("missing", ["memory.max", "memory.current"])
def test_a_group_without_limit_or_usage_does_not_limit(tmp_path: Path, missing: str) -> None:
    group(tmp_path / "fs/app/job", 1000, 500, 0)
    (tmp_path / "fs/app/job" / missing).unlink()
    group(tmp_path / "fs/app", 10_000, 4000, 0)
    assert free(tmp_path, "0::/app/job") == 6000, "but those above it do"


def test_files_of_another_kind_do_not_limit(tmp_path: Path) -> None:
    group(tmp_path / "fs/app", "unlimited", "nothing", 0)
    assert is_unbound(free(tmp_path, "0::/app"))


def test_a_group_above_its_limit_has_nothing_free(tmp_path: Path) -> None:
    group(tmp_path / "fs/app", 10_000, 12_000, 100)
    assert free(tmp_path, "0::/app") == 0


def test_a_path_that_leaves_the_root_ends_at_it(tmp_path: Path) -> None:
    group(tmp_path / "fs", 10_000, 4000, 0)
    assert free(tmp_path, "0::/../sibling") == 6000


def test_without_control_groups_the_machine_limits(tmp_path: Path) -> None:
    with files(tmp_path / "none"):
        memory = free_host_memory()
    assert MiB(1) < memory.allocatable <= psutil.virtual_memory().total
    assert 0 < free_host_bytes() <= psutil.virtual_memory().total


@pytest.mark.parametrize(("limit", "usage"), [("RLIMIT_DATA", "VmData"), ("RLIMIT_AS", "VmSize")])
def test_limits_of_the_process_count(limit: str, usage: str) -> None:
    program = f"""
import mmap, resource
from pinfeed.memory.host import free_host_bytes
unbound = free_host_bytes()
resource.setrlimit(resource.{limit}, (1 << 32, resource.RLIM_INFINITY))
before = free_host_bytes()
held = mmap.mmap(-1, 1 << 26, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
status = open("/proc/self/status").read().splitlines()
used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("{usage}:"))
print(unbound, before, before - free_host_bytes(), (1 << 32) - used - free_host_bytes())
# Under the next limit, the interpreter gets no memory from the system.
spare = [bytes(200) for _ in range(20_000)]
spare = spare[::200]
resource.setrlimit(resource.{limit}, (1 << 20, resource.RLIM_INFINITY))
print(free_host_bytes())
"""
    if resource.getrlimit(getattr(resource, limit))[1] != resource.RLIM_INFINITY:
        pytest.skip("a limit is set already, and cannot be raised")
    out = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()
    unbound, before, taken, wrong, none = map(int, out)
    assert before < 1 << 32
    assert none == 0
    if unbound > 1 << 33:
        # Otherwise another limit would count.
        assert abs(taken - (1 << 26)) < 1 << 22
        assert abs(wrong) < 1 << 22


HIDDEN = """
import builtins, io, os
really_open = io.open

def hidden_open(file, *args, **kwargs):
    if isinstance(file, (str, os.PathLike)) and os.fspath(file).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", os.fspath(file))
    return really_open(file, *args, **kwargs)

builtins.open = io.open = hidden_open
import numpy as np, torch
from pinfeed import Config, Feeder, MiB
from pinfeed.compat.infinitybatch.tools import CudaHistory
from pinfeed.errors import EstimateError
from pinfeed.memory.host import free_host_bytes, resident_bytes
"""
"""A program in a container that hides ``/proc``."""


def without_proc(programs: Programs, program: str, *arguments: str) -> str:
    """Return what a program prints without ``/proc``."""
    done = programs.run(HIDDEN + program, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_statistics_without_proc_say_what_is_unknown(programs: Programs) -> None:
    said = without_proc(
        programs,
        """
with Feeder(np.zeros((100, 4), "f4"), batch_size=10, device="cpu") as feeder:
    list(feeder)
    print(feeder.stats)
    found = feeder.stats.as_dict()
has_peak = found["memory_peak_bytes"] > 1e6
print(feeder.stats.memory.anonymous, found["memory_anonymous_bytes"], has_peak)
history = CudaHistory()
history.append("here")
print(history)
""",
    )
    assert (
        "memory of the process: anonymous unknown, file unknown, shared unknown, pinned 0 B, peak "
        in unwrapped(said)
    )
    assert "None nan True" in said
    assert "here" in said


def test_files_and_limits_without_proc(tmp_path: Path, programs: Programs) -> None:
    np.save(tmp_path / "x.npy", np.zeros((100, 4), np.float32))
    said = without_proc(
        programs,
        """
import resource, sys
with Feeder(sys.argv[1], config=Config(preferred_batch_size=10), device="cpu") as feeder:
    print(len(list(feeder)), "batches of a file")
with Feeder(np.load(sys.argv[1], mmap_mode="r"), batch_size=20, device="cpu") as feeder:
    print(len(list(feeder)), "batches of a map")
unbound = free_host_bytes()
resource.setrlimit(resource.RLIMIT_DATA, (1 << 28, resource.RLIM_INFINITY))
print(0 < unbound, 0 <= free_host_bytes() < 1 << 28)
""",
        str(tmp_path / "x.npy"),
    )
    assert "10 batches of a file" in said
    assert "5 batches of a map" in said
    assert "True True" in said


@pytest.mark.parametrize("missing", ["RssAnon", "VmHWM"])
def test_kinds_of_memory_that_the_kernel_does_not_report(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Path("/proc/self/status").read_text().splitlines(keepends=True)
    (tmp_path / "status").write_text(
        "".join(line for line in lines if not line.startswith(f"{missing}:"))
    )
    monkeypatch.setattr("pinfeed.memory.host._STATUS", str(tmp_path / "status"))
    found = resident_bytes()
    assert (found["anonymous"] is None) == (missing == "RssAnon")
    assert all(isinstance(found[kind], int) for kind in ("file", "shared", "peak"))


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_refused_at_import(platform: str) -> None:
    program = f"import sys; sys.platform = {platform!r}; import pinfeed"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"ImportError: pinfeed runs on Linux, and this is {platform}" in done.stderr


def test_memory_of_worker_processes_is_not_called_page_locked() -> None:
    before = ProcessMemory.now()
    # A worker process hands a batch over in shared memory.
    held = torch.zeros(MiB(32), dtype=torch.uint8).share_memory_()
    held.fill_(1)
    now = ProcessMemory.now()
    assert now.shared is not None
    assert before.shared is not None
    assert now.shared - before.shared > MiB(31)
    assert now.pinned == before.pinned == locked_bytes()
    assert re.search(r"shared \d+\.\d MiB, pinned \d", str(now))


def test_resident_memory_is_reported_by_kind(tmp_path: Path) -> None:
    before = resident_bytes()
    assert set(before) == {"anonymous", "file", "peak", "shared"}
    held = anonymous(MiB(32))
    assert resident_bytes()["anonymous"] - before["anonymous"] < MiB(8), "not touched yet"
    held[::512] = 1
    assert resident_bytes()["anonymous"] - before["anonymous"] > MiB(31)
    np.zeros(MiB(16), np.uint8).tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", np.uint8, "r")
    total = int(mapped[::512].sum())
    assert total == 0
    assert resident_bytes()["file"] - before["file"] > MiB(15)
    del held
    assert resident_bytes()["anonymous"] - before["anonymous"] < MiB(8)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([120] * 40, id="equal"),
        pytest.param(list(range(81, 121)), id="growing"),
    ],
)
def test_a_loop_that_writes_back_takes_its_planned_memory(sizes: list[int]) -> None:
    x = np.ones((200, 4096), np.float32)
    for rows in ([np.arange(2)] * 3, [np.arange(size) for size in sizes]):
        # The first loop loads what the later ones need.
        peak = before = resident_bytes()["anonymous"]
        with Feeder(x, rows=rows, device="cpu") as feeder:
            for batch in feeder.batches():
                batch.write_back(batch.data)
                peak = max(peak, resident_bytes()["anonymous"])
    assert peak - before < feeder.plan.host_bytes + MiB(4)


PROGRAM = """
import os, sys, numpy as np, torch
from pathlib import Path
from pinfeed import Config, Feeder, MiB, NpyStore, rows
from pinfeed.memory.host import resident_bytes

def stream(path, order, limit, keep):
    # The first use of a feeder takes memory that does not depend on the file.
    with Feeder(np.zeros((4, 1024), np.float32), batch_size=2) as small:
        list(small)
    # This resets the peak.
    Path("/proc/self/clear_refs").write_text("5")
    now = resident_bytes()
    before = now["anonymous"] + now["file"] + now["shared"]
    with NpyStore(path, keep_cache=keep) as store:
        config = Config(cpu_memory_limit=MiB(limit), preferred_batch_size=1024, depth=2)
        with Feeder(store, config=config, rows=order, device="cpu") as feeder:
            for _ in range(2):
                for x in feeder:
                    pass
            memory, plan = feeder.stats.memory, feeder.plan
            taken = plan.host_bytes, plan.page_cache_bytes, memory.file
            print(memory.peak - before, *taken, plan.notes[0], flush=True)

with Feeder(np.zeros((4, 1024), np.float32), batch_size=2) as first:
    list(first)
for order, limit, keep in eval(sys.argv[2]):
    # Each has a process of its own, which need not import everything again.
    child = os.fork()
    if not child:
        stream(sys.argv[1], eval(order), limit, keep)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
WAYS = {
    ("rows.sequential()", 64, True): "in sequence",
    ("rows.sequential()", 64, False): "in sequence",
    ("rows.shuffled(0)", 64, True): "page cache",
    ("rows.shuffled(0)", 64, False): "row by row",
    ("rows.shuffled(0)", 400, True): "memory map",
    ("rows.shuffled(0)", 400, False): "into RAM",
    ("rows.block_shuffled(0, block_rows=256)", 128, True): "read ahead into buffers",
    ("rows.block_shuffled(0, block_rows=256)", 128, False): "read ahead into buffers",
    ("rows.block_shuffled(0, block_rows=256)", 40, True): "one window ahead",
    ("rows.block_shuffled(0, block_rows=256)", 40, False): "one window ahead",
}


def test_resident_memory_stays_within_the_plan(tmp_path: Path, programs: Programs) -> None:
    """The peak grows by at most the plan and 32 MiB, in every way in which a file is read."""
    # The file is a hole, which takes no room on the disk.
    np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (MiB(256) // 4096, 1024))
    done = programs.run(PROGRAM, tmp_path / "x.npy", list(WAYS), timeout_s=100)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line, (case, way) in zip(lines, WAYS.items(), strict=True):
        check_growth(line, case[1], way)


def check_growth(line: str, limit: int, way: str) -> None:
    *numbers, note = line.split(maxsplit=4)
    growth, own, cached, mapped = map(int, numbers)
    planned = own + cached
    assert way in note
    assert planned <= MiB(limit)
    assert growth <= planned + MiB(32), (
        f"{note}: grew by {growth >> 20} MiB, planned {planned >> 20}"
    )
    assert mapped < MiB(400) + cached, "libraries, and the file only if it is mapped"

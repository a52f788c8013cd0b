"""The ``pinfeed`` command: what it prints, for people and for scripts, its exit statuses, and that it says what is so."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

import pinfeed
from pinfeed import Config, Feeder, GiB, KiB, MiB, MmapStore, rows
from pinfeed.cli.bench import command as bench
from pinfeed.cli.bench.dataloader import Rows
from pinfeed.cli.doctor import disk
from pinfeed.cli.doctor.advice import Ceilings, Data, advise, spelled
from pinfeed.cli.doctor.machine import Gpu, Host, Package, gpu_problem, install_line, packages
from pinfeed.cli.inspect import look
from pinfeed.cli.main import main, reporting
from pinfeed.cli.measure import bandwidth, page_cache
from pinfeed.cli.measure.page_cache import cached_share, drop, read_through
from pinfeed.cli.plan import plan_values
from pinfeed.cli.terminal import options
from pinfeed.cli.terminal.output import Report, json_of, wrapped
from pinfeed.devices.planned_gpu import PlannedGpu
from pinfeed.errors import DeviceError
from pinfeed.memory.host import free_host_bytes, host_limits, lock_limit
from pinfeed.testing import SimDevice

ROOT = Path(__file__).parents[2]
X = np.random.default_rng(0).normal(size=(500, 3, 8)).astype(np.float32)

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands run in a folder of their own, with a few files."""
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", X)
    np.save("s-0.npy", X[:300])
    np.save("s-1.npy", X[300:])
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def values(*arguments: str, status: int = 0) -> dict[str, Any]:
    """What ``--json`` prints: one object, and nothing else."""
    result = run(*arguments, "--json")
    assert result.exit_code == status, result.output
    found = json.loads(result.stdout)
    assert (found["pinfeed"], found["command"]) == (pinfeed.__version__, arguments[0])
    return dict(found)


def python(*arguments: str, stdout: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env=environment,
    )


# ---- the command ---------------------------------------------------------------------------------
def test_as_a_program() -> None:
    """In a process of its own, and without torch."""
    good = python("-X", "importtime", "-m", "pinfeed", "inspect", "x.npy")
    assert good.returncode == 0
    assert good.stdout.startswith("x.npy\n  rows       500 of shape (3, 8)\n")
    assert "pinfeed.cli.inspect" in good.stderr
    assert not re.search(r"\| +torch$", good.stderr, re.MULTILINE), "torch is not needed for this"
    Path("x.npy").write_bytes(b"")
    assert python("-m", "pinfeed", "inspect", "x.npy").returncode == 1
    failed = python("-m", "pinfeed", "plan", "x.npy")
    assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (3, "", 1)
    assert failed.stderr.startswith("pinfeed: x.npy is empty (0 bytes)")


def test_help_and_version_need_no_torch() -> None:
    lines = ["import sys", "from pinfeed.cli.main import main"]
    for arguments in (["--help"], ["doctor", "--help"], ["--version"]):
        assert max(map(len, run(*arguments).stdout.splitlines())) <= 80
        lines.append(f"main({arguments}, standalone_mode=False)")
    done = python("-c", "\n".join([*lines, "assert 'torch' not in sys.modules"]))
    assert (done.returncode, done.stderr) == (0, "")
    assert "Commands:" in done.stdout
    assert pinfeed.__version__ in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan"], "Missing argument 'FILE...'"),
        (["bench"], "Missing argument 'FILE...'"),
        (["inspect"], "Missing argument 'FILE...'"),
        (["polish"], "No such command 'polish'"),
        (
            ["plan", "x.npy", "--cpu-limit", "2G"],
            "'2G' is not a size; expected bytes, at least 1, such as 2GiB, 512MiB or 1.5e9",
        ),
        (["plan", "x.npy", "--cpu-limit", "0"], "'0' is not a size"),
        (
            ["plan", "x.npy", "--shuffle", "--block-rows", "8"],
            "--shuffle and --block-rows: give one of them",
        ),
        (
            ["plan", "x.npy", "--seed", "3"],
            "--seed 3 was given, and neither --shuffle nor --block-rows, which use it",
        ),
        (
            ["bench", "x.npy", "--seed", "0"],
            "--seed 0 was given, and neither --shuffle nor --block-rows",
        ),
        (["plan", "x.npy", "--depth", "-1"], "Invalid value for '--depth'"),
        (
            ["bench", "x.npy", "--workers", "two"],
            "'two' is not a list of numbers; expected such as 0 or 0,2,8",
        ),
        (["doctor", "--rows", "5"], "--rows and --row-bytes go together"),
        (["doctor", "x.npy", "--row-bytes", "5"], "a file has its own; give one of them"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (["plan", "nothing.npy"], "FileMissing", "nothing.npy: no such file"),
        (["plan", "nothing-*.npy"], "FileMissing", "no file matches this pattern"),
        (["plan", "x.npy", "s-0.npy", "y.npy"], "StoreError", "shards do not match"),
        (["plan", "x.npy", "--device", "abacus"], "DeviceError", "device='abacus' is not a device"),
        (["bench", "nothing.npy"], "FileMissing", "nothing.npy: no such file"),
        (["doctor", "nothing.npy"], "FileMissing", "nothing.npy: no such file"),
    ],
)
def test_what_cannot_be_done(arguments: list[str], kind: str, said: str) -> None:
    np.save("y.npy", X.astype(np.float64))
    result = run(*arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (3, "", 1)
    assert said in result.stderr
    found = values(*arguments, status=3)
    assert found["kind"] == kind
    assert said in found["error"]


def test_ctrl_c_ends_it_quietly() -> None:
    @click.command()
    @reporting
    def command() -> Report:
        raise KeyboardInterrupt

    result = CliRunner().invoke(command, ["--json"])
    assert (result.exit_code, result.output) == (130, "")


def test_what_cannot_be_printed_is_no_finding() -> None:
    with open("/dev/full", "w") as full:
        done = python("-m", "pinfeed", "inspect", "x.npy", stdout=full)
    assert (done.returncode, done.stderr) == (3, "pinfeed: stdout: No space left on device\n")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("2GiB", GiB(2)),
        ("512MiB", MiB(512)),
        ("0.5 kib", KiB(0.5)),
        ("1TiB", GiB(1024)),
        ("1.5e9", 1_500_000_000),
        ("2GB", 2_000_000_000),
        ("7", 7),
        ("7B", 7),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert options.size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1", "2G", "2GiBs", "1e999", "nan", "0.5", "1,5e9", "2 G iB", "0x10", "9e18GiB"],
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size; expected bytes"):
        options.size(text)


def test_what_is_printed_fits_a_terminal() -> None:
    assert max(map(len, wrapped("ab " * 100, first="  ", rest="    ").splitlines())) <= 80
    assert wrapped("x" * 100) == "x" * 100, "a path is not broken"
    assert json.loads(json_of({"a": float("nan"), "b": (1, {"c": float("inf")})})) == {
        "a": None,
        "b": [1, {"c": None}],
    }


# ---- inspect -------------------------------------------------------------------------------------
def test_inspect_says_what_is_there() -> None:
    result = run("inspect", "x.npy")
    assert result.exit_code == 0
    for said in (
        "500 of shape (3, 8)",
        "float32",
        "C: each row in one piece",
        "96 bytes",
        "multiples of 32 bytes",
        "version 1.0, 128 bytes",
    ):
        assert said in result.stdout
    (file,) = values("inspect", "x.npy")["files"]
    assert file == {
        "path": "x.npy",
        "kind": "npy",
        "bytes": 48128,
        "version": 1,
        "shape": [500, 3, 8],
        "dtype": "float32",
        "order": "C",
        "header_bytes": 128,
        "row_bytes": 96,
        "expected_bytes": 48128,
        "row_alignment": 32,
        "damage": [],
    }


def test_inspect_of_the_other_byte_order() -> None:
    np.save("big.npy", X.astype(">f4"))
    assert look("big.npy").details["dtype"] == "float32, big-endian"
    assert not look("big.npy").damage


def test_inspect_shards() -> None:
    result = run("inspect", "s-*.npy")
    assert result.exit_code == 0
    assert "Together: 500 rows, 46.9 KiB, in 2 shards" in result.stdout
    assert values("inspect", "s-0.npy", "s-1.npy")["source"] == {
        "files": 2,
        "rows": 500,
        "bytes": 48000,
    }


def test_inspect_shards_that_are_none_of_one_source() -> None:
    np.save("s-2.npy", X.reshape(500, -1))
    result = run("inspect", "s-*.npy")
    assert result.exit_code == 1
    assert "not shards of one source: s-0.npy has rows of shape (3, 8), float32" in " ".join(
        result.stdout.split()
    )
    assert values("inspect", "s-*.npy", status=1)["source"] is None


class Bomb:
    """Leaves a trace where it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("unpickled"),)


def raw(change: Callable[[bytes], bytes]) -> Callable[[str], None]:
    return lambda path: void(Path(path).write_bytes(change(Path("x.npy").read_bytes())))


def void(_: object) -> None:
    """Nothing."""


def saved(array: Any) -> Callable[[str], None]:
    return lambda path: np.save(path, array, allow_pickle=True)


DAMAGE: dict[str, tuple[Callable[[str], None], str]] = {
    "missing": (lambda path: None, "no such file"),
    "empty": (lambda path: Path(path).touch(), "is empty (0 bytes)"),
    "text": (raw(lambda b: b"a,b\n1,2\n3,4\n5,6\n"), "is not a .npy file (it starts with b'a,b"),
    "zip": (
        raw(lambda b: b"PK\x03\x04" + b[4:]),
        "looks like a zip archive: of a .npz save each array alone",
    ),
    "pickle": (raw(lambda b: b"\x80\x04" + b[2:]), "looks like a pickle"),
    "hdf5": (raw(lambda b: b"\x89HDF\r\n\x1a\n" + b[8:]), "looks like an HDF5 file"),
    "cut in the header": (raw(lambda b: b[:60]), "the .npy header is damaged"),
    "bad header": (raw(lambda b: b[:20] + b"?????" + b[25:]), "the .npy header is damaged"),
    "negative shape": (raw(lambda b: b.replace(b"(500,", b"(-50,")), "the .npy header is damaged"),
    "unknown version": (raw(lambda b: b[:6] + b"\x09" + b[7:]), ".npy version 9.0 is not known"),
    "huge header": (
        raw(lambda b: b[:6] + b"\x02\x00\xff\xff\xff\x7f" + b[12:]),
        "a header of 2147483647 bytes",
    ),
    "truncated": (
        raw(lambda b: b[:-100]),
        "is truncated: 500 rows of 96 bytes from byte 128 on need 48128 bytes",
    ),
    "extra bytes": (raw(lambda b: b + b[-192:]), "192 bytes more than its header tells, 2.00 rows"),
    "objects": (saved(np.array([{}, Bomb()], dtype=object)), "Python objects are never unpickled"),
    "structured": (
        saved(np.zeros(3, [("a", "f4"), ("b", "i8")])),
        "save each field as an array of its own",
    ),
    "dates": (saved(np.zeros(3, "M8[s]")), 'convert with .view("int64")'),
    "bfloat16": (saved(X.astype(ml_dtypes.bfloat16)), 'MmapStore(path, dtype="bfloat16")'),
    "fortran": (saved(np.asfortranarray(X)), "Fortran order"),
    "no rows": (saved(X[:0]), "has no rows"),
    "a number": (saved(np.float32(3)), "holds a single number"),
    "a folder": (
        lambda path: Path(path).mkdir(),
        "is a directory; it has no .npy files and no checkpoint",
    ),
    "a pipe": (os.mkfifo, "is no regular file"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_inspect_says_what_is_wrong(kind: str) -> None:
    make, said = DAMAGE[kind]
    make("d.npy")
    result = run("inspect", "d.npy")
    assert result.exit_code == 1
    assert said in " ".join(result.stdout.split())
    assert not result.stderr
    found = values("inspect", "x.npy", "d.npy", status=1)
    assert said in found["findings"][0]
    assert [bool(file["damage"]) for file in found["files"]] == [False, True]
    assert not Path("unpickled").exists()


def test_inspect_of_a_folder_with_files_names_them(folder: Path) -> None:
    (damage,) = look(str(folder)).damage
    assert damage.endswith(f"give its files: {folder}/*.npy")


def test_inspect_of_a_checkpoint_of_ranks(folder: Path) -> None:
    for rank in range(2):
        pinfeed.checkpoint.save(folder / "run" / f"{rank}-of-2", step=rank)
    assert (
        "give the parts of its checkpoint, one for each rank: run/*-of-*"
        in values("inspect", "run", status=1)["findings"][0]
    )
    assert [part["kind"] for part in values("inspect", "run/*-of-*")["files"]] == ["checkpoint"] * 2


def test_inspect_safetensors() -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    save_file({"embedding.weight": X, "bias": X[0, 0]}, "m.safetensors")
    result = run("inspect", "m.safetensors")
    assert result.exit_code == 0
    assert "embedding.weight  (500, 3, 8)  F32" in result.stdout
    assert values("inspect", "m.safetensors")["files"][0]["tensors"][0] == {
        "name": "bias",
        "shape": [8],
        "dtype": "F32",
    }
    Path("m.safetensors").write_bytes(b"\xff" * 100)
    assert (
        "is not a safetensors file, or it is damaged"
        in values("inspect", "m.safetensors", status=1)["findings"][0]
    )


def test_inspect_checkpoint() -> None:
    pinfeed.checkpoint.save("run", model=torch.nn.Linear(2, 2), step=7)
    result = run("inspect", "run")
    assert result.exit_code == 0
    assert "All files agree with their checksums." in result.stdout
    assert values("inspect", "run")["files"][0]["objects"] == {"model": "state", "step": "value"}
    path = Path("run/00000001/model.pt")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert "its checksum is wrong in piece 0" in values("inspect", "run", status=1)["findings"][0]


# ---- plan ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "feeder"),
    [
        (["--batch-size", "64"], {"batch_size": 64}),
        (
            ["--batch-size", "64", "--shuffle", "--seed", "3"],
            {"batch_size": 64, "shuffle": True, "seed": 3},
        ),
        (
            ["--batch-size", "9", "--block-rows", "50", "--depth", "0"],
            {"batch_size": 9, "rows": rows.block_shuffled(block_rows=50), "depth": 0},
        ),
        (["--cpu-limit", "4MiB"], {"config": Config(cpu_memory_limit=MiB(4))}),
        (
            ["--cpu-limit", "4MiB", "--depth", "5"],
            {"config": Config(cpu_memory_limit=MiB(4)), "depth": 5},
        ),
        (
            ["--cpu-limit", "1GiB", "--batch-size", "3"],
            {"config": Config(cpu_memory_limit=GiB(1), preferred_batch_size=3)},
        ),
    ],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=no_gpu)])
def test_plan_is_the_feeders(arguments: list[str], feeder: dict[str, Any], device: str) -> None:
    """For a GPU that is not here, that of a feeder on a device with memory of its own."""
    if device == "cuda" and "config" in feeder:
        limits = {
            "cpu_memory_limit": feeder["config"].cpu_memory_limit,
            "preferred_batch_size": feeder["config"].preferred_batch_size,
        }
        arguments, feeder = (
            [*arguments, "--gpu-limit", "1MiB"],
            {**feeder, "config": Config(gpu_memory_limit=MiB(1), **limits)},
        )
    with Feeder("x.npy", device="cpu" if device == "cpu" else SimDevice(), **feeder) as expected:
        found = values("plan", "x.npy", "--device", device, *arguments)
        assert found["plan"] == json.loads(json_of(plan_values(expected.plan)))
    assert found["device"] == device
    assert found["source"]["rows"] == 500
    assert (found["plan"]["device_bytes"] > 0) == (device == "cuda")


def test_plan_in_words() -> None:
    result = run("plan", "s-0.npy", "s-1.npy", "--shuffle", "--device", "cpu")
    assert result.exit_code == 0
    for said in (
        "s-0.npy and 1 more shard: 500 rows of shape (3, 8), float32, 46.9 KiB",
        "shuffled",
        "the order of the rows",
        "rows were taken",
    ):
        assert said in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_plan_of_sources_side_by_side() -> None:
    """Inputs, in shards, and labels: the plan is that of a feeder over a tuple."""
    np.save("y.npy", np.arange(500))
    with (
        MmapStore(["s-0.npy", "s-1.npy"]) as store,
        Feeder((store, "y.npy"), batch_size=32, device="cpu") as expected,
    ):
        found = values(
            "plan", "s-0.npy", "s-1.npy", "--with", "y.npy", "--batch-size", "32", "--device", "cpu"
        )
        assert found["plan"] == json.loads(json_of(plan_values(expected.plan)))
    assert [(source["rows"], source["dtype"]) for source in (found["source"], *found["with"])] == [
        (500, "float32"),
        (500, "int64"),
    ]
    assert values("plan", "x.npy")["with"] == []
    shown = run("plan", "x.npy", "--with", "s-*.npy", "--with", "y.npy").stdout
    assert shown.startswith("x.npy: 500 rows")
    assert "\nwith s-0.npy and 1 more shard: 500 rows" in shown
    assert "\nwith y.npy: 500 rows of shape (), int64" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_sources_side_by_side_have_equally_many_rows() -> None:
    for command in ("plan", "bench"):
        result = run(command, "x.npy", "--with", "s-0.npy")
        assert result.exit_code == 3
        assert (
            "unequal numbers of rows: x.npy has 500, s-0.npy has 300; expected equally many"
            in result.stderr
        )


def test_labels_among_the_shards_are_told_apart() -> None:
    np.save("y.npy", np.arange(500))
    result = run("plan", "x.npy", "y.npy")
    assert result.exit_code == 3
    assert "give what goes with them, such as labels, as --with FILE" in result.stderr


@no_gpu
def test_plan_for_a_gpu_that_is_not_here() -> None:
    assert (
        "There is no GPU here"
        in run("plan", "x.npy", "--device", "cuda", "--batch-size", "8").stdout
    )
    result = run("plan", "x.npy", "--device", "cuda", "--cpu-limit", "1GiB")
    assert result.exit_code == 3
    assert "give gpu_memory_limit (--gpu-limit)" in result.stderr
    with pytest.raises(DeviceError, match="there is no GPU here"):
        Feeder(X, batch_size=8, device=PlannedGpu(), route="direct")


def test_a_plan_that_does_not_fit_is_a_finding() -> None:
    found = values("plan", "x.npy", "--cpu-limit", "1KiB", status=1)
    assert found["plan"] is None
    assert "it does not fit: one row per slot needs" in found["findings"][0]
    assert "! it does not fit" in run("plan", "x.npy", "--cpu-limit", "1KiB").stdout


def test_a_batch_that_does_not_fit_is_a_finding() -> None:
    (finding,) = values(
        "plan", "x.npy", "--cpu-limit", "3200KiB", "--depth", "1", "--batch-size", "400", status=1
    )["findings"]
    assert re.fullmatch(r"batches of 400 rows were wanted; the limits hold \d+", finding)
    assert not values("plan", "x.npy", "--cpu-limit", "8MiB", "--batch-size", "4000")["findings"], (
        "there are only 500 rows"
    )


# ---- bench ---------------------------------------------------------------------------------------
@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(bandwidth, "_MEMORY_BYTES", MiB(1))
    return ["--seconds", "0.01", "--device", "cpu"]


def test_bench(quick: list[str]) -> None:
    found = values(
        "bench", "s-0.npy", "s-1.npy", "--shuffle", "--batch-size", "32", "--workers", "0,1", *quick
    )
    assert (found["batch_size"], found["order"], found["device"], found["warm"]) == (
        32,
        "shuffled",
        "cpu",
        True,
    )
    assert found["ceilings_gb_per_s"]["copy in memory"] > 0
    others = [f"DataLoader, {what}, {n} workers" for what in ("batches", "rows") for n in (0, 1)]
    assert [timing["name"] for timing in found["contestants"]] == ["pinfeed", *others]
    for timing in found["contestants"]:
        assert timing["problem"] == ""
        assert timing["first_epoch"]["rows"] <= 500
        assert timing["later_epochs"]["rows_per_s"] > 0
        assert timing["pinfeed_ratio"] > 0
    assert found["contestants"][0]["pinfeed_ratio"] == 1


def test_bench_of_sources_side_by_side(quick: list[str]) -> None:
    np.save("y.npy", np.arange(500))
    found = values(
        "bench",
        "x.npy",
        "--with",
        "y.npy",
        "--shuffle",
        "--batch-size",
        "32",
        "--workers",
        "0,1",
        *quick,
    )
    assert found["with"][0]["dtype"] == "int64"
    for timing in found["contestants"]:
        assert timing["problem"] == ""
        later = timing["later_epochs"]
        assert later["row_nbytes"] == 3 * 8 * 4 + 8
        assert later["gb_per_s"] == pytest.approx(later["rows_per_s"] * 104 / 1e9)
    with MmapStore("x.npy") as x, MmapStore("y.npy") as y:
        trial = bench.Trial([x, y], rows.shuffled(1), 32, "cpu", 0.01)
        np.save("z.npy", np.arange(500)[::-1])
        # What is compared with.
        trial.sources = [["x.npy"], ["z.npy"]]
        assert [timing.equal for timing in trial.timings([])] == [False]


def test_bench_cold_in_words(quick: list[str]) -> None:
    result = run("bench", "x.npy", "--cold", "--workers", "0", *quick)
    assert result.exit_code == 0, result.output
    for said in (
        "cold: dropped from the page cache",
        "disk, in sequence",
        "DataLoader, rows, 0 workers",
        "pinfeed ",
    ):
        assert said in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("block_rows", [None, 8])
def test_everybody_has_the_same_rows(block_rows: int | None) -> None:
    """The rows that others are given are those of the feeder, epoch by epoch; a difference is found."""
    order, _ = options.order_of(block_rows is None, block_rows, 5)
    with MmapStore(["s-0.npy", "s-1.npy"]) as store:
        trial = bench.Trial([store], order, 32, "cpu", 0.01)
        with (
            trial._feeder() as epochs,
            bench.loader_epochs(
                trial.sources, trial.batches, "cpu", n_workers=0, by_row=True
            ) as others,
        ):
            for epoch in (0, 1):
                assert torch.equal(torch.cat(list(epochs(epoch))), torch.cat(list(others(epoch))))
        assert all(timing.equal for timing in trial.timings([]))
        trial.sources = [["s-1.npy", "s-0.npy"]]
        timings = list(trial.timings([]))
    assert [timing.equal for timing in timings] == [False]
    report = bench._report(trial, "shuffled", {"copy in memory": 1.0}, timings)
    assert report.findings == ("pinfeed: its batches are not the rows of the files",)


def test_a_loader_that_fails_says_why(quick: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def collate(_: Any) -> Any:
        raise RuntimeError("no room\nat all")

    # Of rows; batches are not collated.
    monkeypatch.setattr(torch.utils.data._utils.collate, "default_collate", collate)
    found = values("bench", "x.npy", "--workers", "0", *quick)
    assert [timing["problem"] for timing in found["contestants"]] == [
        "",
        "",
        "RuntimeError: no room at all",
    ]
    assert (
        found["contestants"][2]["first_epoch"] is found["contestants"][2]["pinfeed_ratio"] is None
    )
    shown = " ".join(run("bench", "x.npy", "--workers", "0", *quick).stdout.split())
    assert "DataLoader, rows, 0 workers failed" in shown
    assert "DataLoader, rows, 0 workers: RuntimeError: no room at all" in shown


def test_rows_of_maps() -> None:
    """One, some in order, some in disorder: owning tensors, in this machine's byte order."""
    np.save("s-0.npy", X[:300].astype(">f4"))
    np.save("s-1.npy", X[300:].astype(">f4"))
    for found in (Rows(["x.npy"]), Rows(["s-0.npy", "s-1.npy"])):
        assert len(found) == 500
        for chosen in (np.array([499, 0, 300, 299]), np.arange(250, 350)):
            np.testing.assert_array_equal(found[chosen].numpy(), X[chosen])
        assert all(torch.equal(found[row], torch.from_numpy(X[row])) for row in (0, 299, 300, 499))


def test_bench_of_what_cannot_be_warm(quick: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "free_host_bytes", lambda: 1000)
    result = run("bench", "x.npy", "--warm")
    assert result.exit_code == 3
    assert "--warm: the files have 46.9 KiB; 1000 B of memory are free" in result.stderr
    assert values("bench", "x.npy", "--workers", "0", *quick)["warm"] is False


def test_bench_of_rows_without_bytes() -> None:
    np.save("none.npy", X[:, :0])
    assert "rows of no bytes; there is nothing to time" in run("bench", "none.npy").stderr


# ---- the page cache, and ceilings ----------------------------------------------------------------
def test_files_are_brought_into_the_page_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernel then keeps there is its own affair, so that it is told here."""
    assert read_through(["x.npy", "s-0.npy"])
    assert not read_through(["x.npy"], seconds=-1), "it ends when the time is up"
    n_there = 3
    monkeypatch.setattr(
        page_cache,
        "cached_pages",
        lambda fd, begin, end: np.arange(-(-(end - begin) // 4096)) < n_there,
    )
    n_pages = sum(-(-os.path.getsize(path) // 4096) for path in ("x.npy", "s-0.npy"))
    assert cached_share(["x.npy", "s-0.npy"]) == 6 / n_pages
    asked: list[int] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, offset, length, advice: asked.append(advice)
    )
    monkeypatch.setattr(page_cache.time, "sleep", lambda _: None)
    drop(["x.npy"])
    assert asked == [os.POSIX_FADV_DONTNEED] * 20, "some pages stay: they may be in use"
    n_there, asked = 0, []
    drop(["x.npy"])
    assert asked == [os.POSIX_FADV_DONTNEED]


def test_the_disk_is_measured_on_a_scratch_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_SPAN_BYTES", MiB(8))
    before = sorted(folder.iterdir())
    found, problem = disk.look_at_disk(None, 0, 4096, str(folder))
    assert sorted(folder.iterdir()) == before
    assert found is not None
    assert not problem
    assert found.nbytes == MiB(8)
    assert found.sequential > 0
    assert found.random is not None


def test_the_disk_is_measured_on_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_SPAN_BYTES", MiB(8))
    np.save("large.npy", np.ones((12, 1 << 20), np.uint8))
    found, _ = disk.look_at_disk("large.npy", 128, 1 << 20, None)
    assert found is not None
    assert (found.what, found.nbytes, found.random) == ("large.npy", MiB(8), None), (
        "too few rows for a random order"
    )
    assert ("dropped from the page cache" in str(found)) == found.cold


def test_memory_is_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_SPAN_BYTES", MiB(8))
    found, _ = disk.look_at_disk(None, 0, 4096, "/dev/shm")
    assert found is not None
    assert not found.cold
    assert "100% of which stayed in the page cache" in str(found)


def test_a_folder_that_cannot_be_written() -> None:
    found, problem = disk.look_at_disk(None, 0, 4096, "/proc")
    assert found is None
    assert problem.startswith("the disk could not be measured: no scratch file in /proc (")
    assert problem.endswith("; --dir names a folder that can be written")


# ---- doctor --------------------------------------------------------------------------------------
@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_SPAN_BYTES", MiB(8))
    monkeypatch.setattr(bandwidth, "_MEMORY_BYTES", MiB(64))


@pytest.mark.usefixtures("small")
def test_doctor_agrees_with_memory() -> None:
    found = values("doctor")
    limits = host_limits()
    assert found["host"]["memory"] == limits[0].total
    assert found["host"]["lock_limit"] == lock_limit()
    assert found["host"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert [limit["name"] for limit in found["host"]["limits"]] == [
        limit.name for limit in limits[1:] if limit.total < limits[0].total
    ]
    assert abs(found["host"]["free"] - free_host_bytes()) < limits[0].total / 4, (
        "memory comes and goes meanwhile"
    )
    assert found["gpu"]["torch"] == torch.__version__
    assert found["gb_per_s"]["memory_copy"] > 0
    assert found["gb_per_s"]["disk"]["sequential"] > 0
    assert found["data"] is found["advice"] is None


def test_doctor_sees_the_limits_of_the_process() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (1 << 32, 1 << 32))"
    done = python("-c", f"{limit}; from pinfeed.cli.doctor.machine import Host; print(Host.now())")
    assert "Limit(name='RLIMIT_DATA', total=4294967296" in done.stdout
    assert 0 < int(re.findall(r"Host\(.*? free=(\d+)", done.stdout)[0]) < 1 << 32


@pytest.mark.usefixtures("small")
def test_doctor_of_a_file() -> None:
    result = run("doctor", "x.npy", "--batch-size", "10")
    assert result.exit_code == 0, result.output
    for said in (
        "This machine",
        "At best",
        "Optional packages",
        "Route",
        "Would pinfeed help?",
        "x.npy: 500 rows",
        "batches of 10 rows",
    ):
        assert said in result.stdout
    assert max(len(line) for line in result.stdout.splitlines() if "pip install" not in line) <= 80
    found = values("doctor", "--rows", "1000000000", "--row-bytes", "1MiB", "--batch-size", "2")
    assert found["data"]["nbytes"] == 1_000_000_000 << 20
    assert found["data"]["batch_ms"]["memory"] > 0
    assert found["advice"]["helps"] == "yes"


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    # As where it is not installed.
    monkeypatch.setitem(sys.modules, "fsspec", None)
    found = {package.name: package for package in packages(Gpu("", 0, 0, 0, "2.9", None, None, ""))}
    assert not found["fsspec"].here
    assert found["matplotlib"].here
    assert "CuPy" not in found, "nobody without a GPU needs it"
    assert (
        install_line([found["matplotlib"], found["fsspec"]]) == 'pip install "pinfeed[plot,remote]"'
    )


@no_gpu
@pytest.mark.parametrize(("built", "extra"), [("12.8", "cuda12"), ("13.0", "cuda13")])
def test_cupy_matches_torch(built: str, extra: str) -> None:
    cupy = packages(Gpu("H200", 1, GiB(140), GiB(139), "2.9", built, "13.0", ""))[0]
    assert (cupy.name, cupy.extra, cupy.here) == ("CuPy", extra, False)
    assert "PinnedStore needs page-locked memory" in cupy.problem


def test_extras_are_those_of_the_project() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for package in packages(Gpu("", 0, 0, 0, "2.9", None, None, "")):
        assert f'\n{package.extra} = ["{package.name}' in text
    assert all(f"\ncuda{version} = [" in text for version in (12, 13))


@pytest.mark.parametrize(
    ("torch_cuda", "driver", "said"),
    [
        (None, None, ""),
        ("12.8", None, ""),
        (None, "12.4", "is built without CUDA: pip install --force-reinstall torch"),
        ("13.0", "12.4", "is built for CUDA 13.0, the driver knows CUDA 12.4: update the driver"),
        ("12.8", "12.4", "finds no usable GPU; a reason"),
    ],
)
def test_why_there_is_no_gpu(torch_cuda: str | None, driver: str | None, said: str) -> None:
    found = gpu_problem("2.9", torch_cuda, driver, "a reason")
    assert said in found
    assert bool(found) == bool(said)


RATES = Ceilings(memory=10.0, sequential=2.0, random=0.2, link=50.0)


@pytest.mark.parametrize(
    ("nbytes", "gpu", "helps", "said"),
    [
        (GiB(40), "H200", "no", "fits on the GPU, which has 100.0 GiB free: put it there once"),
        (GiB(90), "H200", "perhaps", "would fit on the GPU"),
        (GiB(200), "H200", "perhaps", "fits in memory (500.0 GiB free), and not on the GPU"),
        (GiB(400), "H200", "yes", "streams it from the disk and copies batches to the GPU"),
        (
            GiB(40),
            "",
            "perhaps",
            "there is no GPU to be fed. If numpy.load and indexing are fast enough, keep them",
        ),
        (GiB(400), "", "yes", "also without a GPU"),
    ],
)
def test_whether_it_helps(nbytes: int, gpu: str, helps: str, said: str) -> None:
    data = Data(n_rows=nbytes >> 12, row_nbytes=4096, batch_size=1000)
    advice = advise(data, RATES, free_host=GiB(500), gpu=gpu, free_gpu=GiB(100) if gpu else 0)
    assert advice.helps == helps
    assert said in " ".join(advice.why)


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (12_345.6, "12,346 ms"),
        (9.96, "10 ms"),
        (9.94, "9.9 ms"),
        (0.01234, "0.012 ms"),
        (0.0000123, "less than 0.001 ms"),
    ],
)
def test_milliseconds_as_people_read_them(ms: float, text: str) -> None:
    assert spelled(ms) == text


def test_times_of_a_batch() -> None:
    data = Data(n_rows=1 << 30, row_nbytes=1000, batch_size=1000)
    assert RATES.batch_ms(data.batch_nbytes) == pytest.approx(
        {"memory": 0.1, "disk in sequence": 0.5, "disk at random": 5, "link": 0.02}
    )
    why = advise(data, RATES, free_host=GiB(1), gpu="", free_gpu=0).why
    assert "0.5 ms at best if the disk is read in sequence" in why[1]
    assert "fully random order (shuffle=True) take 5 ms" in why[2]
    unmeasured = advise(data, Ceilings(10.0), free_host=GiB(1), gpu="", free_gpu=0)
    assert "The disk was not measured" in unmeasured.why[1]


def test_cores_and_limits_in_words() -> None:
    host = Host.now()
    assert host.usable_cores <= host.cores
    assert host.core_quota is None or host.core_quota > 0
    assert Package("a", "b", "c", here=True).problem == ""


# ---- on a GPU ------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.usefixtures("small")
def test_doctor_on_a_gpu() -> None:
    found = values("doctor", "--rows", "100000", "--row-bytes", "512", "--batch-size", "4096")
    assert found["gpu"]["name"] == torch.cuda.get_device_name()
    assert found["gpu"]["driver_cuda"]
    assert min(found["gb_per_s"]["link"].values()) > 0
    assert found["advice"]["helps"] == "no"
    assert (
        "Rows of this size in a PinnedStore go by the" in found["route"]
        or "needs CuPy" in found["route"]
    )
    assert run("doctor", "x.npy").exit_code == 0


@pytest.mark.gpu
def test_plan_on_a_gpu() -> None:
    config = Config(cpu_memory_limit=MiB(64), gpu_memory_limit=MiB(1))
    with Feeder("x.npy", config=config, shuffle=True, device="cuda") as feeder:
        found = values(
            "plan",
            "x.npy",
            "--cpu-limit",
            "64MiB",
            "--gpu-limit",
            "1MiB",
            "--shuffle",
            "--device",
            "cuda",
        )
        assert found["plan"] == json.loads(json_of(plan_values(feeder.plan)))
        assert found["device"] == feeder.device


@pytest.mark.gpu
def test_bench_on_a_gpu() -> None:
    found = values(
        "bench", "x.npy", "--shuffle", "--seconds", "0.05", "--workers", "0", "--device", "cuda"
    )
    assert found["device"].startswith("cuda")
    assert found["ceilings_gb_per_s"]["link to the GPU"] > 0
    assert [timing["problem"] for timing in found["contestants"]] == ["", "", ""]

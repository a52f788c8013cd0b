"""The ``pinfeed`` command: usage, exit statuses, output for people and for scripts."""

import json
import re
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from support.command import X, python, run, values

import pinfeed
from pinfeed import GiB, KiB, MiB
from pinfeed.cli.main import reporting
from pinfeed.cli.options import size
from pinfeed.cli.report import Report, json_of
from pinfeed.validation.wrapping import wrapped


def test_as_a_program() -> None:
    """The command runs in a process of its own, and does not load torch."""
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
            "--shuffle and --block-rows conflict; give one of them",
        ),
        (
            ["plan", "x.npy", "--seed", "3"],
            "--seed 3 has no effect without a random order; give --shuffle or --block-rows",
        ),
        (
            ["bench", "x.npy", "--seed", "0"],
            "--seed 0 has no effect without a random order",
        ),
        (["plan", "x.npy", "--depth", "-1"], "Invalid value for '--depth'"),
        (["plan", "x.npy", "--depth", "5000"], "5000 is not in the range 0<=x<=1024"),
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
def test_commands_that_cannot_run_say_why(arguments: list[str], kind: str, said: str) -> None:
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


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "arguments", [("inspect", "x.npy"), ("inspect", "x.npy", "--json"), ("--help",)]
)
def test_a_full_stdout_is_an_error_not_a_finding(
    arguments: tuple[str, ...], unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python writes buffered text again when it exits.
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with open("/dev/full", "w") as full:
        done = python("-m", "pinfeed", *arguments, stdout=full)
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
def test_sizes_are_parsed(text: str, nbytes: int) -> None:
    assert size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1", "2G", "2GiBs", "1e999", "nan", "0.5", "1,5e9", "2 G iB", "0x10", "9e18GiB"],
)
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size; expected bytes"):
        size(text)


def test_output_fits_a_terminal() -> None:
    assert max(map(len, wrapped("ab " * 100, first="  ", rest="    ").splitlines())) <= 80
    assert wrapped("x" * 100) == "x" * 100, "a path is not broken"
    assert json.loads(json_of({"a": float("nan"), "b": (1, {"c": float("inf")})})) == {
        "a": None,
        "b": [1, {"c": None}],
    }

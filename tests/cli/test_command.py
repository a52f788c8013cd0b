"""The ``pinfeed`` command: usage, exit statuses, and what ends its output."""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from support.command import X, python, run, values

import pinfeed
from pinfeed import GiB, MiB
from pinfeed.cli import inspect as inspect_command
from pinfeed.validation.messages import wrapped


def test_as_a_program() -> None:
    """The command runs in a process of its own, and does not load torch to inspect a file."""
    good = python("-X", "importtime", "-m", "pinfeed", "inspect", "x.npy")
    assert good.returncode == 0
    assert good.stdout.startswith("source ")
    assert "pinfeed.cli.inspect" in good.stderr
    assert not re.search(r"\| +torch$", good.stderr, re.MULTILINE), "torch is not needed for this"
    Path("x.npy").write_bytes(b"")
    failed = python("-m", "pinfeed", "plan", "x.npy")
    assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (2, "", 1)
    assert failed.stderr.startswith("pinfeed: x.npy is empty (0 bytes)")


def test_help_and_version() -> None:
    shown = run("--help")
    assert shown.exit_code == 0
    assert all(command in shown.stdout for command in ("doctor", "inspect", "plan"))
    assert run("--version").stdout == f"pinfeed {pinfeed.__version__}\n"
    assert "--block-rows ROWS" in run("plan", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["plan"], "FILE"),
        (["inspect"], "FILE"),
        (["polish"], "invalid choice: 'polish'"),
        (["bench", "x.npy"], "invalid choice: 'bench'"),
        (
            ["plan", "x.npy", "--cpu-limit", "2G"],
            "'2G' is not a size; expected bytes, at least 1, such as 2GiB, 512MiB or 1.5e9",
        ),
        (["plan", "x.npy", "--cpu-limit", "0"], "'0' is not a size"),
        (["plan", "x.npy", "--batch-size", "0"], "'0'; expected a whole number, at least 1"),
        (["plan", "x.npy", "--shuffle", "--block-rows", "8"], "not allowed with argument"),
        (["plan", "x.npy", "--length", "long"], "'long'; expected a number such as 1, or 1,2"),
        (["plan", "x.npy", "--axis", "1"], "--axis needs --length, the number of indices"),
        (["plan", "nothing.npy"], "nothing.npy: no such file"),
        (["plan", "nothing-*.npy"], "nothing-*.npy: no such file"),
        (["plan", "x.npy", "y.npy"], "shards do not match"),
        (["plan", "."], "is a folder; expected one of its files"),
        (["plan", "x.npy:a"], "x.npy has nothing of the name 'a'"),
        (["inspect", ".:a"], ". has nothing of the name 'a'"),
        (["doctor", "nothing.npy"], "nothing.npy: no such file"),
    ],
    ids=str,
)
def test_wrong_usage_and_errors_have_status_2(arguments: list[str], said: str) -> None:
    np.save("y.npy", X.astype(np.float64))
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_errors_are_part_of_the_json_object() -> None:
    (error,) = values("plan", "nothing.npy", status=2)["errors"]
    assert error.startswith("nothing.npy: no such file")
    assert values("plan", "x.npy")["errors"] == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_cannot_be_read_is_named() -> None:
    Path("x.npy").chmod(0)
    assert run("plan", "x.npy").stderr == "pinfeed: x.npy cannot be read: Permission denied\n"


def test_ctrl_c_ends_it_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect_command, "format_of", interrupted)
    assert run("inspect", "x.npy", "--json") == (130, "", "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [("x.npy",), ("x.npy", "--json")])
def test_a_full_stdout_ends_it_with_one_line(
    arguments: tuple[str, ...], unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python writes buffered text again when it exits.
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with open("/dev/full", "w") as full:
        done = python("-m", "pinfeed", "inspect", *arguments, stdout=full)
    assert (done.returncode, done.stderr) == (2, "pinfeed: stdout: No space left on device\n")


def test_a_broken_pipe_ends_it_with_one_line() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        done = python("-m", "pinfeed", "inspect", "x.npy", stdout=pipe)
    assert (done.returncode, done.stderr) == (2, "pinfeed: stdout: Broken pipe\n")


def test_a_closed_stdout_ends_it_with_one_line() -> None:
    command = [sys.executable, "-m", "pinfeed", "inspect", "x.npy"]
    close = "import os, sys; os.close(1); os.execv(sys.argv[1], sys.argv[1:])"
    done = python("-c", close, *command)
    assert (done.returncode, done.stderr) == (2, "pinfeed: stdout: it is closed\n")


@pytest.mark.parametrize(
    ("text", "nbytes"), [("2GiB", GiB(2)), ("64 mib", MiB(64)), ("1.5e9", 1_500_000_000)]
)
def test_sizes_are_those_of_config(text: str, nbytes: int) -> None:
    assert values("plan", "x.npy", "--cpu-limit", text)["plan"]["cpu_memory_limit"] == nbytes


def test_output_fits_a_terminal() -> None:
    assert max(map(len, wrapped("ab " * 100, first="  ", rest="    ").splitlines())) <= 80
    assert wrapped("x" * 100) == "x" * 100, "a path is not broken"
    for command in ("inspect", "plan", "doctor"):
        assert max(map(len, run(command, "x.npy").stdout.splitlines())) <= 80

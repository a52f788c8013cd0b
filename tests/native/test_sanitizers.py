"""The compiled functions under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer."""

import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SOURCES = sorted((FOLDER.parent.parent / "pinfeed" / "native").glob("*.c"))
PROGRAMS = {
    "all rows are right\n": ["stress.c"],
    "all bytes are right\n": ["moves.c", "async_driver.c"],
    "all rows are written\n": ["writes.c", "async_driver.c"],
}
"""Files of each program, by what it prints."""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
@pytest.mark.parametrize("expected", PROGRAMS, ids=lambda text: PROGRAMS[text][0])
def test_engines_under_stress(expected: str, sanitizer: str, tmp_path: Path) -> None:
    program = tmp_path / "stress"
    flags = f"-std=c11 -O1 -g -pthread -fsanitize={sanitizer} -fno-sanitize-recover=all".split()
    # The reads of a long job are several launches.
    flags.append("-DLAUNCH_NBYTES=100000")
    files = [*(FOLDER / name for name in PROGRAMS[expected]), *SOURCES]
    compiled = subprocess.run(["cc", *flags, *files, "-o", program], capture_output=True, text=True)
    if "cannot find" in compiled.stderr or "unrecognized" in compiled.stderr:
        pytest.skip(f"the compiler has no {sanitizer} sanitizer")
    assert not compiled.returncode, compiled.stderr
    # ThreadSanitizer needs the usual layout of the address space.
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    done = subprocess.run([*fixed, program], capture_output=True, text=True, timeout=300)
    # After a report, ThreadSanitizer continues, and changes only the exit code.
    assert (done.returncode, done.stdout) == (0, expected), done.stderr

"""Compile the C files of this folder: ``python pinfeed/native/build.py``.

It needs only a C compiler and the standard library, so the installation and machines without pip
use the same command line.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

FLAGS = "-std=c11 -O3 -Wall -Wextra -Werror=implicit -fPIC -fvisibility=hidden -shared -pthread"
LIBRARY = Path(__file__).with_name("libpinfeed.so.2")


def compile_library(library: Path = LIBRARY) -> None:
    """Compile the C files of this folder with the command in the variable ``CC``, or with ``cc``.

    Args:
        library: The library, which is replaced as a whole.

    Raises:
        OSError: If there is no such compiler.
        subprocess.CalledProcessError: If the compiler fails.
    """
    # An earlier library may not fit the Python files.
    library.unlink(missing_ok=True)
    sources = sorted(map(str, Path(__file__).parent.glob("*.c")))
    partial = library.with_name(f"{library.name}.{os.getpid()}")
    try:
        command = shlex.split(os.environ.get("CC", "cc"))
        subprocess.run([*command, *FLAGS.split(), *sources, "-o", str(partial)], check=True)
        partial.replace(library)
    finally:
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    compile_library()

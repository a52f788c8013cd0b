"""The build step that compiles pinfeed/native, if there is a C compiler.

Without a compiler, the installation continues, and pinfeed copies rows with numpy. The library is
loaded through ctypes, so it depends on no version of Python, and a wheel is for its processor only.
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = "-std=c11 -O3 -Wall -Wextra -Werror=implicit -fPIC -fvisibility=hidden -shared -pthread"
LIBRARY = "libpinfeed.so.1"


def compile_library(folder: Path, compiler: str, library: Path) -> None:
    """Compile the C files of a folder into a library.

    Raises:
        OSError: If there is no such compiler.
        subprocess.CalledProcessError: If the compiler fails.
    """
    # An earlier library may not fit the Python files.
    library.unlink(missing_ok=True)
    sources = sorted(map(str, folder.glob("*.c")))
    partial = library.with_name(f"{LIBRARY}.{os.getpid()}")
    try:
        command = [*shlex.split(compiler), *FLAGS.split(), *sources, "-o", str(partial)]
        subprocess.run(command, check=True)
        partial.replace(library)
    finally:
        partial.unlink(missing_ok=True)


class CompileNative(BuildHookInterface[Any]):
    """Compiles the library, and notes in the wheel's name which processor it is for."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files are collected; an sdist has only the C files."""
        if self.target_name != "wheel":
            return
        compiler = os.environ.get("CC", "cc")
        folder = Path(self.root) / "pinfeed" / "native"
        library = folder / LIBRARY
        if version != "editable":
            # A wheel, maybe for another processor, leaves the library of the clone as it is.
            library = Path(tempfile.mkdtemp()) / LIBRARY
            atexit.register(shutil.rmtree, library.parent, ignore_errors=True)
        try:
            compile_library(folder, compiler, library)
        except (OSError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"pinfeed uses numpy only, because {compiler}: {error}")
            return
        platform = os.environ.get("PINFEED_PLATFORM") or sysconfig.get_platform()
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform.replace('-', '_').replace('.', '_')}"
        if version != "editable":
            build_data["force_include"][str(library)] = f"pinfeed/native/{LIBRARY}"

"""The build step that compiles pinfeed/native, if there is a C compiler.

Without a compiler, the installation continues, and pinfeed copies rows with numpy. The library is
loaded through ctypes, so it depends on no version of Python, and a wheel is for its processor only.
"""

from __future__ import annotations

import atexit
import os
import runpy
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# The package cannot be imported here, because torch may not be installed.
_BUILD = runpy.run_path(str(Path(__file__).parent / "pinfeed" / "native" / "build.py"))


class CompileNative(BuildHookInterface[Any]):
    """Compiles the library, and notes in the wheel's name which processor it is for."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files are collected; an sdist has only the C files."""
        if self.target_name != "wheel":
            return
        library: Path = _BUILD["LIBRARY"]
        if version != "editable":
            # A wheel, maybe for another processor, leaves the library of the clone as it is.
            library = Path(tempfile.mkdtemp()) / library.name
            atexit.register(shutil.rmtree, library.parent, ignore_errors=True)
        try:
            _BUILD["compile_library"](library)
        except (OSError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"pinfeed uses numpy only: it was not compiled: {error}")
            return
        platform = os.environ.get("PINFEED_PLATFORM") or sysconfig.get_platform()
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform.replace('-', '_').replace('.', '_')}"
        if version != "editable":
            build_data["force_include"][str(library)] = f"pinfeed/native/{library.name}"

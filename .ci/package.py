"""Build the wheels and the sdist into dist/, and try them in clean environments.

The wheel for this machine works with every Python. With a cross-compiler, there is also a wheel for
aarch64, whose compiled part runs its stress test in an emulator.

There is one environment for each supported Python that is installed, with the versions of
constraints.txt. In each, newcomer.py runs with the wheel and with the sdist, mypy --strict
accepts it, and pip resolves the extras. If pip would install a CUDA build of torch of several GB,
the check installs everything but torch, and imports pinfeed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = "pinfeed/native/libpinfeed.so.2"
NEWCOMER, CONSTRAINTS = ROOT / ".ci" / "newcomer.py", ROOT / "constraints.txt"
VERSIONS = re.findall(
    r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text()
)
IMPORT = (
    "import sys, pinfeed; assert 'torch' not in sys.modules; "
    "print(pinfeed.__version__, pinfeed.__file__)"
)
WHY_NOT = "from pinfeed.native.library import why_not; print(why_not())"
MISTAKE = "import pinfeed\npinfeed.Feeder('rows.npy', batch_sise=64)\n"
MYPY = "[mypy]\nstrict = True\n[mypy-torch.*]\nfollow_imports = skip\n"
"""Settings that skip torch's types, which take a minute to read; pinfeed's own are checked."""


def run(*command: object, cwd: Path = ROOT, fails: bool = False, **variables: str) -> str:
    """Run a command without this environment's PYTHONPATH, and return what it prints.

    Args:
        command: The command.
        cwd: Folder in which it runs.
        fails: Whether it must fail.
        variables: Environment variables to set.

    Raises:
        SystemExit: If the command fails, or succeeds although ``fails`` is true.
    """
    words = [str(word) for word in command]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment |= variables
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)
    if (done.returncode != 0) is not fails:
        raise SystemExit(
            f"$ {' '.join(words)}\nended with {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def build() -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; return wheel and sdist."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run(sys.executable, "-m", "build")
    (wheel,) = (ROOT / "dist").glob("*.whl")
    (sdist,) = (ROOT / "dist").glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    return wheel, sdist


def check_contents(wheel: Path, sdist: Path) -> None:
    """Check that the wheel has the package and its licence, and the sdist the tracked files.

    Neither has the results of benchmarks.
    """
    tracked = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "pinfeed").rglob("*")
        if "__pycache__" not in path.parts and path.is_file() and ".so" not in path.suffixes
    }
    held = set(zipfile.ZipFile(wheel).namelist())
    packed = {name for name in held if ".dist-info/" not in name}
    assert tracked | {LIBRARY} == packed, (tracked | {LIBRARY}) ^ packed
    assert "pinfeed/py.typed" in held
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in held)
    with tarfile.open(sdist) as file:
        names = {name.split("/", 1)[1] for name in file.getnames()}
    assert (
        tracked
        | {
            "README.md",
            "LICENSE",
            "pyproject.toml",
            "Makefile",
            "tests/conftest.py",
            "examples/demo.py",
        }
        <= names
    )
    assert not any(name.startswith("benchmarks/results") for name in names)
    for path, count in ((wheel, len(held)), (sdist, len(names))):
        print(f"{path.name}: {count} files, {path.stat().st_size >> 10} KiB")


def pythons() -> dict[str, str]:
    """Return the supported Pythons by version: the running one, and those on PATH."""
    found: dict[str, str] = {}
    for name in (sys.executable, *(f"python{version}" for version in VERSIONS)):
        try:
            version = run(
                name, "-c", "import venv, sys; print('%d.%d' % sys.version_info[:2])"
            ).strip()
        except (OSError, SystemExit):
            # No Python has this name, or it does not run.
            continue
        if version in VERSIONS:
            found.setdefault(version, name)
    return found


class Environment:
    """Clean virtual environment of one Python, in a folder."""

    def __init__(self, folder: Path, python: str) -> None:
        run(python, "-m", "venv", "--without-pip", folder / "env")
        self.folder = folder
        self.python = folder / "env" / "bin" / "python"

    def pip(self, *arguments: object, **variables: str) -> str:
        pip = (sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet")
        return run(*pip, "--constraint", CONSTRAINTS, *arguments, cwd=self.folder, **variables)

    def program(self, *arguments: object, **variables: str) -> str:
        return run(self.python, "-W", "error", *arguments, cwd=self.folder, **variables)

    def mypy(self, *arguments: object, fails: bool = False) -> str:
        (self.folder / "mypy.ini").write_text(MYPY)
        mypy = (sys.executable, "-m", "mypy", "--python-executable", self.python)
        return run(*mypy, *arguments, cwd=self.folder, fails=fails)

    def has_small_torch(self) -> bool:
        """Return whether pip would install a torch without the CUDA libraries."""
        report = json.loads(self.pip("--dry-run", "--no-deps", "--report", "-", "torch"))
        requirements = report["install"][0]["metadata"].get("requires_dist", [])
        return not any("cuda" in one or "nvidia" in one for one in requirements)

    def install_without_torch(self, wheel: Path) -> None:
        (metadata,) = (
            name
            for name in zipfile.ZipFile(wheel).namelist()
            if name.endswith(".dist-info/METADATA")
        )
        required = re.findall(
            r"^Requires-Dist: ([^;\n]+)$",
            zipfile.ZipFile(wheel).read(metadata).decode(),
            re.MULTILINE,
        )
        self.pip("--no-deps", wheel)
        self.pip(*(one for one in required if not one.startswith("torch")))

    def check_import(self, wheel: Path) -> None:
        version, file = self.program("-c", IMPORT).split()
        assert version == wheel.name.split("-")[1]
        assert Path(file).is_relative_to(self.folder)
        assert version in self.program("-m", "pinfeed", "--version")
        run(self.python.parent / "pinfeed", "--help", cwd=self.folder)

    def why_not_native(self) -> str:
        return self.program("-c", WHY_NOT).strip()

    def check_whole(self, wheel: Path, sdist: Path) -> None:
        for package in (sdist, wheel):
            self.pip("--force-reinstall", "--no-deps", package)
            self.check_import(wheel)
            self.program(NEWCOMER)
        assert self.why_not_native() == ""
        self.program(NEWCOMER, PINFEED_NATIVE="0")
        # Without a compiler, the sdist installs, and everything works.
        self.pip("--force-reinstall", "--no-deps", sdist, CC="/nonexistent/cc")
        assert "no C compiler was found" in self.why_not_native()
        self.program(NEWCOMER)
        self.pip("--force-reinstall", "--no-deps", wheel)
        self.mypy(NEWCOMER)
        assert "batch_sise" in self.mypy("-c", MISTAKE, fails=True), "types are seen"
        for extra in ("cuda12", "cuda13,hdf5,parquet,plot,remote,safetensors,zarr"):
            self.pip("--dry-run", f"{wheel}[{extra}]")


def cross_build() -> None:
    """Build the wheel for aarch64, and run the stress test of its compiled part, if possible."""
    compiler, emulator = "aarch64-linux-gnu-gcc", "qemu-aarch64"
    if shutil.which(compiler) is None:
        print(f"{compiler} is not installed: no wheel for aarch64")
        return
    platform = {"CC": compiler, "PINFEED_PLATFORM": "linux_aarch64"}
    run(sys.executable, "-m", "build", "--wheel", **platform)
    (wheel,) = (ROOT / "dist").glob("*aarch64.whl")
    print(f"{wheel.name}: {wheel.stat().st_size >> 10} KiB")
    if shutil.which(emulator) is None:
        print(f"{emulator} is not installed: the compiled part for aarch64 did not run")
        return
    with tempfile.TemporaryDirectory() as folder:
        for names in (["stress.c"], ["moves.c", "async_driver.c"]):
            program = Path(folder) / names[0].removesuffix(".c")
            tests = [ROOT / "tests/native" / name for name in names]
            sources = [*tests, *(ROOT / "pinfeed/native").glob("*.c")]
            run(compiler, "-std=c11", "-O2", "-static", "-pthread", *sources, "-o", program)
            print(f"{emulator}: {run(emulator, program).strip()}")


def main() -> None:
    """Build wheels and sdist, check their contents, and try them in each environment."""
    wheel, sdist = build()
    check_contents(wheel, sdist)
    cross_build()
    for version, python in pythons().items():
        with tempfile.TemporaryDirectory() as folder:
            environment = Environment(Path(folder), python)
            if environment.has_small_torch():
                environment.pip(wheel)
                environment.check_whole(wheel, sdist)
                print(
                    f"Python {version}: installed from wheel and sdist, ran, type-checked; "
                    "extras resolve"
                )
            else:
                environment.install_without_torch(wheel)
                environment.check_import(wheel)
                print(
                    f"Python {version}: installed without torch, which is available for CUDA only, "
                    "and imported"
                )


if __name__ == "__main__":
    main()

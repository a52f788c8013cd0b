"""CUDA kernels compiled without a GPU: as C++ for the CPU, and by NVRTC for GPUs."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

ARCHITECTURES = (75, 80, 90, 100)
"""Compute capabilities, times ten, that the kernels are compiled for."""

# Definitions that CUDA provides for a kernel. Alignment is checked at every access, because a GPU
# stops at a word that is not aligned.
CUDA = r"""
#include <cstddef>
#include <cstdint>
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct Dim { unsigned x, y; };
static Dim gridDim, blockDim, blockIdx, threadIdx;
static long long n_wrong;
#define __global__
#define __device__
#define __launch_bounds__(n)
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
template <class T> static void check(const T* p) { n_wrong += (uintptr_t)p % sizeof(T) != 0; }
template <class T> static T __ldcs(const T* p) { check(p); return *p; }
template <class T> static void __stcs(T* p, T v) { check(p); *p = v; }
"""


def compiled_for_cpu(source: str, folder: Path, macros: Iterable[str] = ()) -> ctypes.CDLL:
    """Compile kernels as C++, with definitions of what CUDA provides.

    Args:
        source: The kernels, and functions that call them.
        folder: Folder of the library.
        macros: Macros, written as ``NAME=VALUE``.
    """
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    code, library = folder / "kernels.cpp", folder / "kernels.so"
    code.write_text(CUDA + source)
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-Werror"]
    flags += [f"-D{macro}" for macro in macros]
    subprocess.run([compiler, *flags, "-o", library, code], check=True)
    return ctypes.CDLL(str(library))


def compiled_for_gpu(
    architecture: int, source: str, compiler_options: Sequence[str]
) -> dict[str, tuple[int, int]]:
    """Return the registers of each kernel per thread, and the bytes that it spills from them.

    NVRTC compiles without a GPU.
    """
    nvrtc: Any = pytest.importorskip("cuda.bindings.nvrtc")

    def checked(result: tuple[Any, ...]) -> Any:
        assert result[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS, result
        return result[1] if len(result) == 2 else result[1:]

    try:
        known = checked(nvrtc.nvrtcGetSupportedArchs())
    except RuntimeError as error:
        pytest.skip(f"no NVRTC library: {error}")
    if architecture not in known:
        pytest.skip(f"this NVRTC compiles for {known}")
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], []))
    all_options = [f"--gpu-architecture=sm_{architecture}", "--ptxas-options=-v", *compiler_options]
    result = nvrtc.nvrtcCompileProgram(
        program, len(all_options), [option.encode() for option in all_options]
    )
    log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
    # The binding writes into ``log``.
    checked(nvrtc.nvrtcGetProgramLog(program, log))
    text = log.decode()
    assert result[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS, text
    assert checked(nvrtc.nvrtcGetCUBINSize(program)) > 0
    checked(nvrtc.nvrtcDestroyProgram(program))
    found = re.findall(
        r"properties for (\w+)\n.*?(\d+) bytes stack.*?(\d+) bytes spill stores"
        r".*?Used (\d+) registers",
        text,
        re.DOTALL,
    )
    # Registers are spilled to the stack, which is in slow memory.
    return {name: (int(n), int(stack) + int(spilled)) for name, stack, spilled, n in found}

"""CudaModule: CUDA kernels that CuPy compiles for one GPU, launched in streams of torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class CudaModule:
    """Kernels of one source, compiled for one GPU.

    Args:
        index: Number of the GPU.
        source: Source of the kernels.
        options: Options of the compiler.
        names: Names of the kernels.

    Attributes:
        kernels: CuPy's kernels by name.

    Raises:
        ImportError: If CuPy is not installed.
        AttributeError: If CuPy is older than version 14.
    """

    def __init__(
        self, index: int, source: str, options: tuple[str, ...], names: Iterable[str]
    ) -> None:
        import cupy

        self._gpu = cupy.cuda.Device(index)
        self._stream = cupy.cuda.Stream.from_external
        with self._gpu:
            module = cupy.RawModule(code=source, options=options)
            self.kernels = {name: module.get_function(name) for name in names}

    def launch(
        self, name: str, stream: int, grid: tuple[int, ...], n_threads: int, argument: Any
    ) -> None:
        """Queue a kernel in a stream.

        Args:
            name: Name of the kernel.
            stream: Handle of the stream.
            grid: Number of blocks in each dimension.
            n_threads: Threads of a block.
            argument: The kernel's argument, an array of shape (1,), which CuPy passes by value.
        """
        with self._gpu, self._stream(External(stream)):
            self.kernels[name](grid, (n_threads,), (argument,))


class External:
    """Stream of another library, in the form that CuPy accepts."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle

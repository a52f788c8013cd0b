"""CUDA kernels that move rows between page-locked host memory and device memory.

A thread moves words of a row, as wide as rows and addresses allow (at most 16 bytes). Each thread
has four words in flight. The throughput of the link is the number of bytes in flight divided by the
time of a round trip. Therefore, a few thousand threads keep the link busy, and the rest of the GPU
is free for the model. Adjacent threads move adjacent words, so that each warp requests whole lines
of 128 bytes if the row has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_TABLES = 4
"""Largest number of tables in one launch."""
N_THREADS = 512
"""Threads per block."""
# Bytes that one launch moves at most, because the kernels count words in 32 bits.
_STEP_BYTES = 64 << 20
_WIDTHS = (16, 8, 4, 2, 1)

SOURCE = r"""
#define IN_FLIGHT 4

// Row indices are known to be in range. Another stream may change rows during a gather; pinfeed
// then does not use the gathered values.
template <bool GATHER, typename Word, typename Index>
__device__ void move(const Index* __restrict__ rows, unsigned n_rows, char* table, char* packed,
                     long long row_nbytes)
{
    const unsigned n_words = row_nbytes / sizeof(Word), n_threads = gridDim.x * blockDim.x;
    // The step from a word of this thread to its next word.
    const unsigned rows_on = n_threads / n_words, words_on = n_threads % n_words;
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x, row = i / n_words, word = i % n_words;
    Word* there = (Word*)packed + i;
    while (row < n_rows) {
        Word moved[IN_FLIGHT];
        Word* here[IN_FLIGHT];
        unsigned n = 0;
#pragma unroll
        for (unsigned k = 0; k < IN_FLIGHT; k++) {
            n += row < n_rows;
            here[k] = (Word*)(table + rows[row < n_rows ? row : n_rows - 1] * row_nbytes) + word;
            row += rows_on, word += words_on;
            if (word >= n_words)
                row++, word -= n_words;
        }
#pragma unroll
        for (unsigned k = 0; k < IN_FLIGHT; k++)
            if (k < n)
                moved[k] = __ldcs(GATHER ? here[k] : there + k * n_threads);
#pragma unroll
        for (unsigned k = 0; k < IN_FLIGHT; k++)
            if (k < n)
                __stcs(GATHER ? there + k * n_threads : here[k], moved[k]);
        there += IN_FLIGHT * n_threads;
    }
}

template <bool GATHER, typename Index>
__device__ void move_table(const Index* rows, unsigned n_rows, char* table, char* packed,
                           long long row_nbytes, int width)
{
    switch (width) {
    case 16: return move<GATHER, uint4>(rows, n_rows, table, packed, row_nbytes);
    case 8: return move<GATHER, uint2>(rows, n_rows, table, packed, row_nbytes);
    case 4: return move<GATHER, unsigned int>(rows, n_rows, table, packed, row_nbytes);
    case 2: return move<GATHER, unsigned short>(rows, n_rows, table, packed, row_nbytes);
    case 1: return move<GATHER, unsigned char>(rows, n_rows, table, packed, row_nbytes);
    }
}

#define TABLE(k) char *table##k, char *packed##k, long long row_nbytes##k, int width##k
#define MOVE(GATHER, k) \
    move_table<GATHER>(rows, n_rows, table##k, packed##k, row_nbytes##k, width##k)
#define KERNEL(name, GATHER, Index) \
    extern "C" __global__ void __launch_bounds__(512) name( \
        const Index* rows, unsigned n_rows, TABLE(0), TABLE(1), TABLE(2), TABLE(3)) \
    { \
        MOVE(GATHER, 0); \
        MOVE(GATHER, 1); \
        MOVE(GATHER, 2); \
        MOVE(GATHER, 3); \
    }

KERNEL(gather_rows_int32, true, int)
KERNEL(gather_rows_int64, true, long long)
KERNEL(scatter_rows_int32, false, int)
KERNEL(scatter_rows_int64, false, long long)
"""


@dataclass(frozen=True)
class Move:
    """Move of rows between one table and a packed batch on the device.

    Attributes:
        table: Address of the table's first row.
        packed: Address of the first row of the batch on the device.
        row_nbytes: Bytes of a row, at least 1.
    """

    table: int
    packed: int
    row_nbytes: int

    @property
    def width(self) -> int:
        """Width of the widest word that divides both addresses and the row, in bytes."""
        common = self.table | self.packed | self.row_nbytes
        return next(width for width in _WIDTHS if not common % width)


@dataclass(frozen=True)
class RowIndices:
    """Row indices in the memory of the device.

    Attributes:
        address: Address of the first row index.
        n: Number of row indices.
        nbytes: Bytes of one row index: 4 for int32, 8 for int64.
    """

    address: int
    n: int
    nbytes: int


def launches(
    rows: RowIndices, moves: Sequence[Move], n_blocks: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the number of blocks and the arguments of each launch.

    Args:
        rows: Row indices on the device.
        moves: Moves of these rows, one for each table.
        n_blocks: Largest number of blocks; a small batch needs fewer.
    """
    for i in range(0, len(moves), MAX_TABLES):
        group = moves[i : i + MAX_TABLES]
        # The number of a word must fit in 32 bits.
        step = max(1, _STEP_BYTES // sum(move.row_nbytes for move in group))
        for first in range(0, rows.n, step):
            n = min(step, rows.n - first)
            arguments = [rows.address + first * rows.nbytes, n]
            n_words = 0
            for move in group:
                arguments += [
                    move.table,
                    move.packed + first * move.row_nbytes,
                    move.row_nbytes,
                    move.width,
                ]
                n_words = max(n_words, n * move.row_nbytes // move.width)
            yield (
                min(n_blocks, -(-n_words // N_THREADS)),
                (*arguments, *[0] * 4 * (MAX_TABLES - len(group))),
            )


class RowKernels:
    """Kernels compiled for one GPU.

    Args:
        index: Number of the GPU.

    Raises:
        ImportError: If CuPy is not installed.
        AttributeError: If CuPy is older than version 14.
    """

    def __init__(self, index: int) -> None:
        import cupy

        self._gpu = cupy.cuda.Device(index)
        self._stream = cupy.cuda.Stream.from_external
        with self._gpu:
            module = cupy.RawModule(code=SOURCE, options=("-std=c++17",))
            self._kernels = {
                (name, nbytes): module.get_function(f"{name}_rows_int{8 * nbytes}")
                for name in ("gather", "scatter")
                for nbytes in (4, 8)
            }

    def gather(
        self, stream: int, rows: RowIndices, moves: Sequence[Move], n_blocks: int
    ) -> Iterator[None]:
        """Queue a gather of rows to the device, launch by launch.

        Args:
            stream: Handle of the stream.
            rows: Row indices on the device.
            moves: Moves of these rows, one for each table.
            n_blocks: Largest number of blocks per launch; each occupies a part of a multiprocessor
                that the model could use.
        """
        kernel = self._kernels["gather", rows.nbytes]
        return self._launch(kernel, stream, launches(rows, moves, n_blocks))

    def scatter(
        self, stream: int, rows: RowIndices, moves: Sequence[Move], n_blocks: int
    ) -> Iterator[None]:
        """Queue a scatter of distinct rows from the device; takes the arguments of ``gather``."""
        kernel = self._kernels["scatter", rows.nbytes]
        return self._launch(kernel, stream, launches(rows, moves, n_blocks))

    def _launch(
        self, kernel: Any, stream: int, every_launch: Iterator[tuple[int, tuple[int, ...]]]
    ) -> Iterator[None]:
        for n_blocks, arguments in every_launch:
            typed = [kind(value) for kind, value in zip(_ARGUMENT_TYPES, arguments, strict=True)]
            with self._gpu, self._stream(External(stream)):
                kernel((n_blocks,), (N_THREADS,), tuple(typed))
            yield


_ARGUMENT_TYPES = (np.uint64, np.uint32, *(np.uint64, np.uint64, np.int64, np.int32) * MAX_TABLES)


class External:
    """Stream of another library, in the form that CuPy accepts."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle

"""Kernels that move rows between page-locked memory of the host and memory of the device, and the shape of their launches.

A thread moves words of a row, as wide as rows and addresses allow (16 bytes at most), and has four
of them under way: what comes over the link is the bytes under way divided by the time of a round
trip, so a few thousand threads keep it busy, and the rest of the GPU is the model's. Neighbouring
threads move neighbouring words: each warp asks for whole lines of 128 bytes where a row has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_TABLES = 4
"""Tables that one launch moves rows of."""
N_THREADS = 512
"""Threads of a block."""
# Of a launch: words are counted in 32 bits.
_STEP_BYTES = 64 << 20
_WIDTHS = (16, 8, 4, 2, 1)

SOURCE = r"""
#define IN_FLIGHT 4

// Row numbers are known to be in range. Of a gather, rows may be changed meanwhile by another stream: then the values are not used.
template <bool GATHER, typename Word>
__device__ void move(const long long* __restrict__ rows, unsigned n_rows, char* table, char* packed, long long row_nbytes)
{
    const unsigned n_words = row_nbytes / sizeof(Word), n_threads = gridDim.x * blockDim.x;
    const unsigned rows_on = n_threads / n_words, words_on = n_threads % n_words;  // from a word of this thread to its next one
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

template <bool GATHER>
__device__ void move_table(const long long* rows, unsigned n_rows, char* table, char* packed, long long row_nbytes, int width)
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
#define MOVE(GATHER, k) move_table<GATHER>(rows, n_rows, table##k, packed##k, row_nbytes##k, width##k)
#define KERNEL(name, GATHER) \
    extern "C" __global__ void __launch_bounds__(512) name(const long long* rows, unsigned n_rows, TABLE(0), TABLE(1), TABLE(2), TABLE(3)) \
    { \
        MOVE(GATHER, 0); \
        MOVE(GATHER, 1); \
        MOVE(GATHER, 2); \
        MOVE(GATHER, 3); \
    }

KERNEL(gather_rows, true)
KERNEL(scatter_rows, false)
"""


@dataclass(frozen=True)
class Move:
    """Rows of one table, and where they are, one after the other, on the device.

    Attributes:
        table: Address of the table's first row.
        packed: Address of the first of the rows on the device.
        row_nbytes: Bytes of a row, at least 1.
    """

    table: int
    packed: int
    row_nbytes: int

    @property
    def width(self) -> int:
        """Bytes of the widest word that addresses and rows are multiples of."""
        return next(
            width for width in _WIDTHS if not (self.table | self.packed | self.row_nbytes) % width
        )


def launches(
    rows: int, n_rows: int, moves: Sequence[Move], n_blocks: int
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Blocks and arguments of the kernels, launch by launch.

    Args:
        rows: Address of the row numbers on the device, int64.
        n_rows: How many there are.
        moves: What is moved of these rows.
        n_blocks: At most; a small batch does not need as many.
    """
    for i in range(0, len(moves), MAX_TABLES):
        some = moves[i : i + MAX_TABLES]
        # So that a word's number has 32 bits.
        step = max(1, _STEP_BYTES // sum(move.row_nbytes for move in some))
        for first in range(0, n_rows, step):
            n = min(step, n_rows - first)
            arguments, n_words = [rows + 8 * first, n], 0
            for move in some:
                arguments += [
                    move.table,
                    move.packed + first * move.row_nbytes,
                    move.row_nbytes,
                    move.width,
                ]
                n_words = max(n_words, n * move.row_nbytes // move.width)
            yield (
                min(n_blocks, -(-n_words // N_THREADS)),
                (*arguments, *[0] * 4 * (MAX_TABLES - len(some))),
            )


class RowKernels:
    """The kernels, compiled for one GPU.

    Args:
        index: Number of the GPU.

    Raises:
        ImportError: CuPy is not installed.
        AttributeError: It is older than version 14.
    """

    def __init__(self, index: int) -> None:
        import cupy

        self._gpu = cupy.cuda.Device(index)
        self._stream = cupy.cuda.Stream.from_external
        with self._gpu:
            module = cupy.RawModule(code=SOURCE, options=("-std=c++17",))
            self._gather, self._scatter = (
                module.get_function(name) for name in ("gather_rows", "scatter_rows")
            )

    def gather(
        self, stream: int, rows: int, n_rows: int, moves: Sequence[Move], n_blocks: int
    ) -> Iterator[None]:
        """Queue the way of rows to the device, launch by launch.

        Args:
            stream: Its handle.
            rows: Address of the row numbers on the device, int64.
            n_rows: How many there are.
            moves: What is moved of these rows.
            n_blocks: Blocks of a launch, at most: each takes a part of a multiprocessor from the
                model.
        """
        return self._launch(self._gather, stream, launches(rows, n_rows, moves, n_blocks))

    def scatter(
        self, stream: int, rows: int, n_rows: int, moves: Sequence[Move], n_blocks: int
    ) -> Iterator[None]:
        """Queue the way of rows, each once, back from the device; arguments as of ``gather``."""
        return self._launch(self._scatter, stream, launches(rows, n_rows, moves, n_blocks))

    def _launch(
        self, kernel: Any, stream: int, every: Iterator[tuple[int, tuple[int, ...]]]
    ) -> Iterator[None]:
        for n_blocks, arguments in every:
            with self._gpu, self._stream(External(stream)):
                kernel(
                    (n_blocks,),
                    (N_THREADS,),
                    tuple(kind(value) for kind, value in zip(_KINDS, arguments, strict=True)),
                )
            yield


_KINDS = (np.uint64, np.uint32, *(np.uint64, np.uint64, np.int64, np.int32) * MAX_TABLES)


class External:
    """A stream of torch's, as CuPy takes it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle

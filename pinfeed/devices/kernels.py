"""CUDA kernels that move rows between page-locked host memory and device memory.

A thread moves words of a row, as wide as rows and addresses allow (at most 16 bytes). The
throughput of the link is the number of bytes in flight divided by the time of a round trip: at 1.3
to 2 microseconds, 55 GB/s need 70 to 110 KiB. Therefore, a few thousand threads keep the link busy,
and the rest of the GPU is free for the model. Adjacent threads move adjacent words, so that each
warp requests whole lines of 128 bytes if the row has them.

A launch has eight blocks, which take half of the registers of eight multiprocessors. On one NVIDIA
H200, they move 51 GB/s of random rows of 4 KiB over a link of 55 GB/s. Matrix products then take no
longer than during copies by the copy engine. Blocks of one warp on every multiprocessor are not
faster, and the products take 1.3 to 1.7 times as long with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from pinfeed.native.row_moves import (
    MAX_TABLES,
    KernelLaunch,
    RowDirection,
    RowMoves,
    Table,
    sort_shift,
)
from pinfeed.stores.pinned import PinnedStore
from pinfeed.stores.store import row_nbytes

N_BLOCKS = 8
"""Most blocks of a launch; a small batch needs fewer."""
N_THREADS = 512
"""Threads of a block."""
# Words that a thread has in flight, and most registers of a thread, with which none is spilled.
_N_IN_FLIGHT = 4
_N_REGISTERS = 64
_WIDTHS = (16, 8, 4, 2, 1)
WIDEST_WORD = _WIDTHS[0]
"""Most bytes of a word."""

SOURCE = r"""
struct Table {
    char* rows;
    char* packed;
    unsigned row_nbytes;
};

template <typename Index>
struct Moves {
    const Index* rows;
    unsigned n_rows, n_tables;
    Table tables[MAX_TABLES];
};

// A word of the packed rows. Threads are as many words apart as there are threads.
struct Place {
    unsigned row, word;

    __device__ void advance(unsigned n_threads, unsigned n_words)
    {
        row += n_threads / n_words, word += n_threads % n_words;
        if (word >= n_words)
            row++, word -= n_words;
    }
};

// A row index whose place is not its position among the indices.
struct Pair {
    int row, place;
};

__device__ long long row_of(int row) { return row; }
__device__ long long row_of(long long row) { return row; }
__device__ long long row_of(Pair pair) { return pair.row; }
__device__ unsigned place_of(int, unsigned position) { return position; }
__device__ unsigned place_of(long long, unsigned position) { return position; }
__device__ unsigned place_of(Pair pair, unsigned) { return pair.place; }

// Row indices are known to be in range. Another stream may change rows during a gather; pinfeed
// then does not use the gathered values.
template <typename Word, typename Index>
__device__ void gather_rows(const Index* __restrict__ rows, unsigned n_rows, const Table& table)
{
    const unsigned n_words = table.row_nbytes / sizeof(Word), n_threads = gridDim.x * N_THREADS;
    const unsigned first = blockIdx.x * N_THREADS + threadIdx.x;
    Place place = {first / n_words, first % n_words}, ahead = place;
    // Row indices are read one round ahead. Otherwise, each round trip over the link would begin
    // only after a read of device memory.
    Index next[IN_FLIGHT];
#pragma unroll
    for (unsigned k = 0; k < IN_FLIGHT; k++) {
        next[k] = rows[min(ahead.row, n_rows - 1)];
        ahead.advance(n_threads, n_words);
    }
#pragma unroll 1
    while (place.row < n_rows) {
        Word words[IN_FLIGHT];
        Word* targets[IN_FLIGHT];
#pragma unroll
        for (unsigned k = 0; k < IN_FLIGHT; k++) {
            targets[k] = nullptr;
            if (place.row < n_rows) {
                const char* row = table.rows + row_of(next[k]) * table.row_nbytes;
                const size_t to = place_of(next[k], place.row);
                targets[k] = (Word*)(table.packed + to * table.row_nbytes) + place.word;
                words[k] = __ldcs((const Word*)row + place.word);
            }
            place.advance(n_threads, n_words);
            next[k] = rows[min(ahead.row, n_rows - 1)];
            ahead.advance(n_threads, n_words);
        }
#pragma unroll
        for (unsigned k = 0; k < IN_FLIGHT; k++)
            if (targets[k])
                __stcs(targets[k], words[k]);
    }
}

// Writes over the link need no answer, so row indices are read when they are needed.
template <typename Word, typename Index>
__device__ void scatter_rows(const Index* __restrict__ rows, unsigned n_rows, const Table& table)
{
    const unsigned n_words = table.row_nbytes / sizeof(Word), n_threads = gridDim.x * N_THREADS;
    const unsigned first = blockIdx.x * N_THREADS + threadIdx.x;
    Place place = {first / n_words, first % n_words};
    const Word* packed = (const Word*)table.packed + first;
#pragma unroll 1
    while (place.row < n_rows) {
        Word words[IN_FLIGHT];
        Word* targets[IN_FLIGHT];
#pragma unroll
        for (unsigned k = 0; k < IN_FLIGHT; k++) {
            targets[k] = nullptr;
            if (place.row < n_rows) {
                char* row = table.rows + (long long)rows[place.row] * table.row_nbytes;
                targets[k] = (Word*)row + place.word;
                words[k] = __ldcs(packed + k * n_threads);
            }
            place.advance(n_threads, n_words);
        }
#pragma unroll
        for (unsigned k = 0; k < IN_FLIGHT; k++)
            if (targets[k])
                __stcs(targets[k], words[k]);
        packed += IN_FLIGHT * n_threads;
    }
}

#define KERNEL(name, width, Word, kind, Index) \
    extern "C" __global__ void name##_rows_##width##_##kind(const Moves<Index> moves) \
    { \
        _Pragma("unroll 1") for (unsigned k = 0; k < moves.n_tables; k++) \
            name##_rows<Word>(moves.rows, moves.n_rows, moves.tables[k]); \
    }
#define KERNELS(width, Word) \
    KERNEL(gather, width, Word, int32, int) \
    KERNEL(gather, width, Word, int64, long long) \
    KERNEL(gather, width, Word, pair, Pair) \
    KERNEL(scatter, width, Word, int32, int) \
    KERNEL(scatter, width, Word, int64, long long)

KERNELS(16, uint4)
KERNELS(8, uint2)
KERNELS(4, unsigned int)
KERNELS(2, unsigned short)
KERNELS(1, unsigned char)
"""
_INDICES = {"gather": ("int32", "int64", "pair"), "scatter": ("int32", "int64")}
NAMES = tuple(
    f"{kind}_rows_{width}_{index}"
    for kind, indices in _INDICES.items()
    for width in _WIDTHS
    for index in indices
)
"""Names of the kernels: direction, bytes of a word, and kind of a row index."""


OPTIONS = (
    "-std=c++17",
    f"-DMAX_TABLES={MAX_TABLES}",
    f"-DN_THREADS={N_THREADS}",
    f"-DIN_FLIGHT={_N_IN_FLIGHT}",
    f"--maxrregcount={_N_REGISTERS}",
)
"""Options of the compiler."""


def word_width(divisible: int) -> int:
    """Return the bytes of the widest word that divides a number."""
    # The lowest bit that is set.
    return (divisible | WIDEST_WORD) & -(divisible | WIDEST_WORD)


def _by_width(tables: Iterable[Table]) -> Iterator[tuple[int, list[Table]]]:
    """Yield the bytes of a word, and tables that one launch moves by such words."""

    def width(table: Table) -> int:
        # The rows of a batch begin at addresses that every word divides.
        return word_width(table.address | table.row_nbytes)

    for found, of_width in groupby(sorted(tables, key=width, reverse=True), width):
        group = list(of_width)
        for i in range(0, len(group), MAX_TABLES):
            yield found, group[i : i + MAX_TABLES]


class RowKernels:
    """Kernels compiled for one GPU.

    Args:
        index: Number of the GPU.

    Attributes:
        n_blocks: Most blocks of a launch.

    Raises:
        ImportError: If CuPy is not installed.
    """

    def __init__(self, index: int) -> None:
        self._module = CudaModule(index, SOURCE, OPTIONS, NAMES)
        self.n_blocks = N_BLOCKS

    def moves(
        self,
        kind: RowDirection,
        stores: Mapping[int, PinnedStore],
        index_nbytes: int | None = None,
        *,
        paired: bool = False,
    ) -> RowMoves:
        """Return how compiled functions queue moves of the rows of stores.

        Args:
            kind: Direction.
            stores: Stores in page-locked memory, by their positions in a batch.
            index_nbytes: Bytes of a row index. With None, the result says in which form it needs
                the row indices.
            paired: Whether the indices are pairs of a row and its place.
        """
        tables = [
            Table(store.array.ctypes.data, row_nbytes(store), k) for k, store in stores.items()
        ]
        n_rows = max(store.n_rows for store in stores.values())
        shift = 0 if paired else -1
        if kind == "gather" and index_nbytes is None:
            shift = sort_shift(n_rows, max(table.row_nbytes for table in tables))
        index_nbytes = index_nbytes or (4 if n_rows < 1 << 31 else 8)
        index = f"int{8 * index_nbytes}" if shift < 0 else "pair"
        found = []
        for width, group in _by_width(tables):
            kernel = self._module.handle(f"{kind}_rows_{width}_{index}")
            found.append(KernelLaunch(kernel, self.n_blocks, N_THREADS, width, group))
        return RowMoves(index_nbytes, shift, found)


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
    """

    def __init__(
        self, index: int, source: str, options: tuple[str, ...], names: Iterable[str]
    ) -> None:
        import cupy

        self._gpu = cupy.cuda.Device(index)
        with self._gpu:
            module = cupy.RawModule(code=source, options=options)
            self.kernels = {name: module.get_function(name) for name in names}

    def handle(self, name: str) -> int:
        """Return the driver's handle of a kernel."""
        # CuPy loads a kernel for the GPU that is current.
        with self._gpu:
            handle: int = self.kernels[name].kernel.ptr
        return handle

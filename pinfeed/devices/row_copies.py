"""CUDA kernel that copies rows between tensors of one GPU, many copies in one launch."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from pinfeed.devices.cuda_driver import CudaDriver, cuda_driver
from pinfeed.devices.device import RowCopy
from pinfeed.devices.kernels import CudaModule, word_width
from pinfeed.errors import described

logger = logging.getLogger("pinfeed")

MAX_COPIES = 16
"""Largest number of copies in one launch. A device cache needs up to three for each store."""
N_THREADS = 256
"""Threads per block."""
# Blocks for each multiprocessor, which hide the time of a read of device memory.
_BLOCKS_PER_MULTIPROCESSOR = 8
# Threads of a row are a power of two, at most a warp.
_MOST_LANES = 32

SOURCE = r"""
struct Copy {
    const char* source;
    char* target;
    // Positions of the rows; null for all rows in order.
    const int* taken;
    const int* into;
    unsigned n_rows, n_words;
    // Bytes of a word, and threads of a row.
    unsigned width, n_lanes;
};

struct Copies {
    Copy copies[MAX_COPIES];
};

template <typename Word>
__device__ void copy_rows(const Copy& copy)
{
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned step = gridDim.x * blockDim.x / copy.n_lanes;
    for (unsigned row = thread / copy.n_lanes; row < copy.n_rows; row += step) {
        const size_t from = copy.taken ? copy.taken[row] : row;
        const size_t to = copy.into ? copy.into[row] : row;
        const Word* source = (const Word*)copy.source + from * copy.n_words;
        Word* target = (Word*)copy.target + to * copy.n_words;
        for (unsigned word = thread % copy.n_lanes; word < copy.n_words; word += copy.n_lanes)
            target[word] = source[word];
    }
}

extern "C" __global__ void __launch_bounds__(N_THREADS) copy_rows_on_device(const Copies all)
{
    const Copy& copy = all.copies[blockIdx.y];
    switch (copy.width) {
    case 16: return copy_rows<uint4>(copy);
    case 8: return copy_rows<uint2>(copy);
    case 4: return copy_rows<unsigned int>(copy);
    case 2: return copy_rows<unsigned short>(copy);
    case 1: return copy_rows<unsigned char>(copy);
    }
}
"""
_NAME = "copy_rows_on_device"
OPTIONS = ("-std=c++17", f"-DMAX_COPIES={MAX_COPIES}", f"-DN_THREADS={N_THREADS}")
"""The compiler's options."""

# The fields of a copy in 64 bits each: the last four fields are two of these.
_N_FIELDS = 6


class Launch(NamedTuple):
    """One launch of the kernel."""

    n_blocks: int
    """Blocks of each copy."""
    n_copies: int
    argument: Sequence[int]
    """The kernel's argument, in 64 bits each."""


def launches(copies: Sequence[RowCopy], most_blocks: int) -> Iterator[Launch]:
    """Yield the launches that copy rows between contiguous tensors.

    Args:
        copies: The copies; those without rows or bytes are left out.
        most_blocks: Largest number of blocks of a copy.
    """
    described = [found for copy in copies if (found := _described(copy)) is not None]
    for i in range(0, len(described), MAX_COPIES):
        group = described[i : i + MAX_COPIES]
        argument = [field for _, fields in group for field in fields]
        argument += [0] * (_N_FIELDS * (MAX_COPIES - len(group)))
        # A copy has as many threads as its rows have lanes.
        n_threads = max(n_threads for n_threads, _ in group)
        yield Launch(min(most_blocks, -(-n_threads // N_THREADS)), len(group), argument)


def _described(copy: RowCopy) -> tuple[int, tuple[int, ...]] | None:
    """Return the number of threads of a copy, and its fields; None if it copies nothing."""
    source, target, taken, into = copy
    positions = taken if taken is not None else into
    n_rows = len(source if positions is None else positions)
    nbytes = target.nbytes
    if not n_rows or not nbytes or not source.numel():
        return None
    addresses = source.data_ptr(), target.data_ptr()
    row_nbytes = nbytes // len(target)
    width = word_width(addresses[0] | addresses[1] | row_nbytes)
    n_words = row_nbytes // width
    n_lanes = min(_MOST_LANES, 1 << (n_words - 1).bit_length())
    taken_at = 0 if taken is None else taken.data_ptr()
    into_at = 0 if into is None else into.data_ptr()
    pairs = n_rows | n_words << 32, width | n_lanes << 32
    return n_rows * n_lanes, (*addresses, taken_at, into_at, *pairs)


class RowCopyKernel:
    """The kernel, compiled for one GPU.

    Args:
        index: Number of the GPU.
        driver: Its driver.

    Raises:
        ImportError: If CuPy is not installed.
    """

    def __init__(self, index: int, driver: CudaDriver) -> None:
        self._driver = driver
        # It keeps the kernel loaded.
        self._module = CudaModule(index, SOURCE, OPTIONS, [_NAME])
        self._kernel = self._module.handle(_NAME)
        n_multiprocessors = torch.cuda.get_device_properties(index).multi_processor_count
        self._most_blocks = _BLOCKS_PER_MULTIPROCESSOR * n_multiprocessors

    def copy(self, copies: Sequence[RowCopy], stream: int) -> None:
        """Queue copies in a stream, which is given by its handle."""
        for n_blocks, n_copies, argument in launches(copies, self._most_blocks):
            grid = n_blocks, n_copies
            self._driver.launch(self._kernel, grid, N_THREADS, stream, argument)


@functools.cache
def row_copy_kernel(index: int) -> RowCopyKernel | None:
    """Return the kernel, compiled once for each GPU; None if torch must copy the rows.

    An error causes a warning, unless CuPy is not installed.

    Args:
        index: Number of the GPU.
    """
    driver = cuda_driver(torch.device("cuda", index))
    if driver is None:
        return None
    try:
        return RowCopyKernel(index, driver)
    except ModuleNotFoundError:
        return None
    except Exception as error:
        logger.warning(
            "torch copies rows on cuda:%d in several launches, which takes longer, because the "
            "kernel for these copies does not run (%s); install another version of CuPy",
            index,
            described(error),
        )
        return None

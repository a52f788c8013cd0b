"""CUDA kernel that copies rows between tensors of one GPU, many copies in one launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from pinfeed.devices.cuda_driver import CudaDriver, cuda_driver
from pinfeed.devices.device import RowCopy, RowPairs, TensorRange
from pinfeed.devices.kernels import CudaModule
from pinfeed.errors import described, logger

MAX_COPIES = 16
"""Largest number of copies in one launch, ``PF_MOST_COPIES`` of pinfeed.h.

A device cache needs up to three for each store.
"""
N_THREADS = 256
"""Threads per block."""
# Blocks for each multiprocessor, which hide the time of a read of device memory.
_BLOCKS_PER_MULTIPROCESSOR = 8

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


def address_of(numbers: TensorRange | RowPairs) -> int:
    """Return the address of numbers on the GPU."""
    first: int = numbers.tensor.data_ptr()
    return first + 4 * numbers.begin


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
        """Queue copies between contiguous tensors in a stream, which is given by its handle."""
        fields: list[int] = []
        # The copies of a batch have their positions in one tensor.
        last, first = None, 0
        for source, target, taken, into in copies:
            positions = into if taken is None else taken
            # len() of a tensor is a Python function.
            n = source.shape[0] if positions is None else positions.n
            nbytes = target.nbytes
            if not n or not nbytes:
                continue
            at = [0, 0]
            for k, numbers in enumerate((taken, into)):
                if numbers is not None:
                    if numbers.tensor is not last:
                        last = numbers.tensor
                        first = last.data_ptr()
                    at[k] = first + 4 * numbers.begin
            row_nbytes = nbytes // target.shape[0]
            fields += (source.data_ptr(), target.data_ptr(), *at, n, row_nbytes)
        if fields:
            limits = N_THREADS, self._most_blocks
            self._driver.copy_rows(self._kernel, *limits, stream, fields)


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

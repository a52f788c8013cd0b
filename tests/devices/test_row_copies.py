"""The kernel that copies rows on a GPU, tested without a GPU."""

import ctypes
import logging
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuda_compiler import ARCHITECTURES, compiled_for_cpu, compiled_for_gpu
from support.launches import Launching

from pinfeed.devices import cuda, row_copies
from pinfeed.devices.cuda import CudaDevice
from pinfeed.devices.cuda_direct_access import DirectAccess
from pinfeed.devices.cuda_driver import CudaDriver
from pinfeed.devices.device import RowCopy, TensorRange
from pinfeed.devices.row_copies import (
    MAX_COPIES,
    N_THREADS,
    OPTIONS,
    SOURCE,
    RowCopyKernel,
    row_copy_kernel,
)
from pinfeed.native import library as native

RUN = r"""
extern "C" void run(unsigned n_blocks, unsigned n_copies, unsigned n_threads, const Copies* all)
{
    gridDim.x = n_blocks, blockDim.x = n_threads;
    for (blockIdx.y = 0; blockIdx.y < n_copies; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < n_blocks; blockIdx.x++)
            for (threadIdx.x = 0; threadIdx.x < n_threads; threadIdx.x++)
                copy_rows_on_device(*all);
}
"""
Run = Callable[[int, int, int, Any], None]
"""Runs the kernel with blocks of each copy, copies, threads of a block, and its argument."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("row_copies")
    library = compiled_for_cpu(
        SOURCE + RUN, folder, [f"MAX_COPIES={MAX_COPIES}", f"N_THREADS={N_THREADS}"]
    )
    library.run.argtypes = [*[ctypes.c_uint] * 3, ctypes.c_void_p]
    return lambda *numbers: library.run(*numbers[:-1], np.array(numbers[-1]).ctypes.data)


class Driver(Launching):
    """A driver whose launches run the kernel."""

    def __init__(self, run: Run) -> None:
        super().__init__(lambda *_: 0)
        self.run_copies = run
        self.launches: list[tuple[int, int]] = []

    def _launch(self, kernel: int, *rest: Any) -> int:
        n_blocks, n_copies, n_z, n_threads, *others, stream, arguments, _ = rest
        assert (kernel, n_z, n_threads, others, stream) == (5, 1, N_THREADS, [1, 1, 0], 77)
        argument = np.frombuffer(ctypes.string_at(arguments[0], 48 * MAX_COPIES), np.uint8)
        self.launches.append((n_blocks, n_copies))
        self.run_copies(n_blocks, n_copies, n_threads, argument)
        return 0


def launches(run: Run, copies: list[RowCopy], n_multiprocessors: int = 2) -> list[tuple[int, int]]:
    """Copy rows; return the blocks of each copy, and the number of copies, of each launch."""

    class Module:
        def __init__(self, *what: Any) -> None:
            assert what == (3, SOURCE, OPTIONS, ["copy_rows_on_device"])

        def handle(self, name: str) -> int:
            return 5

    found = native.library()
    assert found is not None
    gpu = types.SimpleNamespace(multi_processor_count=n_multiprocessors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_copies, "CudaModule", Module)
        patch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
        launching = Driver(run)
        driver = CudaDriver(launching.table, found, torch.device("cuda", 3))
        RowCopyKernel(3, driver).copy(copies, 77)
    return launching.launches


def nothing(*_: Any) -> None:
    """Run no kernel."""


def rows_at(offset: int, n: int, nbytes: int, rng: np.random.Generator) -> torch.Tensor:
    """Return rows of random bytes that begin anywhere in their memory."""
    whole = torch.from_numpy(rng.integers(256, size=offset + n * nbytes, dtype=np.uint8))
    return whole[offset:].view(n, nbytes)


def numbers(rows: np.ndarray) -> TensorRange:
    """Return rows as a range of a longer tensor."""
    whole = np.concatenate([[-1, -1], rows, [-1]]).astype(np.int32)
    return TensorRange(torch.from_numpy(whole), 2, len(rows))


one_copy = st.tuples(
    st.sampled_from([1, 2, 3, 4, 8, 12, 16, 48, 100, 512, 1040]),
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 40)),
    st.sampled_from([0, 0, 1, 4, 8]),
    st.tuples(st.booleans(), st.booleans()),
)


needs_compiled = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())


@needs_compiled
@settings(max_examples=100)
@given(st.lists(one_copy, max_size=MAX_COPIES + 4), st.sampled_from([1, 3]), st.integers(0, 99))
def test_rows_are_copied(run: Run, described: list[Any], n_gpu: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    copies, wanted = [], []
    for nbytes, (n_more_source, n_more_target, n), offset, (has_taken, has_into) in described:
        n_source, n_target = n + n_more_source * has_taken, n + n_more_target * has_into
        source = rows_at(offset, n_source, nbytes, rng)
        target = rows_at(0, n_target, nbytes, rng)
        taken = rng.integers(max(1, n_source), size=n) if has_taken else np.arange(n)
        into = rng.permutation(n_target)[:n] if has_into else np.arange(n)
        after = target.clone()
        after[torch.from_numpy(into)] = source[torch.from_numpy(taken)]
        wanted.append(after)
        copies.append(
            RowCopy(
                source,
                target,
                numbers(taken) if has_taken else None,
                numbers(into) if has_into else None,
            )
        )
    for n_blocks, n_copies in launches(run, copies, n_gpu):
        assert 0 < n_blocks <= 8 * n_gpu
        assert 0 < n_copies <= MAX_COPIES
    for copy, after in zip(copies, wanted, strict=True):
        assert torch.equal(copy.target, after)


@needs_compiled
def test_a_cache_of_five_stores_takes_one_launch() -> None:
    rows = torch.zeros(100, 8)
    copies = [RowCopy(rows, rows.clone()) for _ in range(3 * 5)]
    assert launches(nothing, copies, 132) == [(1, 15)]
    large = RowCopy(torch.zeros(10**5, 32), torch.zeros(10**5, 32))
    assert launches(nothing, [large], 132) == [(1056, 1)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_compiles_for_gpus_and_spills_no_register(architecture: int) -> None:
    ((n_registers, spilled),) = compiled_for_gpu(architecture, SOURCE, OPTIONS).values()
    # With 32 registers, a multiprocessor runs as many threads as it can.
    assert n_registers <= 32
    assert spilled == 0


def test_a_kernel_that_does_not_compile_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(index: int, driver: object) -> None:
        raise RuntimeError("no NVRTC for compute_130")

    monkeypatch.setattr(row_copies, "cuda_driver", lambda device: object())
    monkeypatch.setattr(row_copies, "RowCopyKernel", fails)
    row_copy_kernel.cache_clear()
    for _ in range(2):
        assert row_copy_kernel(3) is None
    row_copy_kernel.cache_clear()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "torch copies rows on cuda:3 " in record.getMessage()
    assert "no NVRTC for compute_130" in record.getMessage()


def test_a_machine_without_cupy_has_no_kernel_and_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(row_copies, "cuda_driver", lambda device: object())
    row_copy_kernel.cache_clear()
    assert row_copy_kernel(3) is None
    row_copy_kernel.cache_clear()
    assert caplog.records == []


@pytest.mark.parametrize("has_kernels", [False, True])
def test_the_kernel_is_compiled_together_with_the_others(
    has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch would compile it in the training thread."""
    compiled: list[int] = []
    monkeypatch.setattr(cuda, "row_copy_kernel", compiled.append)
    # A device needs a GPU only for its streams and its memory.
    device = object.__new__(CudaDevice)
    DirectAccess.__init__(device, 3)
    if has_kernels:
        device.kernels = types.SimpleNamespace()
    assert device.choose_route([], None, "direct") == ""
    assert compiled == [3] * has_kernels

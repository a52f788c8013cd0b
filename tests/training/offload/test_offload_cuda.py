"""Offload on a GPU: equal bits, peak memory, and streams."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from support.offload_models import LATE, MODELS, assert_same, chain, trained
from torch.nn.attention import SDPBackend, sdpa_kernel

from pinfeed import KiB, MiB
from pinfeed.training.offload.offload import Offload


@pytest.fixture
def same_kernels() -> Iterator[None]:
    """Have torch choose kernels that add in a fixed order, if it has such kernels.

    For cuBLAS, conftest.py does the same.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with (
            torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True),
            sdpa_kernel(SDPBackend.MATH),
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.usefixtures("same_kernels")
@pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation")
@pytest.mark.parametrize("late", ["none", "compute", "write", "read", "all"])
@pytest.mark.parametrize("device_limit", [0, KiB(2), KiB(8)])
@pytest.mark.parametrize("name", MODELS)
def test_every_bit_on_cuda(name: str, device_limit: int, late: str) -> None:
    with Offload("cuda", host_limit=MiB(64), threshold=0, device_limit=device_limit) as offload:
        transfer = offload._transfer
        streams = {
            "compute": offload.device.current_stream(),
            "write": transfer._write,
            "read": transfer._read,
        }
        got = trained(
            name,
            offload,
            "cuda",
            [stream for key, stream in streams.items() if late in (key, "all")],
        )
        assert_same(got, trained(name, None, "cuda"))
        assert offload.stats.offloaded_bytes > 0 or device_limit
        assert offload.stats.host_bytes == 0


@pytest.mark.gpu
def test_the_peak_on_cuda() -> None:
    """Few of 64 results of 16 MiB are on the device at a time; the second step adds no block."""
    x = torch.randn(4 << 20, device="cuda", requires_grad=True)

    def peak(offload: Offload | None) -> int:
        x.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with offload.step() if offload else contextlib.nullcontext():
            y = chain(x, 64)[0].sum()
        y.backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    plain = peak(None)
    want = x.grad
    with Offload("cuda", host_limit=MiB(64 * 16), device_limit=MiB(64)) as offload:
        for _ in range(3):
            assert peak(offload) < plain / 4
            assert torch.equal(x.grad, want)
            # The last result stays, and so do four within the limit.
            assert offload.stats.n_blocks_made == 59
            assert offload.stats.kept_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("late", ["none", "compute", "write", "other"])
def test_memory_of_another_stream_on_cuda(late: str) -> None:
    """The memory of a saved tensor is not reused by its own stream while it is copied."""
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    want = torch.autograd.grad((x * 2).sin().exp().sum(), x)[0]
    other = torch.cuda.Stream()
    with Offload("cuda", host_limit=MiB(128), threshold=0, device_limit=1) as offload:
        for _ in range(3):
            streams = {
                "compute": torch.cuda.current_stream(),
                "write": offload._transfer._write.raw,
                "other": other,
            }
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                y = x * 2
            torch.cuda.current_stream().wait_stream(other)
            if late != "none":
                with torch.cuda.stream(streams[late]):
                    torch.cuda._sleep(LATE)
            with offload.step():
                z = y.sin()
                del y
                z = z.exp()
            with torch.cuda.stream(other):
                again = [torch.full_like(x, 3.0) for _ in range(4)]
            got = torch.autograd.grad(z.sum(), x)[0]
            torch.cuda.current_stream().wait_stream(other)
            assert torch.equal(got, want)
            assert all(bool((tensor == 3).all()) for tensor in again)


@pytest.mark.gpu
def test_the_host_does_not_wait_on_cuda() -> None:
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    with Offload("cuda", host_limit=MiB(128), device_limit=MiB(8)) as offload:
        for _ in range(2):
            # The first step allocates the pinned blocks.
            torch.cuda.synchronize()
            with torch.cuda.stream(offload._transfer._write.raw):
                torch.cuda._sleep(100 * LATE)
            behind = offload._transfer._write.record()
            with offload.step():
                y = chain(x, 16)[0]
            waited = behind.is_done()
            y.sum().backward()
        assert not waited

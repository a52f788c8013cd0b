"""Beside a compiled model: the prefetching loop is the synchronous one."""

from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config

from pinfeed import Feeder, PinnedStore


@pytest.mark.parametrize(
    ("device", "options"),
    [
        ("cpu", {"backend": "aot_eager"}),  # traced, and not built: that would take a C++ compiler and long
        pytest.param("cuda", {}, marks=pytest.mark.gpu),
        pytest.param("cuda", {"mode": "reduce-overhead"}, marks=pytest.mark.gpu),  # CUDA graphs, captured while batches are on their way
    ],
)
@pytest.mark.filterwarnings("default")  # of the compiler
def test_rows_are_trained_by_a_compiled_model(device: str, options: dict[str, Any]) -> None:
    weight = torch.linspace(-1, 1, 64 * 64).reshape(64, 64).to(device)
    rng = np.random.default_rng(0)
    batches = [rng.permutation(1000)[:128] for _ in range(12)]
    torch._inductor.config.compile_threads = 1  # the compiler's processes would outlive the test
    compiled = torch.compile(lambda x: torch.tanh(x @ weight).square().sum(), **options)
    found = []
    for depth in (0, 2):
        store, losses = PinnedStore.normal((1000, 64), pin="auto"), []
        with Feeder(store, rows=batches, depth=depth, device=device) as feeder:
            for batch in feeder.batches():
                x = batch.data.requires_grad_()
                loss = compiled(x)
                loss.backward()
                losses.append(loss.item())
                batch.write_back(x.detach() - 0.1 * x.grad)
        found.append((losses, store.array))
    (losses, want), (again, got) = found
    assert losses == again
    np.testing.assert_array_equal(got, want)
    assert losses[0] != losses[-1]

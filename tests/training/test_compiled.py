"""Compiled models: a prefetching loop gives the results of the synchronous one."""

from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config
from torch._dynamo.testing import CompileCounter

from pinfeed import Feeder, HostEmbedding, PinnedStore, RowOptimizer, train_rows


@pytest.mark.parametrize(
    ("device", "options"),
    [
        # This backend traces without building, which would need a C++ compiler and time.
        ("cpu", {"backend": "aot_eager"}),
        pytest.param("cuda", {}, marks=pytest.mark.gpu),
        # CUDA graphs are captured while batches are being copied.
        pytest.param("cuda", {"mode": "reduce-overhead"}, marks=pytest.mark.gpu),
    ],
)
# The compiler warns.
@pytest.mark.filterwarnings("default")
def test_rows_are_trained_by_a_compiled_model(device: str, options: dict[str, Any]) -> None:
    """Compare with the synchronous loop on the same device, by the same compiled code."""
    weight = torch.linspace(-1, 1, 64 * 64).reshape(64, 64).to(device)
    rng = np.random.default_rng(0)
    batches = [rng.permutation(1000)[:128] for _ in range(12)]
    # The compiler's processes would outlive the test.
    torch._inductor.config.compile_threads = 1
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


# The compiler reads the gradients of tensors that are not leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_table_is_trained_through_a_compiled_model() -> None:
    """A compiled model trains a table as the synchronous loop without compilation does.

    It is compiled once, although every batch looks up another number of distinct ids.
    """
    ids = torch.randint(200, (10, 32), generator=torch.Generator().manual_seed(0))
    found = []
    for depth in (0, 2):
        torch.manual_seed(0)
        table, counter = HostEmbedding(200, 8, name="table"), CompileCounter()
        model = torch.nn.Linear(8, 1).to("cuda" if torch.cuda.is_available() else "cpu")
        compiled = torch.compile(model, backend=counter) if depth else model
        optimizer, losses = RowOptimizer(torch.optim.Adagrad, [table], lr=0.1), []
        for batch in train_rows(
            list(ids), {table: lambda batch: batch}, optimizer=optimizer, depth=depth
        ):
            loss = compiled(table(batch)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert counter.frame_count == (1 if depth else 0)
        found.append((losses, table.read(range(200))))
    (losses, want), (again, got) = found
    assert losses == again
    assert torch.equal(got, want)
    assert losses[0] > losses[-1]

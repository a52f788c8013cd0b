"""A loop begins while an older loop over the same feeder has not ended."""

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.internals import runner_of
from support.loaders import queues_closed
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from pinfeed import (
    ArgumentError,
    ClosedError,
    Feeder,
    HostEmbedding,
    RowOptimizer,
    WriteBackError,
    train_rows,
    wrap_loader,
    wrap_readers,
)

__all__ = ["queues_closed"]
# StatefulDataLoader calls the deprecated function.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
N = 20
SIZE = 4
N_BATCHES = 5
ANOTHER = "another loop over its feeder began; make a second feeder"


def rows_loop(**options: Any) -> Any:
    torch.manual_seed(3)
    loader = DataLoader(torch.arange(N), batch_size=SIZE, shuffle=True)  # type: ignore[arg-type]
    return train_rows(loader, {HostEmbedding(N, 2): lambda ids: ids}, **options)


def of_loader(kind: Callable[..., Any], **options: Any) -> Any:
    torch.manual_seed(3)
    return wrap_loader(kind(range(N), batch_size=SIZE, shuffle=True), **options)


def readers(**options: Any) -> Any:
    return wrap_readers(
        range(N),
        range(N),
        read_input=lambda i: [i],
        get_output=lambda i: [i],
        batch_size=SIZE,
        shuffle=True,
        **options,
    )


KINDS: dict[str, Callable[..., Any]] = {
    "Feeder": lambda **options: Feeder(np.arange(N), batch_size=SIZE, shuffle=True, **options),
    "wrap_loader": lambda **options: of_loader(DataLoader, **options),
    "wrap_loader, stateful": lambda **options: of_loader(StatefulDataLoader, **options),
    "wrap_readers": readers,
    "train_rows": rows_loop,
}


def taken(batches: Iterator[Any], n: int) -> list[str]:
    return [str(next(batches)) for _ in range(n)]


def after_break(feeder: Any) -> list[list[str]]:
    """Return the first two batches of an epoch that is left, and those of the next two epochs."""
    batches = iter(feeder)
    first = taken(batches, 2)
    batches.close()
    return [first, *([str(batch) for batch in feeder] for _ in range(2))]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_loop_ends_the_one_before_as_break_does(kind: str, depth: int) -> None:
    with KINDS[kind](device="cpu", depth=depth) as plain:
        want = after_break(plain)
    with KINDS[kind](device="cpu", depth=depth) as feeder:
        first = iter(feeder)
        got = [taken(first, 2)]
        second = iter(feeder)
        assert runner_of(feeder).epoch == 1
        with pytest.raises(ClosedError, match=ANOTHER):
            next(first)
        got.append(taken(second, 2))
        # Garbage of the older loop does not disturb the new one.
        del first
        gc.collect()
        got[1] += map(str, second)
        got.append([str(batch) for batch in feeder])
        assert got == want
        assert feeder.stats.batches == 2 + 2 * N_BATCHES
        assert not [t for t in threading.enumerate() if t.name.startswith("pinfeed")]


@pytest.mark.parametrize("kind", KINDS)
def test_no_loop_ends_in_silence(kind: str) -> None:
    """An iterator without a requested batch is no epoch, and raises the error, too."""
    with KINDS[kind](device="cpu") as feeder:
        with pytest.raises(ClosedError, match=ANOTHER):
            list(zip(feeder, feeder, strict=False))
        n_inner = 0
        with pytest.raises(ClosedError, match=ANOTHER):
            for _ in feeder:
                n_inner += len(list(feeder))
        assert n_inner == N_BATCHES
        assert len(list(feeder)) == N_BATCHES


def test_the_older_loop_has_written_back_when_the_next_begins() -> None:
    x = np.zeros((8, 1), np.float32)
    with Feeder(x, batch_size=2, device="cpu") as feeder:
        first = feeder.batches()
        batch = next(first)
        batch.write_back(batch.data + 1)
        late = next(first)
        late.write_back(late.data + 2)
        unused = next(first)
        second = feeder.batches()
        assert x[:4, 0].tolist() == [1, 1, 2, 2]
        with pytest.raises(
            WriteBackError, match="after the loop requested the next batch or ended"
        ):
            unused.write_back(unused.data)
        assert [int(batch.data[0]) for batch in second] == [1, 2, 0, 0]


@pytest.mark.parametrize("depth", [0, 2])
def test_rows_of_the_older_loop_are_trained_and_released(depth: int) -> None:
    table = HostEmbedding(4, 1, init="zeros")
    optimizer = RowOptimizer(torch.optim.SGD, [table], lr=1.0)
    batches = [torch.tensor([i, (i + 1) % 4]) for i in range(4)]
    loop = train_rows(
        batches, {table: lambda ids: ids}, optimizer=optimizer, device="cpu", depth=depth
    )

    def train(batches: Iterator[Any], n: int) -> None:
        for _ in range(n):
            table(next(batches)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    first = iter(loop)
    train(first, 2)
    second = iter(loop)
    assert table.read(range(4))[:, 0].tolist() == [-1, -2, -1, 0]
    train(second, 4)
    with pytest.raises(ClosedError, match=ANOTHER):
        next(first)
    assert next(second, None) is None
    assert table.read(range(4))[:, 0].tolist() == [-3, -4, -3, -2]


@pytest.mark.parametrize("kind", ["Feeder", "wrap_loader, stateful", "train_rows"])
def test_a_position_is_set_while_a_loop_is_left(kind: str) -> None:
    with KINDS[kind](device="cpu") as feeder:
        batches = iter(feeder)
        want = taken(batches, 2)
        state = feeder.state_dict()
        if "stateful" not in kind:
            # An invalid state ends no loop.
            with pytest.raises(ArgumentError, match=r"expected .* state_dict\(\)"):
                feeder.load_state_dict({"epoch": 0})
        want += taken(batches, 3)
    with KINDS[kind](device="cpu") as feeder:
        batches = iter(feeder)
        next(batches)
        feeder.load_state_dict(state)
        with pytest.raises(ClosedError, match=r'by load_state_dict\(\); call it before .*"refuse"'):
            next(batches)
        assert [*want[:2], *map(str, feeder)] == want
        batches = iter(feeder)
        feeder.set_epoch(0)
        with pytest.raises(ClosedError, match=r"by set_epoch\(\)"):
            next(batches)


def test_a_loop_that_waits_for_a_batch_is_not_ended() -> None:
    """A loader that asks for its own feeder's next epoch gets the error, not a dead loop."""

    class Recursive:
        def __iter__(self) -> Iterator[int]:
            yield 0
            yield next(iter(feeder))

    with wrap_loader(Recursive(), device="cpu", depth=0) as feeder:
        batches = iter(feeder)
        assert next(batches) == 0
        with pytest.raises(ClosedError, match=r"is running .*is waiting for a batch"):
            next(batches)

"""wrap_loader(on_error="next"): the error of a batch is raised, and the next batch follows."""

import copy
import gc
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from support.internals import runner_of
from support.loaders import DEPTHS, SIZE, CopyingDevice, N, Numbers, Stream, queues_closed, same
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from pinfeed import ArgumentError, ArrayStore, wrap_loader
from pinfeed.errors import WorkerError

__all__ = ["queues_closed"]
# StatefulDataLoader calls the deprecated function.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def bad(x: float) -> torch.Tensor:
    """Return a sample, unless it is in the first, the third or the last batch."""
    if x in (1, 9, 13):
        raise KeyError(f"sample {x}")
    return torch.tensor(x)


class Refusing:
    """A leaf that can be moved to no device."""

    def to(self, device: Any, non_blocking: bool = False) -> Any:
        raise StopIteration("not movable")


def collate(samples: list[Any]) -> Any:
    if 6 in samples:
        raise ValueError("no batch with 6")
    return torch.tensor(samples)


def events(loader: Iterable[Any], state_of: Any = None) -> list[Any]:
    """Return every batch and every error of an epoch, each with the loader's state if requested."""
    found: list[Any] = []
    batches = iter(loader)
    while True:
        try:
            event = next(batches)
        except StopIteration:
            return found
        except Exception as error:
            event = (type(error), str(error).splitlines()[-1])
        found.append((event, copy.deepcopy(state_of.state_dict()) if state_of else None))


LOADERS: dict[str, Any] = {
    "samples": lambda: DataLoader(Numbers(bad), batch_size=SIZE),
    "samples of a stream": lambda: DataLoader(Stream(bad), batch_size=SIZE),
    "collate": lambda: DataLoader(range(N), batch_size=SIZE, collate_fn=collate),  # type: ignore[arg-type]
    "generator": lambda: (bad(float(i)) for i in range(N)),
}


@pytest.mark.parametrize("depth", [*DEPTHS, None])
@pytest.mark.parametrize("kind", LOADERS)
def test_batches_and_errors_are_those_of_the_loader(kind: str, depth: int | None) -> None:
    loader = wrap_loader(LOADERS[kind](), device="cpu", depth=depth, on_error="next")
    found = events(loader)
    assert same([list(one) for one in found], [list(one) for one in events(LOADERS[kind]())])
    assert loader.stats.batches == sum(isinstance(event, torch.Tensor) for event, _ in found)
    assert runner_of(loader)._position.batch == 0
    assert runner_of(loader).epoch == 1


def test_errors_of_workers() -> None:
    bare = DataLoader(Numbers(bad), batch_size=SIZE, num_workers=1)
    found = events(wrap_loader(bare, device="cpu", on_error="next"))
    assert same([list(one) for one in found], [list(one) for one in events(bare)])


@pytest.mark.parametrize("depth", [0, 2])
def test_states_are_those_of_the_loader(depth: int) -> None:
    bare, inner = (StatefulDataLoader(Numbers(bad), batch_size=SIZE) for _ in range(2))
    loader = wrap_loader(inner, device="cpu", depth=depth, on_error="next")
    found = events(loader, loader)
    assert same([list(one) for one in found], [list(one) for one in events(bare, bare)])


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("staged", [False, True])
def test_errors_of_ids_of_rows_and_of_copies(depth: int, staged: bool) -> None:
    class Damaged(ArrayStore):
        def gather(self, rows: Any, out: Any) -> None:
            if 7 in rows:
                raise OSError("sector 7")
            super().gather(rows, out)

    def ids(batch: list[Any]) -> Any:
        if batch[0] is None:
            raise LookupError("no ids")
        return batch[0]

    bad_ids = [[None], [torch.tensor([10])], [torch.ones(1)], [torch.tensor([7])]]
    refusing = [torch.tensor([4]), Refusing()]
    batches = [[torch.tensor([3])], *bad_ids, [torch.tensor([5])], refusing, [torch.tensor([0])]]
    loader = wrap_loader(
        batches,
        fetch={"x": (Damaged(np.arange(10.0)), ids)},
        device=CopyingDevice(direct=False) if staged else "cpu",
        depth=depth,
        on_error="next",
    )
    found = [event for event, _ in events(loader)]
    errors = [event[0].__name__ for event in found if isinstance(event[0], type)]
    assert errors == ["LookupError", "RowIndexError", "RowIndexError", "OSError", "WorkerError"]
    assert [float(found[i][1]["x"]) for i in (0, 5, 7)] == [3, 5, 0]
    assert loader.stats.batches == 3


@pytest.mark.parametrize("staged", [False, True])
def test_errors_of_transforms(staged: bool) -> None:
    """Random numbers of the batches that follow are those of the same batches without an error."""

    def drawn(batch: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if batch[0] == failing[0]:
            raise KeyError("on the host")
        return batch + torch.rand(1, generator=generator)

    def moved(batch: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if int(batch[0]) == failing[1]:
            raise StopIteration("on the device")
        return batch * torch.rand(1, generator=generator)

    def found(depth: int) -> list[Any]:
        loader = wrap_loader(
            DataLoader(Numbers(bad), batch_size=2),
            device=CopyingDevice(direct=False) if staged else "cpu",
            depth=depth,
            on_error="next",
            host_transform=drawn,
            device_transform=moved,
        )
        return [event for event, _ in events(loader)]

    failing = [-1, -1]
    want = found(0)
    failing = [4, 10]
    for depth in DEPTHS:
        got = found(depth)
        assert [event[0] for event in (got[2], got[5])] == [KeyError, WorkerError]
        assert all(
            same([a], [b])
            for i, (a, b) in enumerate(zip(got, want, strict=True))
            if i not in (2, 5)
        )


def test_a_loop_that_skips_bad_batches_ends_where_it_is_left() -> None:
    """Neither an error that is kept nor a reference cycle keeps the loop."""
    kept: list[BaseException] = []
    feeder = wrap_loader(LOADERS["samples"](), device="cpu", on_error="next")
    gc.disable()
    try:
        batches = iter(feeder)
        try:
            next(batches)
        except KeyError as error:
            kept.append(error)
        assert next(batches)[0] == 4
        gone = weakref.ref(batches)
        del batches
        assert gone() is None
        assert not [t for t in threading.enumerate() if t.name.startswith("pinfeed")]
        assert kept[0].args == ("sample 1.0",)
    finally:
        gc.enable()


def test_the_loop_can_be_closed_like_a_generator() -> None:
    with wrap_loader(LOADERS["samples"](), device="cpu", on_error="next") as feeder:
        batches = iter(feeder)
        assert iter(batches) is batches
        with pytest.raises(KeyError):
            next(batches)
        batches.close()  # type: ignore[attr-defined]
        assert next(batches, None) is None


def test_exceptions_that_end_loops_silently_are_worker_errors() -> None:
    def stopping(x: float) -> torch.Tensor:
        return torch.tensor(x) if x != 5 else next(iter([]))

    for kind in (Numbers, Stream):
        loader = DataLoader(kind(stopping), batch_size=SIZE)
        found = [event for event, _ in events(wrap_loader(loader, device="cpu", on_error="next"))]
        assert found[1][0] is WorkerError
        assert len(found) == (4 if kind is Numbers else 2)


def test_on_error_is_checked() -> None:
    with pytest.raises(ArgumentError, match="on_error='skip' was given without threads"):
        wrap_loader([1], on_error="skip")
    with pytest.raises(ArgumentError, match="on_error='leave': expected 'raise', 'next' or 'skip'"):
        wrap_loader([1], on_error="leave")  # type: ignore[arg-type]

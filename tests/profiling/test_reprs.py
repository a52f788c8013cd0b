"""One-line descriptions of feeders, stores and plans, and their tables in a notebook."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from support.unwrapped import unwrapped
from torch.utils.data import DataLoader, TensorDataset

import pinfeed
from pinfeed import ArrayStore, Feeder, KiB, MiB, NpyStore, Plan, wrap_loader, wrap_readers
from pinfeed.feeders.loader_feeder import LoaderFeeder
from pinfeed.memory.plan import Allocation


class Hidden(TensorDataset):
    """Data that must not be touched."""

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("a repr has read data")


def test_feeders_have_a_repr_of_one_line(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((5000, 3, 8), np.float32))
    source = {"x": str(tmp_path / "x.npy"), "y": np.arange(5000)}
    with Feeder(source, batch_size=256, depth=2, device="cpu") as feeder:
        shown = (
            "5,000 rows of source['x'] (3, 8) float32, source['y'] () int64; "
            "batches of 256 rows on cpu, depth=2"
        )
        assert repr(feeder) == f"<Feeder: {shown}>"
        assert repr(next(feeder.batches())) == "<Batch of 256 rows>"
    assert repr(feeder) == f"<Feeder: {shown}, closed>"
    with Feeder(
        tuple(np.zeros((9, 2)) for _ in range(6)), rows=iter([[1], [2]]), device="cpu"
    ) as feeder:
        assert "source[3] (2,) float64, and 2 more; batches of any size on cpu" in repr(feeder)
    loader = DataLoader(Hidden(torch.zeros(8, 2)), batch_size=2)
    assert (
        repr(wrap_loader(loader, device="cpu"))
        == "<LoaderFeeder: a DataLoader, batches of 2 on cpu, depth=0>"
    )
    assert (
        repr(wrap_loader([1, 2], device="cpu", depth=0))
        == "<LoaderFeeder: a list, its batches on cpu, depth=0>"
    )
    table = pinfeed.HostEmbedding(10_000, 8, name="users")
    assert repr(pinfeed.train_rows(loader, {table: lambda batch: batch[0]}, device="cpu")) == (
        "<RowLoop: a DataLoader, with rows of users (10,000, 8); batches on cpu, depth=0>"
    )
    reading = {"read_input": lambda i: [i], "get_output": lambda i: [i], "device": "cpu"}
    assert repr(wrap_readers(range(100), range(100), batch_size=4, **reading)) == (
        "<ReaderFeeder: 100 inputs; batches of 4 samples on cpu, depth=2>"
    )


def test_stores_have_a_repr_of_one_line(tmp_path: Path) -> None:
    x = np.zeros((5000, 3), np.float32)
    np.save(tmp_path / "x.npy", x)
    assert repr(ArrayStore(x)) == "<ArrayStore: 5,000 rows of shape (3,), float32>"
    x.flags.writeable = False
    assert repr(ArrayStore(x)) == "<ArrayStore: 5,000 rows of shape (3,), float32, read-only>"
    assert (
        repr(pinfeed.PinnedStore(x, pin=False))
        == "<PinnedStore: 5,000 rows of shape (3,), float32, in ordinary memory>"
    )
    with NpyStore(tmp_path / "x.npy") as store:
        assert repr(store) == f"NpyStore({str(tmp_path / 'x.npy')!r}, mode='r')"
    assert (
        repr(pinfeed.ArrowStore(pyarrow.array([1, 2]), name="ids"))
        == "<ArrowStore ids: 2 rows of shape (), int64>"
    )
    with pinfeed.RowDataset((x, x)) as dataset:
        assert (
            repr(dataset)
            == "<RowDataset: 5,000 rows of source[0] (3,) float32, source[1] (3,) float32>"
        )


def test_a_repr_of_a_loop_never_raises() -> None:
    for kind in (Feeder, LoaderFeeder):
        assert repr(kind.__new__(kind)) == f"<{kind.__name__}>", "partly constructed"

    class Broken(list[int]):
        @property
        def batch_size(self) -> int:
            raise RuntimeError

    with wrap_loader(Broken([1]), device="cpu") as feeder:
        assert repr(feeder) == "<LoaderFeeder>"


def test_a_plan_in_a_terminal() -> None:
    """A long line is wrapped at 80 columns, and its other lines have an indent."""
    item = Allocation("values of every row " * 5, "host", 1, KiB(512))
    note = f"{'x' * 40}.npy, 1.0 MiB: read in sequence, because {'it is so ' * 10}long"
    plan = Plan(64, 2, "staged", (item,), notes=(note,))
    lines = str(plan).splitlines()
    assert lines[:2] == [
        "batches of up to 64 rows, depth=2, staged route",
        "host memory: 512.0 KiB",
    ]
    assert "  host: 1 x 512.0 KiB for values of every row" in lines[2]
    assert [i for i, line in enumerate(lines) if not line.startswith(" ")] == [0, 1, 4]
    assert all(line.startswith("    ") for line in (lines[3], *lines[5:]))
    assert max(map(len, lines)) <= 80
    assert note in unwrapped(plan)
    assert repr(plan) == str(plan)


def test_a_config_in_a_terminal() -> None:
    assert repr(pinfeed.Config()) == "<Config: all by default>"
    config = pinfeed.Config(cpu_memory_limit=pinfeed.GiB(1.5), depth=3, total_sample_count=4)
    assert repr(config) == "<Config: cpu_memory_limit=1.5 GiB, depth=3, total_sample_count=4>"


def printed(value: Any) -> bool:
    """Return whether the ``repr`` of a frozen dataclass is what ``print`` prints."""
    return dataclasses.is_dataclass(value) and repr(value) == str(value)


def test_what_is_printed_for_people_is_shown_in_a_terminal() -> None:
    with Feeder(np.zeros((100, 3)), batch_size=10, device="cpu") as feeder:
        for _ in feeder:
            pass
        stats = feeder.stats
        assert printed(feeder.plan)
    assert printed(stats)
    assert repr(stats).startswith("10 batches, 100 rows in ")
    assert printed(stats - stats)
    assert printed(stats.memory)
    assert dataclasses.replace(stats) == stats
    assert dataclasses.replace(stats, rows=101) != stats
    model = torch.nn.Linear(8, 1)
    assert printed(pinfeed.estimate(model, 4, input_shape=(8,)))
    with pinfeed.BigBatch(model, torch.nn.MSELoss(), chunk_size=2) as big_batch:
        assert printed(big_batch.check(torch.ones(4, 8), torch.ones(4, 1)))
        big_batch.backward(torch.ones(4, 8), torch.ones(4, 1))
        assert printed(big_batch.chosen)
    config = pinfeed.Config(
        model=model, input_shape=(8,), total_sample_count=10, cpu_memory_limit=MiB(256)
    )
    assert printed(config.budget)

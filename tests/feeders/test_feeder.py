"""What a user of Feeder sees."""

import gc
import itertools
import json
import threading
import weakref
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from pinfeed import ArrayStore, Config, Feeder, MiB, MmapStore, errors, rows
from pinfeed.devices.cpu import HostDevice
from pinfeed.tensors.numpy_torch import NUMPY
from pinfeed.testing import SimDevice
from pinfeed.testing.sim import lazy

DEPTHS = [0, 1, 2, 5]


@pytest.fixture
def x() -> np.ndarray:
    return np.arange(100 * 3, dtype=np.float32).reshape(100, 3)


def numbers(feeder: Any) -> list[list[int]]:
    """Row numbers of every batch."""
    return [batch.rows.tolist() for batch in feeder.batches()]


# ---- what is yielded -----------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_batches_in_order(x: np.ndarray, depth: int) -> None:
    with Feeder(x, batch_size=32, depth=depth) as feeder:
        batches = list(feeder)
    assert [len(b) for b in batches] == [32, 32, 32, 4]
    assert all(isinstance(b, torch.Tensor) and b.dtype == torch.float32 for b in batches)
    np.testing.assert_array_equal(torch.cat(batches).numpy(force=True), x)


def test_structure_is_that_of_the_source(x: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", np.arange(100))
    Pair = namedtuple("Pair", "image label")
    source = {"a": (x, [torch.arange(100)]), "b": Pair(ArrayStore(x * 2), tmp_path / "y.npy")}
    with Feeder(source, batch_size=7, shuffle=True) as feeder:
        for batch in feeder.batches():
            assert list(batch.data) == ["a", "b"]
            assert isinstance(batch.data["a"], tuple)
            assert isinstance(batch.data["a"][1], list)
            assert isinstance(batch.data["b"], Pair)
            wanted = torch.from_numpy(batch.rows)
            assert torch.equal(batch.data["a"][1][0].cpu(), wanted)
            assert torch.equal(batch.data["b"].label.cpu(), wanted)
            assert torch.equal(batch.data["b"].image.cpu(), torch.from_numpy(x)[wanted] * 2)


@pytest.mark.parametrize("dtype", NUMPY, ids=str)
@pytest.mark.parametrize("row_shape", [(), (3,), (2, 3, 4, 5)], ids=str)
def test_every_dtype_and_rank(dtype: torch.dtype, row_shape: tuple[int, ...]) -> None:
    """There and back, with rows that are forwarded."""
    # torch itself cannot index every dtype.
    want = torch.arange(20 * int(np.prod(row_shape))).reshape(20, *row_shape).remainder(120)
    table = want.to(dtype)
    with Feeder(table, rows=[[0, 1, 2, 3], [3, 2, 10], [10, 3]]) as feeder:
        for batch in feeder.batches():
            chosen = torch.from_numpy(batch.rows)
            assert batch.data.dtype == dtype
            assert torch.equal(batch.data.cpu(), want[chosen].to(dtype))
            want[chosen] = want[chosen].flip(0)
            batch.write_back(want[chosen].to(dtype).to(batch.data.device))
    assert torch.equal(table, want.to(dtype))


def test_a_batch_is_the_users_own(x: np.ndarray) -> None:
    """An ordinary tensor: a leaf, writable, no view of something larger."""
    kept = x.copy()
    with Feeder(x, batch_size=10) as feeder:
        for batch in feeder:
            assert batch.is_leaf
            assert not batch._is_view()
            batch.requires_grad_().sum().backward()
            batch.detach().zero_()
    np.testing.assert_array_equal(x, kept)


@pytest.mark.parametrize("depth", DEPTHS)
def test_kept_batches_stay(x: np.ndarray, depth: int) -> None:
    with Feeder(x, batch_size=8, depth=depth) as feeder:
        kept = [list(feeder), list(feeder)]
    for epoch in kept:
        np.testing.assert_array_equal(torch.cat(epoch).numpy(force=True), x)


def test_dropped_batches_give_their_memory_to_later_ones(x: np.ndarray) -> None:
    with Feeder(x, batch_size=5, depth=1, device="cpu") as feeder:
        addresses = {batch.data_ptr() for batch in feeder}
    assert len(addresses) <= 3  # depth + 2


def test_len_and_drop_last(x: np.ndarray) -> None:
    with Feeder(x, batch_size=32) as feeder:
        assert len(feeder) == 4
    with Feeder(x, batch_size=32, drop_last=True) as feeder:
        assert len(feeder) == len(list(feeder)) == 3
    with Feeder(x, batch_size=1000) as feeder:
        assert [len(b) for b in feeder] == [100]


# ---- which rows ----------------------------------------------------------------------------------


def test_every_epoch_has_another_order_and_the_same_for_the_same_seed(x: np.ndarray) -> None:
    def epochs(seed: int) -> list[list[list[int]]]:
        with Feeder(x, batch_size=30, shuffle=True, seed=seed) as feeder:
            return [numbers(feeder) for _ in range(3)]

    first = epochs(1)
    again = epochs(1)
    other = epochs(2)
    assert first == again
    assert first != other
    assert len({str(e) for e in first}) == 3
    assert all(sorted(itertools.chain(*e)) == list(range(100)) for e in first)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([[1, 2, 3], [9], [4, 4]], [[1, 2, 3], [9], [4, 4]]),
        ([np.array([5, 6]), np.array([7], np.uint8)], [[5, 6], [7]]),
        ([torch.tensor([5, 6])], [[5, 6]]),
        (
            BatchSampler(SequentialSampler(range(10)), 4, drop_last=False),
            [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]],
        ),
    ],
    ids=["lists", "arrays", "tensors", "BatchSampler"],
)
def test_rows_that_are_batches(x: np.ndarray, given: Any, wanted: list[list[int]]) -> None:
    with Feeder(x, rows=given) as feeder:
        assert len(feeder) == len(wanted)
        for _ in range(2):
            assert numbers(feeder) == wanted


@pytest.mark.parametrize(
    "given",
    [
        np.array([5, 3, 99, 5, 0]),
        [5, 3, 99, 5, 0],
        (i for i in [5, 3, 99, 5, 0]),
        torch.tensor([5, 3, 99, 5, 0]),
    ],
    ids=["array", "list", "generator", "tensor"],
)
def test_rows_that_are_single(x: np.ndarray, given: Any) -> None:
    with Feeder(x, rows=given, batch_size=2) as feeder:
        assert numbers(feeder) == [[5, 3], [99, 5], [0]]


def test_samplers_of_torch(x: np.ndarray) -> None:
    sampler = RandomSampler(x, generator=torch.Generator().manual_seed(3))
    want = list(RandomSampler(x, generator=torch.Generator().manual_seed(3)))
    with Feeder(x, rows=sampler, batch_size=16) as feeder:
        assert len(feeder) == 7
        assert list(itertools.chain(*numbers(feeder))) == want
    shared, same = (DistributedSampler(x, num_replicas=3, rank=1, seed=5) for _ in range(2))  # type: ignore[arg-type]
    with Feeder(x, rows=shared, batch_size=16) as feeder:
        for epoch in range(2):
            same.set_epoch(epoch)
            assert list(itertools.chain(*numbers(feeder))) == list(same)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("in_batches", [False, True])
def test_the_epoch_that_a_samplers_owner_has_set(
    x: np.ndarray, in_batches: bool, depth: int
) -> None:
    """It is the loop's, as it is with a DataLoader; the epochs after it follow.

    Setting it to the same one again counts as well.
    """
    shared, same = (DistributedSampler(x, num_replicas=2, rank=0, seed=5) for _ in range(2))  # type: ignore[arg-type]
    rows: dict[str, Any] = (
        {"rows": BatchSampler(shared, 16, drop_last=False)}
        if in_batches
        else {"rows": shared, "batch_size": 16}
    )

    def order(epoch: int) -> list[int]:
        same.set_epoch(epoch)
        return list(same)

    def loop() -> list[int]:
        return list(itertools.chain(*numbers(feeder)))

    with Feeder(x, **rows, depth=depth) as feeder:
        shared.set_epoch(5)
        assert feeder.epoch == 5
        assert [loop() for _ in range(2)] == [order(5), order(6)]
        for epoch in (0, 0, 7, 7, 8):
            shared.set_epoch(epoch)
            assert (feeder.epoch, loop()) == (epoch, order(epoch))
        shared.set_epoch(1)
        feeder.set_epoch(2)
        assert (feeder.epoch, loop()) == (2, order(2)), "what was called last"
        assert (feeder.epoch, loop()) == (3, order(3))
        for _ in feeder:
            # Which does not change the order of this epoch.
            shared.set_epoch(9)
            state = feeder.state_dict()
            break
        assert (state["epoch"], feeder.epoch) == (4, 9)


def test_two_feeders_with_one_sampler(x: np.ndarray) -> None:
    """What one of them sets, its owner has not set, for the other."""
    shared, same = (DistributedSampler(x, num_replicas=2, rank=0, seed=5) for _ in range(2))  # type: ignore[arg-type]

    def order(epoch: int) -> list[int]:
        same.set_epoch(epoch)
        return list(same)

    with (
        Feeder(x, rows=shared, batch_size=10) as images,
        Feeder(np.arange(100), rows=shared, batch_size=10) as labels,
    ):
        for epoch in range(3):
            both = [
                (batch.rows.tolist(), other.tolist())
                for batch, other in zip(images.batches(), labels, strict=True)
            ]
            assert [list(itertools.chain(*rows)) for rows in zip(*both, strict=True)] == [
                order(epoch)
            ] * 2
            assert shared.epoch == images.epoch == labels.epoch == epoch + 1
        for epoch in range(3, 6):
            assert list(itertools.chain(*numbers(images))) == order(epoch)
            if epoch == 4:
                assert torch.cat(list(labels)).tolist() == order(3)


def test_a_sampler_whose_epoch_is_another_number_is_refused(x: np.ndarray) -> None:
    class Iterated:
        epoch = 0

        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

        def set_epoch(self, number: int) -> None:
            self.epoch = 100 + number

    with (
        Feeder(x, rows=Iterated(), batch_size=5) as feeder,
        pytest.raises(errors.ArgumentError, match="leaves epoch=103"),
    ):
        feeder.set_epoch(3)


def test_a_sampler_that_does_not_tell_its_epoch_is_its_owners(x: np.ndarray) -> None:
    class Own:
        shift = 0

        def set_epoch(self, number: int) -> None:
            self.shift = number

        def __iter__(self) -> Iterator[int]:
            return iter([(i + self.shift) % 100 for i in range(100)])

    sampler = Own()
    with Feeder(x, rows=sampler, batch_size=50) as feeder:
        for epoch in (5, 5, 7):
            sampler.set_epoch(epoch)
            assert numbers(feeder)[0][0] == epoch
        assert numbers(feeder)[0][0] == 7, "as with a DataLoader"
        feeder.set_epoch(3)
        assert numbers(feeder)[0][0] == 3
        feeder.set_epoch(3)
        for _ in feeder:
            state = feeder.state_dict()
            break
    sampler = Own()
    with Feeder(x, rows=sampler, batch_size=50) as feeder:
        feeder.load_state_dict(state)
        sampler.set_epoch(feeder.epoch)
        assert [rows[0] for rows in numbers(feeder)] == [53]
        feeder.load_state_dict(state)
        sampler.set_epoch(4)
        with pytest.raises(errors.ArgumentError, match="other rows for epoch 3"):
            list(feeder)


def test_a_sampler_that_is_resumed_as_its_owner_does(
    x: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> tuple[Any, Feeder]:
        sampler = DistributedSampler(x, num_replicas=2, rank=0, seed=5)  # type: ignore[arg-type]
        return sampler, Feeder(x, rows=sampler, batch_size=16)

    sampler, feeder = make()
    with feeder:
        want = []
        for epoch in range(5, 8):
            sampler.set_epoch(epoch)
            want.append(numbers(feeder))
        sampler.set_epoch(6)
        for i, _ in enumerate(feeder):
            state = feeder.state_dict()
            if i == 1:
                break
    sampler, feeder = make()
    with feeder:
        feeder.load_state_dict(json.loads(json.dumps(state)))
        assert (feeder.epoch, sampler.epoch) == (6, 6)
        got = []
        for epoch in range(feeder.epoch, 8):
            sampler.set_epoch(epoch)
            got.append(numbers(feeder))
        assert got == [want[1][2:], want[2]]
        assert not caplog.records
        feeder.load_state_dict(state)
        sampler.set_epoch(5)
        assert numbers(feeder) == want[0]
        assert "the position that was loaded, batch 2 of epoch 6, is dropped" in caplog.text


def test_a_batch_sampler_passes_the_epoch_on(x: np.ndarray) -> None:
    shared = DistributedSampler(x, num_replicas=2, rank=0, seed=5)  # type: ignore[arg-type]
    with Feeder(x, rows=BatchSampler(shared, 16, drop_last=False)) as feeder:
        epochs = [list(itertools.chain(*numbers(feeder))) for _ in range(2)]
    for epoch, got in enumerate(epochs):
        shared.set_epoch(epoch)
        assert got == list(shared)


def test_batches_whose_size_nobody_knows(x: np.ndarray) -> None:
    with Feeder(x, rows=([i] * (i + 1) for i in range(50))) as feeder:
        assert feeder.plan.batch_size == 0
        assert "as each turns out to have" in str(feeder.plan)
        assert [len(batch) for batch in feeder] == list(range(1, 51))


def test_batches_that_the_limits_do_not_hold(x: np.ndarray) -> None:
    with pytest.raises(errors.BudgetError, match=r"up to 80 rows; the limits of config hold 40"):
        Feeder(x, rows=[range(80)], config=Config(preferred_batch_size=40))


def test_orders_of_pinfeed(x: np.ndarray) -> None:
    config = Config(cpu_memory_limit=MiB(8), preferred_batch_size=9)
    with Feeder(x, rows=rows.block_shuffled(seed=1, block_rows=4), config=config) as feeder:
        assert sorted(itertools.chain(*numbers(feeder))) == list(range(100))
    shares = []
    for rank in range(3):
        with Feeder(
            x, rows=rows.per_rank(rows.shuffled(7), rank=rank, world_size=3), batch_size=9
        ) as feeder:
            shares.append(list(itertools.chain(*numbers(feeder))))
    assert [len(s) for s in shares] == [34] * 3
    assert set(itertools.chain(*shares)) == set(range(100))


def test_set_epoch(x: np.ndarray) -> None:
    with Feeder(x, batch_size=50, shuffle=True) as feeder:
        epochs = [numbers(feeder) for _ in range(3)]
        assert feeder.epoch == 3
        feeder.set_epoch(1)
        assert numbers(feeder) == epochs[1]
        assert numbers(feeder) == epochs[2]


# ---- ending --------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_break_ends_the_loop_at_once(x: np.ndarray, depth: int) -> None:
    with Feeder(x, batch_size=10, depth=depth) as feeder:
        for _ in feeder:
            break
        assert not [t for t in threading.enumerate() if t.name.startswith("pinfeed")]
        assert len(list(feeder)) == 10


def test_an_exception_of_the_loop_ends_it(x: np.ndarray) -> None:
    feeder = Feeder(x, batch_size=10)
    with pytest.raises(ZeroDivisionError):
        for _ in feeder:
            raise ZeroDivisionError
    assert len(list(feeder)) == 10
    feeder.close()


def test_a_feeder_that_is_not_closed_leaves_nothing(x: np.ndarray) -> None:
    feeder = Feeder(x, batch_size=10)
    loop = iter(feeder)
    next(loop)
    gone = weakref.ref(feeder)
    del feeder, loop
    assert gone() is None
    assert not [t for t in threading.enumerate() if t.name.startswith("pinfeed")]


def test_close(x: np.ndarray) -> None:
    feeder = Feeder(x, batch_size=10)
    loop = iter(feeder)
    next(loop)
    feeder.close()
    feeder.close()
    assert next(loop, None) is None
    for use in (
        lambda: iter(feeder),
        feeder.batches,
        lambda: feeder.set_epoch(0),
        lambda: feeder.load_state_dict({}),
    ):
        with pytest.raises(errors.ClosedError, match="closed"):
            use()


def test_close_while_another_thread_waits_for_a_batch(x: np.ndarray) -> None:
    asked, go_on = threading.Event(), threading.Event()

    class Slow(ArrayStore):
        def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
            if 20 in rows:
                asked.set()
                go_on.wait()
            super().gather(rows, out)

    feeder, caught = Feeder(Slow(x), batch_size=10), []

    def run() -> None:
        try:
            for _ in feeder:
                pass
        except errors.ClosedError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    asked.wait()
    while not feeder._loop._running().gi_running:  # type: ignore[union-attr,misc]
        pass
    feeder.close()
    go_on.set()
    thread.join()
    assert "closed while its loop was waiting" in str(caught[0])
    with pytest.raises(errors.ClosedError):
        iter(feeder)


@pytest.mark.parametrize("where", ["reader", "writer"])
def test_a_loop_that_the_garbage_collector_ends_in_its_own_worker(where: str) -> None:
    table = np.zeros((100, 2))
    dropped = threading.Event()

    class Collecting(ArrayStore):
        def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
            super().gather(rows, out)
            if where == "reader" and 50 in rows:
                self.collect()

        def scatter(self, rows: np.ndarray, values: np.ndarray) -> None:
            super().scatter(rows, values)
            if where == "writer":
                self.collect()

        def collect(self) -> None:
            dropped.wait()
            gc.collect()

    class Cycle:
        def __init__(self) -> None:
            self.me = self
            self.loop = Feeder(Collecting(table), batch_size=10, depth=3, device="cpu").batches()

    cycle = Cycle()
    batch = next(cycle.loop)
    batch.write_back(batch.data + 1)
    if where == "reader":
        next(cycle.loop)
        next(cycle.loop)
    del cycle, batch
    dropped.set()
    while any(t.name.startswith("pinfeed") for t in threading.enumerate()):
        pass
    assert table[:10].all()


def test_a_second_loop_at_the_same_time(x: np.ndarray) -> None:
    with Feeder(x, batch_size=10) as feeder:
        loop = iter(feeder)
        for second in (lambda: iter(feeder), feeder.batches, lambda: feeder.set_epoch(0)):
            with pytest.raises(errors.ClosedError, match="running"):
                second()
        assert len(list(loop)) == 10
        assert len(list(feeder)) == 10


def test_files_that_a_feeder_opened_are_closed_and_stores_that_it_was_given_are_not(
    x: np.ndarray, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", x)
    store = MmapStore(tmp_path / "x.npy")
    with Feeder((store, tmp_path / "x.npy"), batch_size=10) as feeder:
        own = feeder._stores.stores[1]
        list(feeder)
    out = np.empty((1, 3), np.float32)
    store.gather(np.array([3]), out)
    with pytest.raises(errors.ClosedError):
        own.gather(np.array([3]), out)
    store.close()


def test_a_memory_map_is_streamed_from_its_file(x: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", x)
    for given, kind in [
        (np.load(tmp_path / "x.npy", mmap_mode="r"), MmapStore),
        (np.load(tmp_path / "x.npy", mmap_mode="r")[10:], ArrayStore),
        (np.load(tmp_path / "x.npy", mmap_mode="c"), ArrayStore),
        (np.memmap(tmp_path / "x.npy", np.float32, "r", 128, (100, 3)), MmapStore),
        (np.memmap(tmp_path / "x.npy", np.float32, "r", 128, (50, 6)), ArrayStore),
    ]:
        with Feeder(given, batch_size=7, shuffle=True) as feeder:
            assert type(feeder._stores.stores[0]) is kind
            for batch in feeder.batches():
                np.testing.assert_array_equal(batch.data.numpy(force=True), given[batch.rows])


def test_a_memory_map_whose_file_was_replaced_is_what_was_mapped(
    x: np.ndarray, tmp_path: Path
) -> None:
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    np.save(tmp_path / "other.npy", x + 1)
    (tmp_path / "other.npy").replace(tmp_path / "x.npy")
    with Feeder(mapped, batch_size=100) as feeder:
        np.testing.assert_array_equal(next(iter(feeder)).numpy(force=True), x)


# ---- writing back --------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", ["array", "file"])
def test_rows_written_back_equal_the_plain_loop(depth: int, kind: str, tmp_path: Path) -> None:
    """On real threads; test_protocol.py runs the same under every schedule."""
    rng = np.random.default_rng(0)
    table, batches = rng.normal(size=(50, 4)), [rng.permutation(50)[:20] for _ in range(60)]
    want, seen = table.copy(), []
    for chosen in batches:
        seen.append(want[chosen])
        want[chosen] = want[chosen] * 0.5 + 1
    np.save(tmp_path / "t.npy", table)
    store: Any = ArrayStore(table) if kind == "array" else MmapStore(tmp_path / "t.npy", mode="r+")
    with Feeder(store, rows=batches, depth=depth) as feeder:
        for batch, expected in zip(feeder.batches(), seen, strict=True):
            np.testing.assert_array_equal(batch.data.numpy(force=True), expected)
            batch.write_back(batch.data.mul_(0.5).add_(1))
            batch.data.zero_()
        np.testing.assert_array_equal(
            table if kind == "array" else np.load(tmp_path / "t.npy"), want
        )
    store.close()


def test_writes_have_landed_after_break() -> None:
    table = np.zeros((10, 2))
    with Feeder(table, batch_size=2) as feeder:
        for batch in feeder.batches():
            batch.write_back(batch.data + 1)
            if 5 in batch.rows:
                break
        assert table[:6].all()
        assert not table[6:].any()


def test_values_that_need_gradients_can_be_written() -> None:
    table = np.zeros((4, 2), np.float32)
    with Feeder(table, batch_size=4) as feeder:
        for batch in feeder.batches():
            batch.write_back(torch.ones_like(batch.data, requires_grad=True))
    assert table.all()


# ---- resuming ------------------------------------------------------------------------------------


def feeder_of(x: np.ndarray, kind: str, depth: int = 3) -> Feeder:
    given: dict[str, Any] = {
        "shuffled": {"shuffle": True, "seed": 4, "batch_size": 7},
        "blocks": {"rows": rows.block_shuffled(2, block_rows=8, window_blocks=2), "batch_size": 7},
        "sampler": {"rows": DistributedSampler(x, num_replicas=1, rank=0), "batch_size": 7},  # type: ignore[arg-type]
        "batches": {"rows": [np.arange(i, i + 5) for i in range(0, 90, 5)]},
    }[kind]
    return Feeder(x, depth=depth, **given)


@pytest.mark.parametrize("kind", ["shuffled", "blocks", "sampler", "batches"])
def test_resume_anywhere(x: np.ndarray, kind: str) -> None:
    """From any batch of any epoch the rest is the same, with prefetching ahead; at the last batch, that is the next epoch."""
    states, all_rows = [], []
    with feeder_of(x, kind) as feeder:
        states.append((0, 0, feeder.state_dict()))
        for epoch in range(3):
            epoch_rows = []
            for batch in feeder.batches():
                epoch_rows.append(batch.rows.tolist())
                states.append((epoch, len(epoch_rows), feeder.state_dict()))
            states.append((epoch + 1, 0, feeder.state_dict()))
            all_rows.append(epoch_rows)
    for epoch, position, state in states:
        if epoch < 3 and (position % 4 == 0 or position >= len(all_rows[epoch]) - 1):
            with feeder_of(x, kind, depth=epoch) as feeder:
                if position == len(all_rows[epoch]):
                    epoch, position = epoch + 1, 0
                if epoch == 3:
                    continue
                feeder.load_state_dict(json.loads(json.dumps(state)))
                assert feeder.epoch == epoch
                assert numbers(feeder) == all_rows[epoch][position:]
                if epoch < 2:
                    assert numbers(feeder) == all_rows[epoch + 1]


def test_an_epoch_without_a_length_that_was_whole_is_not_begun_again(x: np.ndarray) -> None:
    """Nobody knows that before the sampler ends: then the loop goes on with the next epoch."""

    class Unsized:
        def __iter__(self) -> Iterator[int]:
            return iter(range(20))

    with Feeder(x, rows=Unsized(), batch_size=7) as feeder:
        states = [feeder.state_dict() for _ in feeder]
    with Feeder(x, rows=Unsized(), batch_size=7) as feeder:
        feeder.load_state_dict(states[-1])
        assert numbers(feeder) == [list(range(7)), list(range(7, 14)), list(range(14, 20))]
        assert feeder.epoch == 2
        feeder.load_state_dict(states[-2])
        assert numbers(feeder) == [list(range(14, 20))]
        assert feeder.epoch == 1


@pytest.mark.parametrize("kind", ["shuffled", "blocks", "sampler", "batches"])
def test_set_epoch_keeps_a_position_in_that_epoch(
    x: np.ndarray, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As the loop of a program that goes on does: ``for epoch in range(feeder.epoch, n): feeder.set_epoch(epoch)``."""
    with feeder_of(x, kind) as feeder:
        want = [numbers(feeder) for _ in range(3)]
        feeder.set_epoch(1)
        for i, _ in enumerate(feeder):
            state = feeder.state_dict()
            if i == 3:
                break
    with feeder_of(x, kind) as feeder:
        feeder.load_state_dict(state)
        got = []
        for epoch in range(feeder.epoch, 3):
            feeder.set_epoch(epoch)
            got.append(numbers(feeder))
        assert got == [want[1][4:], want[2]]
        assert not caplog.records
        feeder.load_state_dict(state)
        feeder.set_epoch(2)
        assert "the position that was loaded, batch 4 of epoch 1, is dropped" in caplog.text
        assert numbers(feeder) == want[2]
        feeder.set_epoch(2)
        assert numbers(feeder) == want[2], "of an epoch that was run, from its beginning"
        caplog.clear()
        feeder.set_epoch(1)
        for _ in feeder:
            state = feeder.state_dict()
        feeder.load_state_dict(state)
        assert feeder.epoch == 2
        feeder.set_epoch(1)
        assert "epoch 1 runs again" in caplog.text
        assert numbers(feeder) == want[1]


def test_resume_twice_in_one_epoch(x: np.ndarray) -> None:
    with feeder_of(x, "shuffled") as feeder:
        want = numbers(feeder)
    got: list[list[int]] = []
    state: dict[str, Any] | None = None
    while state is None or state["epoch"] == 0:
        with feeder_of(x, "shuffled") as feeder:
            if state is not None:
                feeder.load_state_dict(state)
            for i, batch in enumerate(feeder.batches()):
                got.append(batch.rows.tolist())
                if i == 3:
                    break
            state = feeder.state_dict()
            if state["batch"] == len(want):
                break
    assert got == want


def test_after_a_break_the_next_loop_is_the_next_epoch_and_the_state_is_where_it_broke(
    x: np.ndarray,
) -> None:
    with feeder_of(x, "shuffled") as feeder:
        epochs = [numbers(feeder) for _ in range(2)]
    with feeder_of(x, "shuffled") as feeder:
        for i, _ in enumerate(feeder):
            if i == 2:
                break
        state = feeder.state_dict()
        assert numbers(feeder) == epochs[1]
        feeder.load_state_dict(state)
        assert numbers(feeder) == epochs[0][3:]


def test_a_state_of_another_feeder_is_refused(x: np.ndarray) -> None:
    with feeder_of(x, "shuffled") as feeder:
        state = feeder.state_dict()
    with Feeder(x, batch_size=8, shuffle=True, seed=4) as feeder:
        with pytest.raises(errors.ArgumentError, match="batch_size was 7, is 8"):
            feeder.load_state_dict(state)
        with pytest.raises(errors.ArgumentError, match="not a state"):
            feeder.load_state_dict({"epoch": 1})


def test_a_sampler_that_does_not_repeat_itself_is_found_out(x: np.ndarray) -> None:
    with Feeder(
        x, rows=RandomSampler(x, generator=torch.Generator().manual_seed(0)), batch_size=10
    ) as feeder:
        next(iter(feeder))
        state = feeder.state_dict()
    with Feeder(
        x, rows=RandomSampler(x, generator=torch.Generator().manual_seed(1)), batch_size=10
    ) as feeder:
        feeder.load_state_dict(state)
        with pytest.raises(errors.ArgumentError, match="gave other rows"):
            list(feeder)


# ---- plan, statistics ----------------------------------------------------------------------------


def test_the_plan_sizes_the_batch(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((5000, 256), np.float32))
    with Feeder(tmp_path / "x.npy", config=Config(cpu_memory_limit=MiB(10))) as feeder:
        assert feeder.plan.host_bytes <= MiB(10)
        assert {len(batch) for batch in feeder} == {
            feeder.plan.batch_size,
            5000 % feeder.plan.batch_size,
        }
        assert "of 10.0 MiB" in str(feeder.plan)
    with (
        Feeder(tmp_path / "x.npy", batch_size=10) as feeder,
        pytest.raises(errors.BudgetError, match=r"cpu_memory_limit is 1\.0 KiB"),
    ):
        Feeder(tmp_path / "x.npy", config=Config(cpu_memory_limit=1024))


def test_the_bound_of_a_batch_is_said_and_leaves_whole_batches_alone() -> None:
    config = Config(cpu_memory_limit=MiB(64))
    x = np.zeros((100_000, 1), np.float32)
    with Feeder(x, config=config, device="cpu") as feeder:
        assert feeder.plan.batch_size == 1 << 16
        assert (
            "65,536 rows a batch, as larger ones move no more rows per second; preferred_batch_size takes more"
            in str(feeder.plan)
        )
    with Feeder(x, config=config, rows=[np.arange(90_000)], device="cpu") as feeder:
        assert [len(batch) for batch in feeder] == [90_000]


def test_depth_goes_before_that_of_the_config(x: np.ndarray) -> None:
    config = Config(cpu_memory_limit=MiB(10), depth=4)
    with Feeder(x, config=config) as feeder:
        assert feeder.plan.depth == 4
    with Feeder(x, config=config, depth=0) as feeder:
        assert (feeder.plan.depth, feeder.plan.n_slots) == (0, 1)


def test_batches_larger_than_planned_are_refused(x: np.ndarray) -> None:
    def endless() -> Any:
        yield from ([i] for i in range(3))
        yield list(range(100))

    with Feeder(
        x, rows=endless(), config=Config(cpu_memory_limit=MiB(8), preferred_batch_size=20)
    ) as feeder:
        loop = iter(feeder)
        assert [len(next(loop)) for _ in range(3)] == [1, 1, 1]
        with pytest.raises(errors.ArgumentError, match="100 rows; expected at most 20"):
            next(loop)


@pytest.mark.parametrize("depth", DEPTHS)
def test_statistics(x: np.ndarray, depth: int) -> None:
    with Feeder(x, batch_size=10, depth=depth, timeline=True) as feeder:
        for _ in range(2):
            for batch in feeder.batches():
                batch.write_back(batch.data)
        stats = feeder.stats
        assert (stats.batches, stats.rows, stats.bytes) == (20, 200, 2 * x.nbytes)
        assert 0 < stats.wait_s <= stats.seconds
        assert 0 < stats.starved <= 1
        assert stats.read_s > 0
        assert stats.write_s > 0
        assert "20 batches, 200 rows" in str(stats)
        lanes = [span.lane for span in feeder.timeline.spans]
        assert all(lanes.count(lane) == 20 for lane in ("read", "wait", "compute", "write"))


def test_the_timeline_can_be_saved(x: np.ndarray, tmp_path: Path) -> None:
    with Feeder(x, batch_size=10, timeline=True) as feeder:
        with pytest.raises(errors.ArgumentError, match="empty"):
            feeder.timeline.save(tmp_path / "t.json")
        list(feeder)
        feeder.timeline.save(tmp_path / "t.json")
        feeder.timeline.save(tmp_path / "t.png")
        end = max(span.end_s for span in feeder.timeline.spans)
        # Spans that began before are cut, not left out.
        feeder.timeline.save(tmp_path / "last.json", last_s=end / 1000)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["name"].split()[0] for event in events} >= {"read", "wait", "compute"}
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    events = [
        event
        for event in json.loads((tmp_path / "last.json").read_text())["traceEvents"]
        if event["ph"] != "M"
    ]
    assert events
    assert min(event["ts"] for event in events) >= end * 0.998e6
    with (
        Feeder(x, batch_size=10) as feeder,
        pytest.raises(errors.ArgumentError, match="timeline=True"),
    ):
        _ = feeder.timeline


def test_progress(x: np.ndarray, capsys: pytest.CaptureFixture[str]) -> None:
    with Feeder(x, batch_size=10, progress=True) as feeder:
        list(feeder)
    assert "10/10" in capsys.readouterr().err


def test_each_loop_in_a_thread_of_its_own(x: np.ndarray) -> None:
    def run(i: int) -> None:
        with Feeder(x, batch_size=7, shuffle=True, seed=i) as feeder:
            results[i] = sorted(itertools.chain(*numbers(feeder)))

    results: dict[int, list[int]] = {}
    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[i] == list(range(100)) for i in range(4))


# ---- small batches that are gathered together ----------------------------------------------------


class Broken(ArrayStore):
    """Rows, one of which cannot be read, as often as it says."""

    def __init__(self, array: np.ndarray, row: int, times: float) -> None:
        super().__init__(array)
        self.row = row
        self.times = times

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        if self.row in rows and self.times > 0:
            self.times -= 1
            raise OSError(f"row {self.row}")
        super().gather(rows, out)


@pytest.mark.parametrize("row", [0, 10, 47, 79, 80, 333, 999])
def test_batches_before_an_error_are_lent_however_many_are_gathered_together(row: int) -> None:
    array = np.arange(1000.0)[:, None]
    array.flags.writeable = False
    with Feeder(Broken(array, row, np.inf), batch_size=10) as feeder:
        assert feeder.plan.depth > 8
        given: list[float] = []
        with pytest.raises(OSError, match=f"row {row}"):
            for x in feeder:
                given += x[:, 0].tolist()
        assert given == list(range(row // 10 * 10))


@pytest.mark.parametrize("times", [1, 2])
def test_an_error_that_does_not_happen_again_is_raised_all_the_same(times: int) -> None:
    with (
        Feeder(Broken(np.arange(1000.0), 333, times), batch_size=10) as feeder,
        pytest.raises(OSError, match="row 333"),
    ):
        list(feeder)


def test_batches_that_were_gathered_together_are_each_ones_own() -> None:
    array = np.arange(300.0)[:, None]
    with Feeder(array, batch_size=10) as feeder:
        batches = list(feeder)
        for x in batches[::2]:
            version = batches[1]._version
            x.add_(1)
            assert batches[1]._version == version, (
                "autograd would take it for a change of the other one"
            )
            assert not x._is_view()
    assert [x[0, 0].item() for x in batches] == [10.0 * i + (i % 2 == 0) for i in range(30)]


@pytest.mark.parametrize("batch_size", [1, 7, 10, 64])
def test_a_state_counts_batches_and_not_groups(batch_size: int) -> None:
    array = np.arange(200.0)
    for stop in (1, 3, 8, 9):
        with Feeder(array, batch_size=batch_size, shuffle=True) as feeder:
            whole = [x.tolist() for x in feeder]
        with Feeder(array, batch_size=batch_size, shuffle=True) as feeder:
            for i, _ in enumerate(feeder, 1):
                if i == min(stop, len(whole)):
                    state = feeder.state_dict()
                    break
        with Feeder(array, batch_size=batch_size, shuffle=True) as feeder:
            feeder.load_state_dict(state)
            assert feeder.epoch == (stop >= len(whole))
            rest = [x.tolist() for x in feeder]
            assert rest == whole[stop:] if stop < len(whole) else len(rest) == len(whole)


def test_the_plan_says_why_rows_go_as_they_do() -> None:
    asked: list[Any] = []

    class Choosing(HostDevice):
        def choose_route(self, stores: Any, n_rows: int, wanted: str | None) -> str:
            asked.append((len(stores), n_rows, wanted))
            return "because it was measured"

    array = np.zeros((100, 2))
    for options in (
        {"batch_size": 10},
        {"batch_size": 10, "route": "staged"},
        {"rows": [np.arange(7), np.arange(3)]},
    ):
        with Feeder(array, device=Choosing(), **options) as feeder:  # type: ignore[arg-type]
            assert feeder.plan.notes[0] == "because it was measured"
            assert str(feeder.plan).splitlines()[-1] == "because it was measured"
    assert asked == [(1, 10, None), (1, 10, "staged"), (1, 7, None)]
    with pytest.raises(
        errors.ArgumentError, match="route='fast': expected 'direct', 'staged' or None"
    ):
        Feeder(array, batch_size=10, route="fast")


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_rows_that_the_user_writes_over(kind: str, depth: int) -> None:
    """A sampler that gives the same memory each time, as one does that saves allocations."""
    x = np.arange(100.0)
    batches = [np.arange(i, i + 5) for i in range(0, 90, 7)]

    class Sampler:
        def __iter__(self) -> Any:
            own = np.empty(5, np.int64)
            for batch in batches:
                own[:] = batch
                yield own if kind == "numpy" else torch.from_numpy(own)

    with Feeder(x, rows=Sampler(), batch_size=None, depth=depth, device="cpu") as feeder:
        for batch, want in zip(feeder.batches(), batches, strict=True):
            np.testing.assert_array_equal(batch.rows, want)
            np.testing.assert_array_equal(batch.data.numpy(), x[want])
            batch.write_back(batch.data + 1)
    for batch in batches:
        assert (x[batch] == np.arange(100.0)[batch] + 1).all()


# ---- closing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_loop_that_begins_after_its_feeder_was_closed(x: np.ndarray, depth: int) -> None:
    """It must not look like an epoch without batches."""
    with Feeder(x, batch_size=10, depth=depth) as feeder:
        loops = [iter(feeder)]
    for loop in loops:
        with pytest.raises(errors.ClosedError, match="the feeder is closed"):
            next(loop)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_feeder_that_another_thread_closes(x: np.ndarray, depth: int) -> None:
    """Its loop must not look as if it had come to its end."""
    feeder = Feeder(x, batch_size=10, depth=depth)
    loop = feeder.batches()
    batch = next(loop)
    thread = threading.Thread(target=feeder.close)
    thread.start()
    thread.join()
    with pytest.raises(errors.ClosedError, match="closed by another thread"):
        batch.write_back(batch.data)
    with pytest.raises(errors.ClosedError, match="closed by another thread"):
        next(loop)


# ---- verify --------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("change", [0.5, np.nan])
def test_rows_that_the_body_changes_by_itself_are_noticed(depth: int, change: float) -> None:
    """Batches that were prefetched do not see it, which without verify= nobody is told."""
    prefetched = threading.Event()

    class Told(ArrayStore):
        def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
            super().gather(rows, out)
            if 10 in rows:
                prefetched.set()

    a, b = np.arange(200.0).reshape(100, 2), np.ones(100, np.float32)
    with Feeder(
        {"a": Told(a), "b": b}, batch_size=10, depth=depth, verify=True, device="cpu"
    ) as feeder:
        loop = iter(feeder)
        next(loop)
        prefetched.wait()
        a[13] *= change
        a[17] *= change
        with pytest.raises(
            errors.VerificationError, match=r"batch 1: 2 of 10 rows of source\['a'\] .* row 13;"
        ):
            next(loop)
        assert len(list(feeder)) == 10


def test_a_batch_of_another_device_is_verified() -> None:
    a = np.arange(40.0)
    with Feeder(a, batch_size=4, verify=True, device=SimDevice(lazy)) as feeder:
        for batch in feeder.batches():
            batch.write_back(batch.data)
        loop = iter(feeder)
        next(loop)
        next(loop)
        a += 1
        with pytest.raises(errors.VerificationError, match="batch 2: 4 of 4 rows"):
            next(loop)


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_changes_as_it_should_passes_verification(depth: int) -> None:
    """Write-backs, a row that several batches have, rows that are not numbers, bfloat16, rows without bytes; and any change at depth 0."""
    x = torch.full((40, 3), torch.nan, dtype=torch.bfloat16)
    y = torch.zeros(40)
    order = [rows % 40 for rows in np.random.default_rng(0).integers(0, 40, (30, 1)) + np.arange(8)]
    with Feeder(
        (x, y, np.empty((40, 0))), rows=order, depth=depth, verify=True, device="cpu"
    ) as feeder:
        for batch in feeder.batches():
            batch.write_back((None, batch.data[1] + 1, None))
            if depth == 0:
                x += 1
    assert y.sum() == 30 * 8

"""Ragged rows in a Feeder: batches equal those of a plain loop, at every depth and limit."""

import itertools
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.feeders import DEPTHS
from support.ragged import Ragged
from support.schedules import FAVOURED, randomly
from support.stores import saved
from torch.utils.data import DataLoader

from pinfeed import (
    ArrayStore,
    BudgetError,
    Config,
    DeviceError,
    Feeder,
    MiB,
    NpyStore,
    RaggedStore,
    Ranks,
    RowDataset,
    StoreError,
    VerificationError,
    WriteBackError,
    rows,
)
from pinfeed.pipeline.loop_memory import ragged_parts
from pinfeed.testing import SimDevice, favour, lazy

LAYOUTS: list[Any] = ["offsets", "padded", "jagged"]
PLAIN = Ragged(60, 9, (2,), gap=3)
LABELS = np.arange(60, dtype=np.float32)
ORDERS = [None, rows.shuffled(3), rows.block_shuffled(1, block_rows=4, window_blocks=2)]


def source_of(kind: str, folder: Path) -> Any:
    """Return items in memory, in a mapped file, or in a file that may not be mapped.

    Others than "unmapped" are open for writing, so they are not copied, either.
    """
    if kind == "memory":
        return PLAIN.values
    path = saved(folder / "values.npy", PLAIN.values)
    if kind == "file":
        return path
    mode = "r" if kind == "unmapped" else "r+"
    return NpyStore(path, mode=mode, memory_map=False, keep_cache=kind == "kept")


def require_equal(data: Any, wanted: Any, layout: str, padding: int = 0) -> None:
    """Compare a batch with that of a plain loop."""
    if layout == "jagged":
        assert data.is_nested
        data = data.values(), data.offsets()
    for got, want in zip(data, PLAIN.batch(wanted, layout, padding), strict=True):
        values = got._array if hasattr(got, "_array") else got.numpy()
        assert values.dtype == want.dtype
        np.testing.assert_array_equal(values, want)


def shuffled_rows(order: Any, epoch: int) -> list[int]:
    return np.asarray((order or rows.sequential()).bind(60, epoch)(np.arange(60))).tolist()


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("kind", "layout", "depth"),
    [
        *itertools.product(["memory"], LAYOUTS[:2], [*DEPTHS, None]),
        *itertools.product(["file"], LAYOUTS[:2], [0, 2]),
        *itertools.product(["uncached", "unmapped"], LAYOUTS[:2], [1, 5]),
        *itertools.product(["memory"], LAYOUTS[2:], [0, 2]),
    ],
)
def test_batches_equal_those_of_a_plain_loop(
    kind: str, layout: Any, depth: int | None, tmp_path: Path
) -> None:
    source = source_of(kind, tmp_path)
    with RaggedStore(source, PLAIN.offsets, layout=layout, padding=5) as store:
        padded = layout == "padded"
        for order, is_bounded in (
            (None, True),
            (ORDERS[1], False),
            *((o, True) for o in ORDERS[1:]),
        ):
            chosen: Any = {"batch_size": 7, "rows": order}
            if is_bounded:
                bounded = rows.element_batches(store.lengths, 20, order=order, padded=padded)
                chosen = {"rows": bounded}
            parts = {"x": [store], "label": LABELS}
            with Feeder(parts, device="cpu", depth=depth, **chosen) as feeder:
                for epoch in range(2):
                    # All batches are kept and stay unchanged.
                    kept = [(batch.rows.tolist(), batch.data) for batch in feeder.batches()]
                    got = list(itertools.chain(*(wanted for wanted, _ in kept)))
                    assert got == shuffled_rows(order, epoch)
                    for wanted, data in kept:
                        require_equal(data["x"][0], wanted, layout, 5)
                        np.testing.assert_array_equal(data["label"], LABELS[wanted])
    if isinstance(source, NpyStore):
        source.close()


def run_on(device: SimDevice, depth: int, layout: Any, items: Any) -> None:
    """Compare the batches of a loop that changes its batches, and rows of another store."""
    store = RaggedStore(items, PLAIN.offsets, layout=layout, padding=5)
    labels = ArrayStore(LABELS.copy())
    sizes = [3, 9, 1, 0, 5, 9, 12, 2, 4]
    chosen = np.split(np.random.default_rng(1).permutation(60)[: sum(sizes)], np.cumsum(sizes))
    seen: dict[int, list[np.ndarray]] = {}
    with Feeder((store, labels), rows=chosen[:-1], depth=depth, device=device) as feeder:
        for i, batch in enumerate(feeder.batches()):
            (values, bounds), label = batch.data

            def step(a: Any, b: Any, c: Any, i: int = i) -> None:
                seen[i] = [a.copy(), b.copy(), c.copy()]
                # The batch belongs to the user.
                a.fill(9)
                b.fill(9)
                c += 100

            device.launch(step, values, bounds, label)
            batch.write_back((None, label))
            device.launch(lambda a: a.fill(-1), label)
            del batch, values, bounds, label
    device.drain()
    for i, wanted in enumerate(chosen[:-1]):
        for got, want in zip(
            seen[i], [*PLAIN.batch(wanted, layout, 5), LABELS[wanted]], strict=True
        ):
            np.testing.assert_array_equal(got, want)
    expected = LABELS.copy()
    expected[np.concatenate(chosen[:-1])] += 100
    np.testing.assert_array_equal(labels.array, expected)


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("direct", [False, True])
def test_adversarial_schedules(layout: Any, direct: bool) -> None:
    for depth in DEPTHS:
        for names in FAVOURED[depth % 2 :: 2]:
            run_on(SimDevice(favour(*names), direct=direct), depth, layout, PLAIN.values)
        for choose in (lazy, randomly(depth)):
            run_on(SimDevice(choose, direct=direct), depth, layout, PLAIN.values)


def test_a_file_on_a_device(tmp_path: Path) -> None:
    for depth in DEPTHS:
        run_on(SimDevice(randomly(depth)), depth, "padded", saved(tmp_path / "x.npy", PLAIN.values))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_ragged_store_alone(layout: Any) -> None:
    store = RaggedStore(PLAIN.values, PLAIN.offsets, layout=layout)
    with Feeder(store, batch_size=25, device="cpu") as feeder:
        assert "source ('ragged', 2) uint16" in repr(feeder)
        got = list(feeder)
        assert len(got) == len(feeder) == 3
        for i, data in enumerate(got):
            require_equal(data, range(60)[25 * i : 25 * i + 25], layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_without_items(layout: Any) -> None:
    store = RaggedStore(np.arange(3.0), [0, 0, 0, 3, 3], layout=layout)
    with Feeder(store, batch_size=1, device="cpu", depth=2) as feeder:
        found = [data.values() if layout == "jagged" else data[0] for data in feeder]
        assert [values.numel() for values in found] == [0, 0, 3, 0]
    if layout != "jagged":
        with Feeder(store, batch_size=1, device=SimDevice(lazy), depth=2) as feeder:
            assert len(list(feeder)) == 4


def test_a_resumed_loop_has_the_remaining_batches() -> None:
    store = RaggedStore(PLAIN.values, PLAIN.offsets, layout="padded")

    def make() -> Feeder:
        chosen = rows.element_batches(store.lengths, 30, order=rows.shuffled(2), padded=True)
        return Feeder(store, rows=chosen, device="cpu", depth=2)

    with make() as feeder:
        want = [batch.rows.tolist() for batch in feeder.batches()]
    with make() as feeder:
        for i, _ in enumerate(feeder):
            if i == 2:
                break
        state = feeder.state_dict()
    with make() as feeder:
        feeder.load_state_dict(state)
        for wanted, batch in zip(want[3:], feeder.batches(), strict=True):
            assert batch.rows.tolist() == wanted
            require_equal(batch.data, wanted, "padded")


# -- write-backs and verification ------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ragged_rows_cannot_be_written(layout: Any) -> None:
    x = np.zeros((60, 2), np.float32)
    store = RaggedStore(PLAIN.values, PLAIN.offsets, layout=layout)
    with Feeder({"x": x, "tokens": store}, batch_size=30, device="cpu") as feeder:
        for batch in feeder.batches():
            with pytest.raises(
                WriteBackError, match=re.escape("source['tokens'], which has ragged")
            ):
                batch.write_back(batch.data)
            with pytest.raises(WriteBackError, match=re.escape("without ['tokens']")):
                batch.write_back({"x": batch.data["x"]})
            batch.write_back({"x": batch.data["x"] + 1, "tokens": None})
    assert (x == 1).all()
    with Feeder(store, batch_size=30, device="cpu") as feeder:
        for batch in feeder.batches():
            with pytest.raises(WriteBackError, match="which has ragged, read-only rows"):
                batch.write_back(batch.data)


def test_items_that_another_source_writes_are_refused() -> None:
    x = np.zeros(60, np.float32)
    with Feeder((x, RaggedStore(x, np.arange(61))), batch_size=30, device="cpu") as feeder:
        for batch in feeder.batches():
            with pytest.raises(WriteBackError, match="have rows in common"):
                batch.write_back((batch.data[0], None))


class Changing(ArrayStore):
    """Items, one of which changes before it is gathered for the second time."""

    def __init__(self, array: np.ndarray, item: int) -> None:
        super().__init__(array)
        self._item = item
        self._n = 0

    def gather(self, rows: Any, out: Any) -> None:
        super().gather(rows, out)
        is_item = rows == self._item
        self._n += is_item.any()
        out[is_item] += self._n == 2


@pytest.mark.parametrize(
    ("layout", "device"),
    [("offsets", "cpu"), ("padded", "cpu"), ("jagged", "cpu"), ("padded", SimDevice(lazy))],
)
def test_verification_finds_changed_items(layout: Any, device: Any) -> None:
    lengths = np.diff(PLAIN.offsets)
    row = int(lengths[40:].argmax()) + 40
    items = Changing(PLAIN.values, int(PLAIN.offsets[row]) + 1)
    same = RaggedStore(PLAIN.values, PLAIN.offsets, layout=layout)
    store = RaggedStore(items, PLAIN.offsets, layout=layout)
    options: Any = {"batch_size": 10, "device": device, "verify": True, "depth": 2}
    with Feeder([LABELS, same, store], **options) as feeder:
        with pytest.raises(
            VerificationError,
            match=re.escape(f"batch {row // 10}: 1 of 10 rows of source[2] differ")
            + f".*beginning with row {row},",
        ):
            list(feeder)
        # They are the same from the third time on.
        assert len(list(feeder)) == 6


# -- memory ----------------------------------------------------------------------------------------
def lengths_with_one_long_row(n_rows: int = 400) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.full(n_rows, 50)
    lengths[7] = 5000
    return lengths, np.concatenate(([0], np.cumsum(lengths)))


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("depth", DEPTHS)
def test_device_memory_is_at_most_that_of_the_plan(layout: Any, depth: int) -> None:
    lengths, offsets = lengths_with_one_long_row()
    store = RaggedStore(np.zeros(offsets[-1], np.float32), offsets, layout=layout)
    padded = layout == "padded"
    for chosen in (
        {"batch_size": 10, "rows": rows.shuffled(1)},
        {"rows": rows.element_batches(lengths, 5000, order=rows.shuffled(1), padded=padded)},
        {"rows": [np.arange(5), np.arange(20, 30), np.arange(5, 9)]},
    ):
        device = SimDevice(favour("compute", "read", "pinfeed-read"))
        with Feeder(store, device=device, depth=depth, **chosen) as feeder:
            for _ in range(2):
                for batch in feeder:
                    del batch
            assert 0 < device.peak_bytes <= feeder.plan.device_bytes


def test_the_plan_counts_the_longest_rows() -> None:
    lengths, offsets = lengths_with_one_long_row()
    values = np.zeros(offsets[-1], np.float32)

    def batch_nbytes(layout: Any, **options: Any) -> int:
        store = RaggedStore(values, offsets, layout=layout)
        with Feeder(store, device=SimDevice(lazy), depth=2, **options) as feeder:
            [item] = [item for item in feeder.plan.items if item.what == "batches"]
            return item.nbytes

    def about(elements: float) -> Any:
        # Offsets or lengths are the other part.
        return pytest.approx(elements * 4, abs=2048)

    limits = Config(preferred_batch_size=10, gpu_memory_limit=MiB(9), cpu_memory_limit=MiB(32))
    assert batch_nbytes("offsets", config=limits) == about(5000 + 9 * 50)
    assert batch_nbytes("padded", config=limits) == about(10 * 5000)
    # A rank may have a row twice, because of padding.
    shared = {"rows": rows.per_rank(rows.shuffled(), rank=0, world_size=3)}
    assert batch_nbytes("offsets", config=limits, **shared) == about(2 * (5000 + 4 * 50))
    shared = {"rows": rows.per_rank(rows.shuffled(), rank=0, world_size=3, drop_last=True)}
    assert batch_nbytes("offsets", config=limits, **shared) == about(5000 + 9 * 50)
    # Without limits, memory grows in steps of a sixteenth.
    assert batch_nbytes("offsets", batch_size=10) == about((5000 + 9 * 50) * 17 / 16)
    assert batch_nbytes("padded", batch_size=10) == about(10 * 5000 * 17 / 16)
    assert batch_nbytes("offsets", rows=[[0, 1], [2]]) == about(2 * 5000 * 17 / 16)
    bounded = rows.element_batches(lengths, 6000, padded=True)
    assert batch_nbytes("padded", rows=bounded) == about(6000)
    assert batch_nbytes("offsets", rows=bounded) == about(6000)
    # The bound of rows that are not padded holds for such batches only.
    bounded = rows.element_batches(lengths, 6000)
    assert batch_nbytes("offsets", rows=bounded) == about(6000)
    assert batch_nbytes("padded", rows=bounded) == about(5000 * 120 * 17 / 16)


@given(
    st.lists(st.integers(0, 9) | st.just(60), min_size=2, max_size=40),
    st.integers(1, 9),
    st.sampled_from(LAYOUTS[:2]),
    st.sampled_from([*ORDERS[1:], "per rank", "batches", "elements", "padded elements"]),
)
@settings(max_examples=60)
def test_no_batch_is_larger_than_planned(
    lengths: list[int], batch_size: int, layout: Any, kind: Any
) -> None:
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    store = RaggedStore(np.zeros(offsets[-1] + 1, np.int8), offsets, layout=layout)
    chosen: Any = {"batch_size": batch_size, "rows": kind}
    if kind == "per rank":
        chosen["rows"] = rows.per_rank(rows.shuffled(1), rank=1, world_size=2)
    elif kind == "batches":
        chosen = {"rows": [np.arange(batch_size) % 2, np.array([1])]}
    elif kind in ("elements", "padded elements"):
        chosen = {
            "rows": rows.element_batches(
                lengths, 60, order=rows.shuffled(2), padded=kind.startswith("padded")
            )
        }
    with Feeder(store, device="cpu", depth=0, **chosen) as feeder:
        most = feeder.batch_size
        assert most is not None
        for batch in feeder.batches():
            nbytes = [tensor.nbytes for tensor in batch.data]
            assert len(batch.rows) <= most
            for is_limited in (False, True):
                parts = ragged_parts(
                    store,
                    chosen["rows"],
                    len(batch.rows),
                    is_limited=is_limited,
                    is_staged=False,
                )
                assert all(n <= part.nbytes for n, part in zip(nbytes, parts, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_one_long_row_does_not_multiply_the_memory_of_batches(layout: Any) -> None:
    _, offsets = lengths_with_one_long_row(10_000)
    store = RaggedStore(np.zeros(offsets[-1], np.float32), offsets, layout=layout)
    device = SimDevice(favour("compute", "read", "pinfeed-read"))
    others = [np.arange(i, i + 8) for i in range(8, 392, 8)]
    with Feeder(store, rows=BatchSampler(others), device=device, depth=2) as feeder:
        for batch in feeder:
            del batch
        n_batches = feeder.plan.items[0].count
        assert device.peak_bytes <= n_batches * 8 * 160 * 4 < feeder.plan.device_bytes / 10


class BatchSampler(list[Any]):
    """Batches of unknown sizes with a known maximum."""

    batch_size = 8


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_limits_choose_the_batch_size(layout: Any) -> None:
    _, offsets = lengths_with_one_long_row()
    store = RaggedStore(np.zeros(offsets[-1], np.float32), offsets, layout=layout)
    limits = Config(gpu_memory_limit=300_000, cpu_memory_limit=MiB(32), depth=2)
    device = SimDevice(favour("compute", "read", "pinfeed-read"))
    with Feeder(store, config=limits, shuffle=True, device=device) as feeder:
        for batch in feeder:
            del batch
        assert feeder.plan.device_bytes <= 300_000
        assert device.peak_bytes <= 300_000
        # Most batches are far smaller if they are not padded.
        assert feeder.plan.batch_size == (3 if layout == "padded" else feeder.plan.batch_size)
        assert feeder.plan.batch_size >= 3
    with pytest.raises(BudgetError, match="batches of one row need"):
        Feeder(
            store,
            config=Config(gpu_memory_limit=50_000, cpu_memory_limit=MiB(32), depth=2),
            device=SimDevice(lazy),
        )


def test_without_a_preferred_size_a_batch_has_64_mib() -> None:
    offsets = np.arange(2001) * 100
    store = RaggedStore(np.zeros((200_000, 256), np.float32), offsets)
    with Feeder(store, config=Config(cpu_memory_limit=MiB(4000)), device="cpu") as feeder:
        assert 550 <= feeder.plan.batch_size <= 660


def test_bounds_of_rows_are_those_of_the_plan() -> None:
    lengths = np.arange(1, 61)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    store = RaggedStore(np.zeros(offsets[-1], np.uint8), offsets)
    chosen = rows.element_batches(lengths, 100)
    with Feeder((store, LABELS), rows=chosen, device="cpu") as feeder:
        # The 13 shortest rows have 91 elements.
        assert feeder.plan.batch_size == 13
        assert len(next(iter(feeder.batches())).rows) == 13
    with pytest.raises(BudgetError, match="rows yields batches of up to 13 rows"):
        Feeder(
            (store, np.zeros((60, 10_000), np.float32)),
            rows=chosen,
            config=Config(cpu_memory_limit=MiB(4)),
            device="cpu",
        )


# -- reading ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "order", "note"),
    [
        ("file", None, "by a memory map (the file fits)"),
        ("uncached", None, "ragged rows, read in sequence"),
        ("uncached", ORDERS[1], "ragged rows, read row by row, with many reads at a time"),
        ("uncached", ORDERS[2], "prefetched one window ahead"),
        ("kept", ORDERS[1], "prefetched sequentially in the background"),
        ("unmapped", ORDERS[1], "ragged rows, loaded into RAM during the first epoch"),
    ],
)
def test_the_plan_says_how_a_file_is_read(kind: str, order: Any, note: str, tmp_path: Path) -> None:
    source = source_of(kind, tmp_path)
    with RaggedStore(source, PLAIN.offsets) as store:
        bounded = rows.element_batches(store.lengths, 30, order=order)
        for chosen in ({"batch_size": 7, "rows": order}, {"rows": bounded}):
            with Feeder(store, device="cpu", **chosen) as feeder:
                assert note in feeder.plan.notes[-1]
                assert feeder.plan.notes[-1].startswith("values.npy, ")
    if isinstance(source, NpyStore):
        source.close()


def test_ranks_that_share_batches_read_windows_ahead(tmp_path: Path) -> None:
    with source_of("uncached", tmp_path) as source:
        store = RaggedStore(source, PLAIN.offsets)
        chosen = rows.element_batches(store.lengths, 20, order=ORDERS[2])
        ranks = Ranks("join", rank=1, world_size=2)
        with Feeder(store, rows=chosen, ranks=ranks, device="cpu", depth=2) as feeder:
            assert "prefetched one window ahead" in feeder.plan.notes[-1]
            for data, wanted in zip(feeder, list(chosen)[1::2], strict=True):
                require_equal(data, wanted, "offsets")


def test_windows_are_read_ahead_from_a_resumed_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[tuple[int, int]] = []
    has_all = threading.Event()

    def announce(store: Any, start: int, stop: int) -> None:
        announced.append((start, stop))
        if sum(stop - start for start, stop in announced) == PLAIN.offsets[-1] - PLAIN.offsets[0]:
            has_all.set()

    monkeypatch.setattr(NpyStore, "will_gather", announce)
    with source_of("uncached", tmp_path) as source:
        store = RaggedStore(source, PLAIN.offsets)
        chosen = rows.element_batches(store.lengths, 20, order=ORDERS[2])
        with Feeder(store, rows=chosen, device="cpu", depth=0) as feeder:
            want = []
            for batch in feeder:
                want.append(batch)
                # An epoch that ends announces no further rows.
                assert len(want) < chosen.count() or has_all.wait(30)
            read = sorted(announced)
            # Every item of a row is announced once, and no other item.
            assert [read[0][0], read[-1][1]] == [PLAIN.offsets[0], PLAIN.offsets[-1]]
            assert sum(stop - start for start, stop in read) == store.lengths.sum()
            feeder.set_epoch(0)
            for i, _ in enumerate(feeder):
                if i == len(want) - 3:
                    break
            state = feeder.state_dict()
            announced.clear()
            feeder.load_state_dict(state)
            for got, wanted in zip(feeder, want[-2:], strict=True):
                assert torch.equal(got[0], wanted[0])
            assert sum(stop - start for start, stop in announced) < store.lengths.sum()


def test_ragged_rows_are_not_read_by_the_device_itself() -> None:
    store = RaggedStore(PLAIN.values, PLAIN.offsets)
    with pytest.raises(DeviceError, match="the CPU gathers ragged rows"):
        Feeder(store, batch_size=2, device=SimDevice(lazy), route="direct")


# -- structure -------------------------------------------------------------------------------------
def test_unequal_numbers_of_rows_are_refused() -> None:
    store = RaggedStore(PLAIN.values, PLAIN.offsets)
    with pytest.raises(StoreError, match=re.escape("source[0] has 60, source[1] has 61")):
        Feeder((store, np.zeros(61)), batch_size=2, device="cpu")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_by_index(layout: Any) -> None:
    store = RaggedStore(PLAIN.values, PLAIN.offsets, layout=layout)
    dataset = RowDataset({"tokens": store, "label": LABELS})
    assert len(dataset) == 60
    for i in (0, 59):
        np.testing.assert_array_equal(dataset[i]["tokens"], PLAIN.rows[i])
        assert dataset[i]["label"] == LABELS[i]
    require_equal(dataset[[5, 2, 2]]["tokens"], [5, 2, 2], layout)
    require_equal(dataset[10:20]["tokens"], range(10, 20), layout)
    assert dataset.__getitems__([]) == []


def test_rows_by_index_in_worker_processes(tmp_path: Path) -> None:
    with RaggedStore(saved(tmp_path / "x.npy", PLAIN.values), PLAIN.offsets) as store:
        loader = DataLoader(RowDataset(store), batch_size=20, num_workers=1, collate_fn=list)
        found = list(itertools.chain(*loader))
    for got, want in zip(found, PLAIN.rows, strict=True):
        np.testing.assert_array_equal(got, want)

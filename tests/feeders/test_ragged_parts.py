"""Parts of ragged rows that share offsets: each equals a RaggedStore of this part alone."""

import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ragged import Ragged
from support.stores import saved

from pinfeed import (
    ArgumentError,
    ArrayStore,
    ClosedError,
    Config,
    Feeder,
    HDF5Store,
    MiB,
    NpyStore,
    RaggedStore,
    RowDataset,
    StoreError,
    VerificationError,
    WriteBackError,
    concat,
    rows,
)
from pinfeed.testing import SimDevice, favour

N = 60
LAYOUTS: list[Any] = ["offsets", "padded", "jagged", "packed"]
IDS = Ragged(N, 9, gap=2)
FEATURES = np.random.default_rng(1).normal(size=(len(IDS.values), 3)).astype(np.float32)
LABELS = -np.arange(len(IDS.values), dtype=np.int64)
PARTS = {"ids": IDS.values, "more": [FEATURES, LABELS]}
ORDERS = [rows.sequential(), rows.shuffled(3), rows.block_shuffled(1, block_rows=4)]


@dataclasses.dataclass
class Inputs:
    ids: Any
    mask: Any


def single(layout: Any, **options: Any) -> list[RaggedStore]:
    return [
        RaggedStore(part, IDS.offsets, layout=layout, **options)
        for part in (IDS.values, FEATURES, LABELS)
    ]


def require_equal(got: Any, wanted: list[Any], layout: str) -> None:
    """Compare a batch of parts with the batches of one store for each part."""
    if layout == "jagged":
        for one, other in zip((got["ids"], *got["more"]), wanted, strict=True):
            assert torch.equal(one.offsets(), other.offsets())
            assert torch.equal(one.values(), other.values())
        # Operations on two nested tensors require the same offsets.
        assert (got["ids"].long() + got["more"][1]).is_nested
        return
    values, *bounds = got
    for one, (expected, *expected_bounds) in zip(
        (values["ids"], *values["more"]), wanted, strict=True
    ):
        assert one.dtype == expected.dtype
        assert torch.equal(one, expected)
        for bound, expected_bound in zip(bounds, expected_bounds, strict=True):
            assert torch.equal(bound, expected_bound)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("depth", [0, 2])
def test_parts_equal_one_store_for_each(layout: Any, order: Any, depth: int) -> None:
    store = RaggedStore(PARTS, IDS.offsets, layout=layout, padding=1)
    ways: list[dict[str, Any]] = [
        {"batch_size": 7, "rows": order},
        {"rows": rows.element_batches(IDS_LENGTHS, 20, order=order, padded=layout == "padded")},
    ]
    if layout == "packed":
        ways = [{"rows": rows.packed(IDS_LENGTHS, 16, batch_size=2, order=order, split="always")}]
    for chosen in ways:
        options = {"device": "cpu", "depth": depth, **chosen}
        with (
            Feeder((store, np.arange(N)), **options) as feeder,
            Feeder((single(layout, padding=1), np.arange(N)), **options) as plain,
        ):
            for _ in range(2):
                n = 0
                for (got, numbers), (wanted, expected) in zip(feeder, plain, strict=True):
                    require_equal(got, wanted, layout)
                    if layout != "packed":
                        assert torch.equal(numbers, expected)
                    n += 1
                assert n > 3


IDS_LENGTHS = np.diff(IDS.offsets)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    item_shape=st.sampled_from([(), (3,), (2, 2)]),
    dtype=st.sampled_from([np.uint8, np.bool_, np.float64, ml_dtypes.bfloat16]),
    layout=st.sampled_from(LAYOUTS[:2]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_batches_of_any_rows(
    lengths: list[int], item_shape: Any, dtype: Any, layout: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    one = rng.integers(0, 2, (offsets[-1] + 1, *item_shape)).astype(dtype)
    other = rng.integers(0, 99, offsets[-1] + 1)
    store = RaggedStore((one, other), offsets, layout=layout)
    wanted = rng.integers(0, len(lengths), 12)
    found, bounds = store.read(wanted)
    for part, got in zip((one, other), found, strict=True):
        expected, expected_bounds = RaggedStore(part, offsets, layout=layout).read(wanted)
        assert got.dtype == part.dtype
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(bounds, expected_bounds)


def test_structures_of_parts() -> None:
    store = RaggedStore(Inputs(IDS.values, LABELS), IDS.offsets, layout="padded")
    assert isinstance(store.dtype, Inputs)
    assert store.dtype.mask == np.int64
    with Feeder(store, batch_size=9, device="cpu") as feeder:
        values, _ = next(iter(feeder))
        assert isinstance(values, Inputs)
        assert values.ids.shape == values.mask.shape
        assert "source.ids ('ragged',) uint16, source.mask ('ragged',) int64" in repr(feeder)


def test_each_part_has_its_padding() -> None:
    padding = {"ids": 7, "more": [0.5, -100]}
    store = RaggedStore(PARTS, IDS.offsets, layout="padded", padding=padding)
    found, lengths = store.read(np.arange(N))
    for part, expected in zip((found["ids"], *found["more"]), (7, 0.5, -100), strict=True):
        is_padding = np.arange(part.shape[1]) >= lengths[:, None]
        assert is_padding.any()
        assert (part[is_padding] == expected).all()


BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "lengths": (
        {"a": np.arange(9), "b": np.arange(8)},
        {},
        StoreError,
        "values['a'] has 9, values['b'] has 8; expected equal numbers",
    ),
    "no parts": ({}, {}, StoreError, "values has no parts"),
    "a store": (
        {"a": RaggedStore(np.arange(9), [0, 9])},
        {},
        StoreError,
        "values['a'] is a RaggedStore; expected the items",
    ),
    "too short": ({"a": np.arange(3)}, {}, StoreError, "but values has 3 items"),
    "padding of other parts": (
        {"a": np.arange(9)},
        {"padding": {"b": 1}},
        ArgumentError,
        "in the structure of values, for ['a']",
    ),
    "padding of a part": (
        {"a": np.arange(9), "b": np.zeros(9, np.uint8)},
        {"padding": -1},
        ArgumentError,
        "padding['b']=-1: expected a number that uint8 can represent",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_parts_are_refused(name: str) -> None:
    values, options, kind, message = BAD[name]
    with pytest.raises(kind, match=re.escape(message)):
        RaggedStore(values, [0, 4, 9], **options)


def test_files_are_closed_by_their_owner(tmp_path: Path) -> None:
    paths = [saved(tmp_path / f"{i}.npy", part) for i, part in enumerate((IDS.values, LABELS))]
    with NpyStore(paths[1]) as given:
        with RaggedStore({"ids": paths[0], "labels": given}, IDS.offsets) as store:
            expected = store.read(np.arange(9))[0]
        with pytest.raises(ClosedError):
            store.items["ids"].gather(np.arange(3), np.empty(3, np.uint16))
        out = np.empty(len(expected["labels"]), np.int64)
        given.gather(np.arange(2, 2 + len(out)), out)
        np.testing.assert_array_equal(out, expected["labels"])
    with pytest.raises(StoreError, match="no such file"):
        RaggedStore({"ids": paths[0], "labels": tmp_path / "x.npy"}, IDS.offsets)


def test_several_sources_as_one() -> None:
    first = RaggedStore({"a": np.arange(5), "b": np.arange(5) * 2}, [0, 2, 5], layout="padded")
    second = RaggedStore({"a": np.arange(4), "b": np.arange(4) * 3}, [0, 4], layout="padded")
    joined = concat([first, second])
    values, lengths = joined.read(np.array([2, 0]))
    assert values["a"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert values["b"].tolist() == [[0, 3, 6, 9], [0, 2, 0, 0]]
    assert lengths.tolist() == [4, 2]
    with pytest.raises(StoreError, match="expected the same"):
        concat([first, RaggedStore(np.arange(4), [0, 4], layout="padded")])


# -- Arrow -----------------------------------------------------------------------------------------
TABLE = pa.table({"ids": [[1, 2], [], [3]], "mask": [[1, 1], [], [0]]})


@pytest.mark.parametrize("kind", ["table", "dict", "chunks"])
def test_columns_that_share_their_lengths(kind: str) -> None:
    column: Any = {
        "table": TABLE,
        "dict": {name: TABLE[name].combine_chunks() for name in TABLE.column_names},
        "chunks": pa.concat_tables([TABLE[:1], TABLE[1:]]),
    }[kind]
    store = RaggedStore.from_arrow(column, layout="padded", padding={"ids": 9, "mask": 0})
    values, lengths = store.read(np.array([2, 0, 1]))
    assert values["ids"].tolist() == [[3, 9], [1, 2], [9, 9]]
    assert values["mask"].tolist() == [[0, 0], [1, 1], [0, 0]]
    assert lengths.tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": [[1], [2]], "b": [[1, 2], []]}, "b and a have other lists from row 0 on"),
        ({}, "got no columns"),
    ],
)
def test_columns_of_other_lengths_are_refused(columns: Any, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        RaggedStore.from_arrow({name: pa.array(lists) for name, lists in columns.items()})
    with pytest.raises(
        StoreError, match="b and a have other lists from row 1 on; expected equally many"
    ):
        RaggedStore.from_arrow({"a": pa.array([[1], [2]]), "b": pa.array([[1]])})


# -- use in loops ----------------------------------------------------------------------------------
def test_ranks_and_resuming() -> None:
    store = RaggedStore(PARTS, IDS.offsets, layout="padded")
    order = rows.per_rank(rows.shuffled(2), rank=1, world_size=3)
    options: Any = {"batch_size": 4, "rows": order, "device": "cpu"}
    with Feeder(store, **options) as feeder:
        every = list(feeder)
        feeder.set_epoch(0)
        for number, _ in enumerate(feeder):
            if number == 1:
                break
        state = feeder.state_dict()
    with Feeder(store, **options) as resumed:
        resumed.load_state_dict(state)
        for got, wanted in zip(resumed, every[2:], strict=True):
            require_equal(got, [(wanted[0]["ids"], wanted[1]), *zip_parts(wanted)], "padded")


def zip_parts(batch: Any) -> list[Any]:
    values, lengths = batch
    return [(part, lengths) for part in values["more"]]


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_memory_is_at_most_that_of_the_plan(layout: Any) -> None:
    store = RaggedStore(PARTS, IDS.offsets, layout=layout)
    config = Config(cpu_memory_limit=MiB(16), gpu_memory_limit=20_000, depth=2)
    device = SimDevice(favour("compute", "read", "pinfeed-read"))
    with Feeder(store, config=config, shuffle=True, device=device) as feeder:
        for batch in feeder:
            del batch
        assert 0 < device.peak_bytes <= feeder.plan.device_bytes <= 20_000


def test_rows_by_index() -> None:
    dataset = RowDataset(RaggedStore(PARTS, IDS.offsets, layout="padded"))
    for i in (0, 3, N - 1):
        run = slice(*IDS.offsets[i : i + 2])
        np.testing.assert_array_equal(dataset[i]["ids"], IDS.values[run])
        np.testing.assert_array_equal(dataset[i]["more"][0], FEATURES[run])
    values, _ = dataset[[5, 2]]
    assert values["ids"].shape == values["more"][1].shape


class Changing(ArrayStore):
    """Items, of which every second gather returns others."""

    n_gathers = 0

    def gather(self, rows: Any, out: Any) -> None:
        super().gather(rows, out)
        self.n_gathers += 1
        out += self.n_gathers % 2


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_verification_finds_a_changed_part(layout: Any) -> None:
    parts = {"ids": IDS.values, "labels": Changing(LABELS)}
    store = RaggedStore(parts, IDS.offsets, layout=layout)
    n = np.count_nonzero(IDS_LENGTHS[:10])
    with (
        Feeder(store, batch_size=10, device="cpu", verify=True, depth=0) as feeder,
        pytest.raises(VerificationError, match=f"batch 0: {n} of 10 rows of source differ"),
    ):
        list(feeder)


def test_write_backs_take_none_for_all_parts() -> None:
    x = np.zeros(N, np.float32)
    store = RaggedStore(PARTS, IDS.offsets)
    with Feeder({"x": x, "tokens": store}, batch_size=30, device="cpu") as feeder:
        for batch in feeder.batches():
            with pytest.raises(WriteBackError, match="has ragged, read-only rows"):
                batch.write_back(batch.data)
            batch.write_back({"x": batch.data["x"] + 1, "tokens": None})
    assert (x == 1).all()


# -- files -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("limit", [None, MiB(5), MiB(64)])
def test_parts_in_compressed_chunks(order: Any, limit: Any, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    plain = Ragged(2000, 300, gap=5)
    more = plain.values.astype(np.float64) / 3
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("ids", data=plain.values, chunks=(999,), compression="gzip")
        file.create_dataset("more", data=more, chunks=(500,), compression="gzip")
    config = limit and Config(cpu_memory_limit=limit, preferred_batch_size=50, depth=1)
    with (
        HDF5Store(tmp_path / "x.h5", "ids") as ids,
        HDF5Store(tmp_path / "x.h5", "more") as others,
        RaggedStore({"ids": ids, "more": others}, plain.offsets) as store,
        Feeder(
            store, config=config, batch_size=None if limit else 50, rows=order, device="cpu"
        ) as feeder,
    ):
        if limit == MiB(5) and order is ORDERS[2]:
            assert "each buffer decodes a chunk once" in "".join(feeder.plan.notes)
        for epoch in range(2):
            wanted = np.asarray(order.bind(2000, epoch)(np.arange(2000)))
            size = feeder.batch_size
            assert size is not None
            for i, (values, bounds) in enumerate(feeder):
                expected = plain.batch(wanted[i * size : (i + 1) * size].tolist(), "offsets")
                np.testing.assert_array_equal(values["ids"], expected[0])
                np.testing.assert_array_equal(values["more"], expected[0] / 3)
                np.testing.assert_array_equal(bounds, expected[1])
            assert i == -(-2000 // size) - 1


def test_copies_in_other_processes() -> None:
    store = RaggedStore(PARTS, IDS.offsets, layout="padded")
    copied = pickle.loads(pickle.dumps(store))
    values, _ = copied.read(np.arange(9))
    np.testing.assert_array_equal(values["ids"], store.read(np.arange(9))[0]["ids"])
    assert isinstance(values["more"], list)

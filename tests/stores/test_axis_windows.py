"""Windows along any axis of HDF5, Zarr and .npy arrays: those of numpy, whatever the chunks are."""

import contextlib
import functools
import itertools
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.unwrapped import unwrapped

from pinfeed import (
    Feeder,
    HDF5Store,
    NpyStore,
    Ranks,
    ZarrStore,
    concat,
    errors,
    rows,
)
from pinfeed.readahead.resident_file import InMemoryCopy, MappedFile
from pinfeed.readahead.source_reads import most_view_items, windows_of_views
from pinfeed.rows.orders import known
from pinfeed.stores.window_store import WindowStore
from pinfeed.tensors.dtypes import DTYPES
from pinfeed.testing.suites import ReadOnlyStoreTests

h5py = pytest.importorskip("h5py")
zarr = pytest.importorskip("zarr")
# The event loop of zarr, which lives as long as the process, is not left behind by a test.
zarr.zeros((1,), store={})

OPTIONS = ("length", "step", "stride", "start", "span")


def plain(array: np.ndarray, axis: Any, **given: Any) -> np.ndarray:
    """Return all windows, written from the definition."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    values = {
        name: value if isinstance(value, tuple) else (value,) * len(axes)
        for name, value in {"step": 1, "stride": 1, "start": 0, "span": None, **given}.items()
    }
    first = min(axes)
    loops = [range(n) for n in array.shape[:first]]
    along: list[list[slice]] = []
    for i in range(first, max(axes) + 1):
        if i not in axes:
            along.append([slice(None)])
            continue
        length, step, stride, start, span = (values[name][axes.index(i)] for name in OPTIONS)
        extent = start + (length - 1) * stride + 1
        n = max(0, (array.shape[i] - (span or extent)) // step + 1)
        begins = [k * step + start for k in range(n)]
        along.append([slice(b, b + (length - 1) * stride + 1, stride) for b in begins])
    return np.array([array[index] for index in itertools.product(*loops, *along)], array.dtype)


def saved_h5(folder: Path, array: np.ndarray, chunks: Any, name: str = "x") -> HDF5Store:
    with h5py.File(folder / f"{name}.h5", "w") as file:
        options: Any = {}
        if chunks is not None:
            fitting = tuple(map(min, chunks, array.shape))
            options = {"chunks": fitting, "compression": "gzip"}
        file.create_dataset("x", data=array, **options)
    return HDF5Store(folder / f"{name}.h5")


def saved_zarr(folder: Path, array: np.ndarray, chunks: Any, name: str = "x") -> ZarrStore:
    made = zarr.create_array(
        folder / f"{name}.zarr",
        shape=array.shape,
        chunks=chunks or array.shape,
        dtype=array.dtype,
        overwrite=True,
    )
    made[...] = array
    return ZarrStore(folder / f"{name}.zarr")


def gathered(store: WindowStore, wanted: Any) -> np.ndarray:
    wanted = np.asarray(wanted, np.int64)
    out = np.empty((len(wanted), *store.row_shape), store.dtype)
    store.gather(wanted, out)
    return out


class TestOneWindowPerRow(ReadOnlyStoreTests):
    """Rows are single windows of length 1 along the second axis of another array."""

    @pytest.fixture(params=["bool", "complex64", "uint8", "float64"])
    def dtype(self, request: pytest.FixtureRequest) -> Any:
        return DTYPES[request.param]

    def make(self, array: np.ndarray, tmp_path: Path) -> WindowStore:
        more = array[:, None]
        with h5py.File(tmp_path / "x.h5", "w") as file:
            chunks = (1, 1, *more.shape[2:])
            file.create_dataset("x", data=more, chunks=chunks, compression="gzip")
        return _Squeezed(HDF5Store(tmp_path / "x.h5"))


class _Squeezed(WindowStore):
    """Windows without their axis, as the suite expects the rows; it closes the file."""

    def __init__(self, store: HDF5Store) -> None:
        windows = store.windows(axis=1, length=1)
        row_shape = windows.row_shape[1:]
        super().__init__(windows.items, windows.shapes, windows.axes, row_shape=row_shape)
        self._array = store

    def close(self) -> None:
        super().close()
        self._array.close()


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_windows_are_those_of_numpy(tmp_path: Path, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=2, max_size=4)))
    chunks = tuple(data.draw(st.integers(1, n)) for n in shape)
    dtype = data.draw(st.sampled_from(["<f4", ">i2", "|u1", "|b1"]))
    array = (np.arange(np.prod(shape)) % 251).reshape(shape).astype(dtype)
    axes = tuple(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1, max_size=2)))
    given_: dict[str, Any] = {"length": tuple(data.draw(st.integers(1, 3)) for _ in axes)}
    for name, least, most in (("step", 1, 3), ("stride", 1, 2), ("start", 0, 1)):
        if data.draw(st.booleans()):
            given_[name] = tuple(data.draw(st.integers(least, most)) for _ in axes)
    axis: Any = axes
    if len(axes) == 1 and data.draw(st.booleans()):
        axis = axes[0]
        given_ = {name: value[0] for name, value in given_.items()}
    expected = plain(array, axis, **given_)
    kind = data.draw(st.sampled_from(["chunks", "contiguous", "zarr", "npy"]))
    if kind == "npy":
        np.save(tmp_path / "x.npy", array)
        parent: Any = None
        make: Any
        path = tmp_path / "x.npy"
        make = functools.partial(NpyStore.windows, path, axis=axis, **given_)
    else:
        saved = saved_zarr if kind == "zarr" else saved_h5
        parent = saved(tmp_path, array, None if kind == "contiguous" else chunks, f"x{next(NAMES)}")
        make = functools.partial(parent.windows, axis, **given_)
    with parent or contextlib.nullcontext():
        if not len(expected):
            with pytest.raises(errors.StoreError):
                make()
            return
        with make() as store:
            assert (store.n_rows, *store.row_shape) == expected.shape
            np.testing.assert_array_equal(gathered(store, np.arange(len(expected))), expected)
            wanted = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=9))
            np.testing.assert_array_equal(gathered(store, wanted), expected[wanted])


NAMES = itertools.count()
ARRAY = np.arange(6 * 40 * 8 * 8, dtype=np.float32).reshape(6, 40, 8, 8)
ORDERS = [
    rows.sequential(),
    rows.shuffled(1),
    rows.block_shuffled(1, block_rows=12, window_blocks=3),
    rows.per_rank(rows.block_shuffled(1, block_rows=12), rank=1, world_size=2),
]


@pytest.fixture(params=["fits", "is larger than memory"])
def is_large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether files are read as if no memory held them."""
    large = request.param != "fits"
    if large:
        monkeypatch.setattr(InMemoryCopy, "plan", lambda reads: None)
        monkeypatch.setattr(MappedFile, "plan", lambda reads: None)
    return large


@pytest.fixture(params=["chunks", "slabs", "contiguous", "zarr", "npy"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that makes windows of the array."""
    kind = request.param
    if kind == "npy":
        np.save(tmp_path / "x.npy", ARRAY)
        yield lambda **given: NpyStore.windows(tmp_path / "x.npy", axis=1, **given)
        return
    chunks = {"chunks": (1, 5, 8, 4), "slabs": (2, 5, 8, 8), "zarr": (1, 5, 4, 8)}.get(kind)
    with (saved_zarr if kind == "zarr" else saved_h5)(tmp_path, ARRAY, chunks) as store:
        yield lambda **given: store.windows(axis=1, **given)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_a_feeder_gives_the_windows(is_large: bool, opened: Any, order: Any) -> None:
    expected = plain(ARRAY, 1, length=4, step=2, stride=2)
    later = plain(ARRAY, 1, length=1, start=6, step=2, span=7)
    with (
        opened(length=4, step=2, stride=2) as past,
        opened(length=1, start=6, step=2, span=7) as future,
        Feeder(
            {"past": past, "future": future},
            batch_size=7,
            rows=order,
            device="cpu",
        ) as feeder,
    ):
        for epoch in range(2):
            numbers = order.bind(len(expected), epoch)(np.arange(order.length(len(expected))))
            batches = list(feeder)
            x = torch.cat([batch["past"] for batch in batches]).numpy()
            y = torch.cat([batch["future"] for batch in batches]).numpy()
            np.testing.assert_array_equal(x, expected[numbers])
            np.testing.assert_array_equal(y, later[numbers])


def test_each_chunk_is_decoded_once(
    is_large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if inputs and targets are windows of the same array."""
    decoded: Counter[Any] = Counter()
    read = HDF5Store.read_box

    def counted(self: HDF5Store, box: Any, out: Any) -> None:
        decoded.update(itertools.product(range(box[0].start, box[0].stop), [box[1].start]))
        read(self, box, out)

    monkeypatch.setattr(HDF5Store, "read_box", counted)
    # A block is a sixth of the windows, those of one trajectory.
    order = rows.block_shuffled(1, block_rows=36, window_blocks=1)
    # Two threads that read the same trajectory at once may both decode its chunk.
    depth = 0 if is_large else None
    with (
        saved_h5(tmp_path, ARRAY, (1, 40, 8, 8)) as store,
        Feeder(
            (store.windows(1, length=4, span=5), store.windows(1, length=1, start=4, span=5)),
            batch_size=6,
            rows=order if is_large else rows.shuffled(1),
            depth=depth,
            device="cpu",
        ) as feeder,
    ):
        how = "read ahead into buffers" if is_large else "decoded into RAM during the first epoch"
        assert how in unwrapped(feeder.plan)
        for _ in feeder:
            pass
        (item,) = [
            one for one in feeder.plan.items if one.what in ("read-ahead buffers", "rows of a file")
        ]
    assert set(decoded) == {(i, 0) for i in range(6)}
    if not is_large:
        assert max(decoded.values()) == 1
        return
    # Windows that are as long as both together have the same reads, and need the same memory.
    n_decoded = decoded.total()
    with (
        HDF5Store(tmp_path / "x.h5") as store,
        Feeder(
            store.windows(1, length=5), batch_size=6, rows=order, depth=depth, device="cpu"
        ) as feeder,
    ):
        assert item in feeder.plan.items
        for _ in feeder:
            pass
    assert decoded.total() == 2 * n_decoded


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_shuffle_windows_have_the_items_of_all_stores(tmp_path: Path, data: st.DataObject) -> None:
    def draw(low: int, high: int) -> int:
        return data.draw(st.integers(low, high))

    step, span = draw(1, 3), draw(4, 9)
    shape = (draw(1, 3), draw(9, 30), 2)
    with saved_h5(tmp_path, np.zeros(shape), (1, 4, 2)) as store:
        views = []
        for _ in range(draw(1, 3)):
            length, stride = draw(1, 2), draw(1, 2)
            start = draw(0, span - (length - 1) * stride - 1)
            given = {"length": length, "stride": stride, "start": start}
            views.append(store.windows(1, step=step, span=span, **given))
        n_rows = views[0].n_rows
        order = rows.block_shuffled(1, block_rows=draw(1, 9), window_blocks=draw(1, 3))
        of_rows = known(order).windows(n_rows, 0)
        assert of_rows is not None
        of_items = windows_of_views(of_rows, tuple(views))
        most = most_view_items(of_rows, tuple(views))
        pairs = zip(of_rows.needed(0, n_rows), of_items.needed(0, n_rows), strict=True)
        for window, found in pairs:
            numbers = np.concatenate([np.arange(*run) for run in window.runs])
            wanted = set().union(*(view.item_runs(numbers).rows().tolist() for view in views))
            items = [item for run in found.runs for item in range(*run)]
            assert wanted <= set(items)
            assert len(items) == len(set(items)) <= most


def test_shuffle_windows_of_distant_inputs_and_targets(tmp_path: Path) -> None:
    """The items between them take no memory."""
    with saved_h5(tmp_path, np.zeros((5000, 2)), (50, 2)) as store:
        views = (
            store.windows(0, length=8, span=2001),
            store.windows(0, length=1, start=2000, span=2001),
        )
        order = rows.block_shuffled(1, block_rows=50, window_blocks=4)
        of_rows = known(order).windows(views[0].n_rows, 0)
        assert of_rows is not None
        alone = [most_view_items(of_rows, (view,)) for view in views]
        assert most_view_items(of_rows, views) == sum(alone) < 1000


@pytest.mark.parametrize("saved", [saved_h5, saved_zarr], ids=["h5", "zarr"])
@pytest.mark.parametrize("chunks", [None, (1, 7, 8, 8)])
def test_files_of_unequal_length(tmp_path: Path, saved: Any, chunks: Any) -> None:
    arrays = [ARRAY, ARRAY[:1, :3] + 1, ARRAY[:2, :9] + 2]
    expected = np.concatenate(
        [plain(array, 1, length=5)[:] for array in arrays if array.shape[1] > 4]
    )
    numbers = np.random.default_rng(0).permutation(len(expected))
    stores = [saved(tmp_path, one, chunks, f"x{i}") for i, one in enumerate(arrays)]
    windows = [one.windows(1, length=5) for i, one in enumerate(stores) if arrays[i].shape[1] > 4]
    with concat(windows) as store:
        assert isinstance(store, WindowStore)
        np.testing.assert_array_equal(gathered(store, numbers), expected[numbers])
        options: Any = {"batch_size": 16, "rows": rows.shuffled(2), "device": "cpu"}
        with Feeder(store, **options) as feeder, Feeder(expected, **options) as other:
            assert "RAM" in unwrapped(feeder.plan) or "memory map" in unwrapped(feeder.plan)
            for batch, wanted in zip(feeder, other, strict=True):
                assert torch.equal(batch, wanted)
    for one in stores:
        one.close()


def test_npy_files_with_unequal_axes(tmp_path: Path) -> None:
    arrays = [ARRAY, ARRAY[:1, :3] + 1, ARRAY[:2, :9] + 2]
    paths = [tmp_path / f"{i}.npy" for i in range(3)]
    for path, array in zip(paths, arrays, strict=True):
        np.save(path, array)
    expected = np.concatenate([plain(array, 1, length=5) for array in (arrays[0], arrays[2])])
    with NpyStore.windows(paths, axis=1, length=5) as store:
        np.testing.assert_array_equal(gathered(store, range(store.n_rows)), expected)
    np.save(paths[1], ARRAY[:, :, :3])
    with pytest.raises(errors.StoreError, match=r"expected equal axes after axis 1; .*concat\(\["):
        NpyStore.windows(paths[:2], axis=(1, 2), length=2)
    windows = [NpyStore.windows(path, axis=(1, 2), length=2) for path in paths[:2]]
    assert concat(windows).n_rows == sum(one.n_rows for one in windows)
    for one in windows:
        one.close()
    np.save(paths[1], ARRAY[..., :3])
    with pytest.raises(errors.StoreError, match="shards do not match"):
        NpyStore.windows(paths[:2], axis=1, length=2)


def test_whole_files_are_joined_with_their_chunks(tmp_path: Path) -> None:
    arrays = [ARRAY[:4], ARRAY[4:5], ARRAY[5:]]
    parts = [saved_h5(tmp_path, one, (1, 7, 8, 8), f"x{i}") for i, one in enumerate(arrays)]
    options: Any = {"batch_size": 2, "rows": rows.shuffled(2), "device": "cpu"}
    with (
        concat(parts) as store,
        Feeder(store, **options) as feeder,
        Feeder(ARRAY, **options) as other,
    ):
        assert "decoded into RAM during the first epoch" in unwrapped(feeder.plan)
        for batch, wanted in zip(feeder, other, strict=True):
            assert torch.equal(batch, wanted)
    for part in parts:
        part.close()


def open_files(folder: Path) -> list[str]:
    """Return the names of the files of a folder that this process has open."""
    paths = [entry.resolve() for entry in Path("/proc/self/fd").iterdir()]
    return sorted(path.name for path in paths if path.parent == folder)


@pytest.mark.parametrize("axis", [0, 1])
def test_an_unpickled_concat_closes_what_it_opened(tmp_path: Path, axis: int) -> None:
    arrays = [ARRAY, ARRAY[:, :9] + 2] if axis else [ARRAY, ARRAY[:3] + 2]
    stores = [saved_h5(tmp_path, one, (1, 7, 8, 8), f"x{i}") for i, one in enumerate(arrays)]
    joined = concat([one.windows(axis, length=2) for one in stores])
    expected = np.concatenate([plain(array, axis, length=2) for array in arrays])
    with pickle.loads(pickle.dumps(joined)) as copy:
        np.testing.assert_array_equal(gathered(copy, range(copy.n_rows)), expected)
        for one in stores:
            one.close()
        assert open_files(tmp_path) == ["x0.h5", "x1.h5"]
    assert not open_files(tmp_path)


def test_a_concat_closes_no_store_of_the_caller(tmp_path: Path) -> None:
    with saved_h5(tmp_path, ARRAY, (1, 7, 8, 8)) as store:
        concat([store.windows(1, length=5)] * 2).close()
        assert gathered(store.windows(1, length=5), [0]).shape == (1, 5, 8, 8)


def test_ranks_resume_and_pickle(tmp_path: Path) -> None:
    expected = plain(ARRAY, 1, length=3)
    seen: list[int] = []
    with saved_h5(tmp_path, ARRAY, (1, 7, 8, 8)) as parent:
        copy = pickle.loads(pickle.dumps(parent.windows(1, length=3)))
        np.testing.assert_array_equal(gathered(copy, [5, 0]), expected[[5, 0]])
        copy.items.close()
        state: Any = None
        for world_size, n in ((1, 3), (3, 2), (2, None)):
            for rank in range(world_size):
                ranks = Ranks("join", rank=rank, world_size=world_size)
                source = (parent.windows(1, length=3), np.arange(len(expected)))
                with Feeder(
                    source, batch_size=5, shuffle=True, ranks=ranks, device="cpu"
                ) as feeder:
                    if state is not None:
                        feeder.load_state_dict(state)
                    for batch, numbers in itertools.islice(feeder, n):
                        np.testing.assert_array_equal(batch.numpy(), expected[numbers.numpy()])
                        seen += numbers.tolist()
                    last = feeder.state_dict()
            state = last
    assert sorted(seen) == list(range(len(expected)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axis": 4, "length": 1}, "axis=4: .* has 4 axes; expected 0 to 3"),
        ({"axis": -1, "length": 1}, "axis=-1"),
        ({"axis": 1, "length": 0}, "length=0"),
        ({"axis": 1, "length": 4, "span": 3}, "span=3.*because start, length and stride need 4"),
        ({"axis": 1, "length": 41}, "no window fits in shape .*expected at least 41 along axis 1"),
        ({"axis": (1, 1), "length": 2}, "expected distinct axes"),
        ({"axis": (1, 2), "length": (2,)}, "expected one value for each axis"),
    ],
)
def test_bad_windows_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with (
        saved_h5(tmp_path, ARRAY, (1, 7, 8, 8)) as store,
        pytest.raises(errors.PinfeedError, match=message),
    ):
        store.windows(**arguments)
    np.save(tmp_path / "x.npy", ARRAY)
    if "dt_stride" not in arguments:
        with pytest.raises(errors.PinfeedError, match=message):
            NpyStore.windows(tmp_path / "x.npy", **arguments)


def test_windows_of_a_closed_store(tmp_path: Path) -> None:
    store = saved_h5(tmp_path, ARRAY, (1, 7, 8, 8))
    windows = store.windows(1, length=3)
    closed = store.windows(1, length=3)
    closed.close()
    gathered(windows, [0])
    with pytest.raises(errors.ClosedError):
        gathered(closed, [0])
    store.close()
    with pytest.raises(errors.ClosedError):
        gathered(windows, [0])


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(20_000,), (40, 500)])
def test_a_random_selection_plans_little_more_than_it_needs(
    tmp_path: Path, shape: tuple[int, ...], share: float
) -> None:
    axis = len(shape) - 1
    with saved_h5(tmp_path, np.zeros(shape), (1,) * axis + (100,)) as store:
        windows = store.windows(axis, length=60)
        is_selected = np.random.default_rng(0).random(windows.n_rows) < share
        blocks = rows.block_shuffled(3, block_rows=500, window_blocks=4)
        chosen = rows.where(np.flatnonzero(is_selected), blocks).windows(windows.n_rows, 0)
        assert chosen is not None
        made = windows_of_views(chosen, (windows,))
        needed = [
            sum(stop - start for start, stop in window.runs)
            for window in made.needed(0, int(is_selected.sum()))
        ]
        planned = most_view_items(chosen, (windows,))
    assert max(needed) <= planned <= 2 * max(needed)


def test_a_selection_with_more_gaps_than_in_its_first_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.arange(20_000)
    monkeypatch.setattr(InMemoryCopy, "plan", lambda reads: None)
    with saved_h5(tmp_path, array, (100,)) as store, store.windows(0, length=60) as windows:
        # The first rows are consecutive, and the later ones far apart. With this seed, the first
        # window has one run.
        selected = np.append(np.arange(1500), np.arange(1500, windows.n_rows, 40))
        blocks = rows.block_shuffled(3, block_rows=50, window_blocks=4)
        order = rows.where(selected, blocks)
        with Feeder(windows, batch_size=32, rows=order, device="cpu") as feeder:
            assert "read ahead into buffers" in feeder.plan.notes[0]
            batches = torch.cat(list(feeder)).numpy()
    numbers = order.bind(len(array) - 59, 0)(np.arange(len(selected)))
    np.testing.assert_array_equal(batches, plain(array, 0, length=60)[numbers])

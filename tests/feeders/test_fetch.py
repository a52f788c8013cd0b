"""wrap_loader(fetch=): rows of stores for the ids that a loader yields."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from support.loaders import DEPTHS, DEVICES
from support.schedules import corners, randomly
from support.simtorch import SimTorchDevice
from support.unwrapped import unwrapped
from torchdata.stateful_dataloader import StatefulDataLoader

import pinfeed
from pinfeed import ArgumentError, ArrayStore, ClosedError, NpyStore, StoreError, wrap_loader
from pinfeed.errors import NotEnoughCPUMemory, RowIndexError, UnknownArgument
from pinfeed.testing import SimDevice

N_ROWS = 200
FEATURES = np.random.default_rng(0).normal(size=(N_ROWS, 3, 2)).astype(np.float16)
LABELS = np.arange(N_ROWS) * 3
CORNERS = corners({"read": (1,), "compute": (1,), "pinfeed-read": (1,)})


def ids_of_batches() -> list[torch.Tensor]:
    """Return ids of many shapes: with and without repeats, sorted, all equal, none."""
    rng = np.random.default_rng(1)
    found = [
        rng.permutation(N_ROWS)[:40],
        rng.integers(0, N_ROWS, 150),
        np.arange(30, 60),
        np.zeros(0, np.int64),
        rng.integers(0, 20, (7, 11)).astype(np.int32),
        np.full(9, 7, np.uint8),
        np.asarray(5),
    ]
    return [torch.from_numpy(ids) for ids in found]


def batches() -> list[dict[str, Any]]:
    return [{"n_id": ids, "number": i} for i, ids in enumerate(ids_of_batches())]


class Recording(ArrayStore):
    """Rows in memory, with the rows of each gather."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(array)
        self.gathered: list[list[int]] = []

    def gather(self, rows: Any, out: Any) -> None:
        self.gathered.append(rows.tolist())
        super().gather(rows, out)


def check(got: Any, ids: torch.Tensor) -> None:
    """Compare the rows of the sources with the batches that a loop received."""
    assert got["x"].shape == (*ids.shape, 3, 2)
    np.testing.assert_array_equal(got["x"].numpy(), FEATURES[ids.numpy()])
    np.testing.assert_array_equal(got["y"]["label"].numpy(), LABELS[ids.numpy()])
    np.testing.assert_array_equal(got["y"]["half"].numpy(), FEATURES[ids.numpy()])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", FEATURES)
    return tmp_path / "x.npy"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_the_rows_of_the_ids(path: Path, device: str, depth: int) -> None:
    labels = {"label": torch.from_numpy(LABELS), "half": FEATURES}
    fetch = {"x": (path, "n_id"), "y": (labels, lambda batch: batch["n_id"])}
    kept = []
    with wrap_loader(batches(), fetch=fetch, device=DEVICES[device](), depth=depth) as loop:
        for _ in range(2):
            for batch, got in loop:
                check(got, batch["n_id"])
                kept.append((batch, got))
                got["x"] = got["x"].clone()
    # Batches belong to the user and stay unchanged.
    for i, (batch, got) in enumerate(kept):
        assert batch["number"] == i % 7
        check(got, batch["n_id"])


@pytest.mark.parametrize("device", DEVICES)
def test_each_distinct_row_is_read_once(device: str) -> None:
    store = Recording(FEATURES)
    fetch = {"x": (store, "n_id")}
    with wrap_loader(batches(), fetch=fetch, device=DEVICES[device](), depth=2) as loop:
        list(loop)
    gathered = [rows for rows in store.gathered if rows]
    expected = [np.unique(ids.numpy()).tolist() for ids in ids_of_batches() if ids.numel()]
    assert [sorted(rows) for rows in gathered] == expected


@pytest.mark.parametrize("ids", [[3, 1, 3], (), np.array([2**7, 5], np.uint8), 4], ids=repr)
def test_ids_that_are_no_tensors(ids: Any) -> None:
    (found,) = wrap_loader([{"ids": ids}], fetch={"x": (FEATURES, "ids")}, device="cpu")
    np.testing.assert_array_equal(found[1]["x"].numpy(), FEATURES[np.asarray(ids, np.int64)])


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_function_may_fill_one_array_for_each_batch(depth: int) -> None:
    memory = np.zeros(5, np.int64)

    def ids_of(number: int) -> np.ndarray:
        memory[:] = np.arange(5) * number
        return memory

    with wrap_loader(range(30), fetch={"y": (LABELS, ids_of)}, device="cpu", depth=depth) as loop:
        for number, got in loop:
            np.testing.assert_array_equal(got["y"].numpy(), LABELS[np.arange(5) * number])


def test_many_repeated_rows() -> None:
    """Repeated rows are copied in several parts."""
    rows = np.random.default_rng(0).normal(size=(300, 50)).astype(np.float32)
    ids = np.random.default_rng(1).integers(0, 300, 20_000)
    ids[:100] = np.arange(100)
    (found,) = wrap_loader([ids], fetch={"x": (rows, lambda batch: batch)}, device="cpu")
    np.testing.assert_array_equal(found[1]["x"].numpy(), rows[ids])


LIMITS = {
    "mapped": {},
    "copied": {"memory_map": False},
    "one by one": {"keep_cache": False, "limit": 1},
    "page cache": {"keep_cache": True, "limit": 1},
}


@pytest.mark.parametrize("way", LIMITS)
@pytest.mark.parametrize("depth", [0, 2])
def test_every_way_in_which_files_are_read(tmp_path: Path, way: str, depth: int) -> None:
    rows = np.random.default_rng(0).normal(size=(3000, 40)).astype(np.float32)
    np.save(tmp_path / "x.npy", rows)
    options = dict(LIMITS[way])
    limit = pinfeed.KiB(options.pop("limit", 4096))
    rng = np.random.default_rng(1)
    every_ids = [rng.integers(0, 3000, 500) for _ in range(8)]
    config = pinfeed.Config(cpu_memory_limit=limit)
    with NpyStore(tmp_path / "x.npy", **options) as store:
        fetch = {"x": (store, lambda batch: batch)}
        with wrap_loader(every_ids, fetch=fetch, config=config, device="cpu", depth=depth) as loop:
            assert loop.plan.host_bytes + loop.plan.page_cache_bytes <= limit // 2
            assert loop.plan.cpu_memory_limit == limit
            assert "x.npy" in str(loop.plan)
            for _ in range(2):
                for batch, got in loop:
                    np.testing.assert_array_equal(got["x"].numpy(), rows[batch])


class Graph:
    """A batch that moves itself, as those of PyG do."""

    def __init__(self, n_id: torch.Tensor) -> None:
        self.n_id = n_id

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def to(self, device: Any) -> "Graph":
        return Graph(self.n_id.to(device))


def test_a_batch_that_moves_itself() -> None:
    graphs = [Graph(ids) for ids in ids_of_batches()]
    fetch = {
        "x": (FEATURES, "n_id"),
        ("a", "b"): (LABELS, lambda graph: graph.n_id.reshape(-1)[:0]),
    }
    with wrap_loader(graphs, fetch=fetch, device="cpu", depth=2) as loop:
        for (batch, got), graph in zip(loop, graphs, strict=True):
            assert isinstance(batch, Graph)
            np.testing.assert_array_equal(got["x"].numpy(), FEATURES[graph.n_id.numpy()])
            assert got["a", "b"].shape == (0,)


# PyG calls a deprecated function when it is imported.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("depth", [0, 2])
def test_batches_of_pyg(depth: int) -> None:
    from torch_geometric.data import Data, HeteroData

    graphs = []
    for ids in ids_of_batches():
        nodes = ids.reshape(-1)
        item = {"n_id": nodes, "size": len(nodes)}
        graphs.append((Data(n_id=nodes), HeteroData({"item": item, "user": {"n_id": nodes % 3}})))
    fetch = {
        "x": (FEATURES, lambda pair: pair[0].n_id),
        "item": (FEATURES, lambda pair: pair[1]["item"].n_id),
        "user": (LABELS, lambda pair: pair[1]["user"].n_id),
    }
    with wrap_loader(graphs, fetch=fetch, device="cpu", depth=depth) as loop:
        for ((data, hetero), got), ids in zip(loop, ids_of_batches(), strict=True):
            nodes = ids.reshape(-1)
            assert torch.equal(data.n_id, nodes)
            assert hetero["item"].size == len(nodes)
            assert torch.equal(got["x"], torch.from_numpy(FEATURES)[nodes.long()])
            assert torch.equal(got["item"], got["x"])
            assert torch.equal(got["user"], torch.from_numpy(LABELS)[nodes.long() % 3])
    # A HeteroData makes an empty storage for a key that it does not have.
    with pytest.raises(RowIndexError, match="are a NodeStorage; expected integers in a tensor"):
        list(wrap_loader([graphs[0][1]], fetch={"x": (FEATURES, "n_id")}, device="cpu"))
    with wrap_loader([graphs[0][0]], fetch={"x": (FEATURES, "n_id")}, device="cpu") as one:
        ((_, got),) = one
    assert torch.equal(got["x"], torch.from_numpy(FEATURES)[ids_of_batches()[0]])


@pytest.mark.parametrize(("depth", "depth_of_fetch"), [(0, 2), (2, 0), (2, 5)])
def test_fetch_in_a_loop_that_trains_tables(depth: int, depth_of_fetch: int) -> None:
    def losses(depth: int, depth_of_fetch: int) -> list[float]:
        torch.manual_seed(0)
        users = pinfeed.HostEmbedding(50, 6)
        optimizer = pinfeed.RowOptimizer(torch.optim.Adam, [users], lr=0.1)
        rng = np.random.default_rng(0)
        loader = [torch.from_numpy(rng.integers(0, 50, 20)) for _ in range(6)]
        fetch = {"x": (FEATURES.reshape(N_ROWS, 6).astype(np.float32), lambda ids: ids * 3)}
        found = []
        with wrap_loader(loader, fetch=fetch, device="cpu", depth=depth_of_fetch) as fetched:
            tables = {users: lambda pair: pair[0]}
            for ids, got in pinfeed.train_rows(fetched, tables, optimizer=optimizer, depth=depth):
                loss = ((users(ids) - got["x"]) ** 2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        return found

    assert losses(depth, depth_of_fetch) == losses(0, 0)


def test_functions_run_in_order_one_at_a_time() -> None:
    numbers: list[int] = []

    def ids_of(batch: Any) -> Any:
        numbers.append(batch["number"])
        return batch["n_id"]

    with wrap_loader(batches(), fetch={"x": (FEATURES, ids_of)}, device="cpu", depth=5) as loop:
        list(loop)
    assert numbers == list(range(7))


# StatefulDataLoader calls the deprecated function.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_with_a_state() -> None:
    def make() -> Any:
        loader = StatefulDataLoader(range(N_ROWS), batch_size=16)
        return wrap_loader(loader, fetch={"x": (FEATURES, lambda batch: batch)}, device="cpu")

    with make() as loop:
        every = [(got["x"], loop.state_dict()) for _, got in loop]
    with make() as loop:
        loop.load_state_dict(every[4][1])
        rest = [got["x"] for _, got in loop]
    assert len(rest) == len(every) - 5
    for mine, (expected, _) in zip(rest, every[5:], strict=True):
        assert torch.equal(mine, expected)


# ---- a simulated device --------------------------------------------------------------------------
def run_on(device: SimTorchDevice, depth: int, *, switches: bool) -> None:
    """Loop on a simulated device; the rows are used in the streams, as late as it decides."""
    fetch = {"x": (FEATURES, "n_id"), "y": (LABELS, lambda batch: batch["n_id"].reshape(-1)[::2])}
    sums = []
    with wrap_loader(batches(), fetch=fetch, device=device, depth=depth) as loop:
        for batch, got in loop:
            if switches:
                device.switch(("compute", "second")[len(sums) % 2])
            sums.append((batch["number"], got["x"] + 0, got["y"] * 2))
            del batch, got
        for (number, x, y), ids in zip(sums, ids_of_batches(), strict=True):
            assert number < 7
            np.testing.assert_array_equal(device.host(x).numpy(), FEATURES[ids.numpy()])
            halved = LABELS[ids.numpy().reshape(-1)[::2]]
            np.testing.assert_array_equal(device.host(y).numpy(), halved * 2)


@pytest.mark.parametrize("corner", CORNERS)
def test_corner_schedules(corner: str) -> None:
    for direct in (False, True):
        run_on(SimTorchDevice(CORNERS[corner](), direct=direct), 2, switches=False)


@pytest.mark.parametrize("seed", range(10))
def test_random_schedules(seed: int) -> None:
    device = SimTorchDevice(randomly(seed), direct=bool(seed % 2))
    run_on(device, (0, 1, 2, 5)[seed % 4], switches=False)


def test_fetching_adds_no_wait_that_is_not_in_a_plain_loop() -> None:
    """The waits of a plain loop are each shown to be needed in tests/pipeline/test_protocol.py."""
    sites = []
    for fetch in (None, {"x": (FEATURES, "n_id")}):
        device = SimDevice(randomly(3))
        flat = [{"n_id": ids.reshape(-1)} for ids in ids_of_batches()]
        with wrap_loader(flat, fetch=fetch, device=device, depth=2) as loop:
            for _ in loop:
                pass
        sites.append(device.sites)
    assert sites[1] <= sites[0]


def test_the_wait_for_the_rows_is_needed() -> None:
    """Without the wait in ``lend``, repeated rows are copied before they have arrived."""
    device = SimTorchDevice(randomly(0))
    run_on(device, 2, switches=False)
    failures = 0
    for site in sorted(device.sites):
        try:
            for seed in range(4):
                run_on(SimTorchDevice(randomly(seed), deaf_to=site), 2, switches=False)
        except AssertionError:
            failures += 1
    assert failures


# ---- errors --------------------------------------------------------------------------------------
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.tensor([3, N_ROWS]), r"fetch\['x'\]: ids: row 200 is out of range"),
        (torch.tensor([-1]), r"fetch\['x'\]: ids: row -1 is out of range"),
        (torch.tensor([0.5]), r"fetch\['x'\]: the ids of the batch are float32; expected integers"),
        (torch.tensor([True]), r"are bool; expected integers; for a mask, give ids\[mask\]"),
        (["a"], r"fetch\['x'\]: the ids of the batch are <U1; expected integers"),
        ({}, r"fetch\['x'\]: the ids of the batch are a dict; expected integers in a tensor"),
        (None, "are a NoneType; expected integers in a tensor, an array or a list"),
    ],
    ids=repr,
)
def test_ids_that_no_store_has(depth: int, bad: Any, message: str) -> None:
    every_ids = [torch.arange(3), torch.arange(2), bad, torch.arange(4)]
    loader = [{"ids": ids} for ids in every_ids]
    lengths = []
    fetch = {"x": (FEATURES, "ids")}
    with (
        wrap_loader(loader, fetch=fetch, device="cpu", depth=depth) as loop,
        pytest.raises(RowIndexError, match=message),
    ):
        lengths += [len(got["x"]) for _, got in loop]
    # The good batches came first, and the loop can begin again.
    assert not lengths
    good = []
    with wrap_loader(loader, fetch=fetch, device="cpu", depth=depth) as loop:
        iterator = iter(loop)
        good += [len(next(iterator)[1]["x"]), len(next(iterator)[1]["x"])]
        with pytest.raises(RowIndexError):
            next(iterator)
    assert good == [3, 2]


def test_a_batch_without_the_key() -> None:
    message = r"fetch\['x'\]: no ids at 'node', because the batch has keys 'n_id', 'number'"
    with pytest.raises(ArgumentError, match=message):
        list(wrap_loader(batches(), fetch={"x": (FEATURES, "node")}, device="cpu"))


def test_an_error_of_the_users_function() -> None:
    def ids_of(batch: Any) -> Any:
        raise OSError(f"no ids for batch {batch['number']}")

    with pytest.raises(OSError, match="no ids for batch 0"):
        list(wrap_loader(batches(), fetch={"x": (FEATURES, ids_of)}, device="cpu", depth=2))


@pytest.mark.parametrize("fetch", [{}, 3, "x", {"x": "x.npy"}, {"x": (1, 2, 3)}], ids=repr)
def test_fetch_that_is_no_mapping_to_pairs(fetch: Any) -> None:
    with pytest.raises(ArgumentError, match=r"expected a dict such as \{'x': \(source, ids\)\}"):
        wrap_loader(batches(), fetch=fetch)


def test_sources_that_cannot_be_read(path: Path) -> None:
    with pytest.raises(pinfeed.errors.FileMissing, match=r"missing\.npy"):
        wrap_loader(batches(), fetch={"x": (path, "n_id"), "y": ("missing.npy", "n_id")})
    ragged = pinfeed.RaggedStore(LABELS, [0, 3, 5])
    with pytest.raises(ArgumentError, match=r"fetch\['y'\] has a RaggedStore"):
        wrap_loader(batches(), fetch={"y": (ragged, "n_id")})
    with pytest.raises(StoreError, match=r"fetch\['y'\]\[1\] has 3"):
        wrap_loader(batches(), fetch={"y": ((LABELS, np.zeros(3)), "n_id")})


def test_limits() -> None:
    config = pinfeed.Config(cpu_memory_limit=pinfeed.MiB(1), depth=3)
    with pytest.raises(ArgumentError, match="config was given without fetch"):
        wrap_loader(batches(), config=config)
    with pytest.raises(ArgumentError, match=r"expected a pinfeed\.Config"):
        wrap_loader(batches(), fetch={"x": (FEATURES, "n_id")}, config=5)  # type: ignore[arg-type]
    with pytest.raises(UnknownArgument, match="limits are given together"):
        wrap_loader(batches(), cpu_memory_limit=5)  # type: ignore[call-arg]
    with wrap_loader(batches(), fetch={"x": (FEATURES, "n_id")}, config=config) as loop:
        assert loop.plan.depth == 3
    with wrap_loader(batches(), depth=1) as loop:
        assert (loop.plan.depth, loop.plan.items) == (1, ())


def test_the_chunks_that_reading_takes_are_planned(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=np.arange(9000.0), chunks=(1000,), compression="gzip")
    store = pinfeed.HDF5Store(tmp_path / "x.h5")
    fetch = {"x": (store, lambda ids: ids), "y": (store, lambda ids: ids[:1])}
    limit = 2 * store.resident_bytes
    config = pinfeed.Config(cpu_memory_limit=limit)
    with wrap_loader([np.array([8999, 3])], fetch=fetch, config=config, device="cpu") as loop:
        assert loop.plan.host_bytes == store.resident_bytes
        assert "buffers and indices of the stores" in unwrapped(loop.plan)
        ((_, got),) = loop
        assert got["x"].tolist() == [8999, 3]
    config = pinfeed.Config(cpu_memory_limit=limit - 2)
    with pytest.raises(NotEnoughCPUMemory, match="raise cpu_memory_limit, or write files with"):
        wrap_loader([np.array([3])], fetch=fetch, config=config, device="cpu")
    store.close()


def test_stores_that_a_path_opened_are_closed_and_no_others(path: Path) -> None:
    store = NpyStore(path)
    loop = wrap_loader(batches(), fetch={"x": (store, "n_id"), "y": (path, "n_id")}, device="cpu")
    with loop:
        list(loop)
        opened = [found for found in loop._fetch.stores if found is not store]
    out = np.empty((1, 3, 2), np.float16)
    store.gather(np.array([1]), out)
    store.close()
    assert len(opened) == 1
    with pytest.raises(ClosedError):
        opened[0].gather(np.array([1]), out)


def test_leaving_the_loop_early(path: Path) -> None:
    def endless() -> Iterator[Any]:
        while True:
            yield from batches()

    with wrap_loader(endless(), fetch={"x": (path, "n_id")}, device="cpu", depth=2) as loop:
        for _, got in loop:
            assert len(got["x"]) == 40
            break

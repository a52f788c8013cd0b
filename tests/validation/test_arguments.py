"""Arguments that are refused: wrong numbers, seeds, ranks, flags, dtypes and paths."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.callables import fed, read, table, trained, wrapped
from torch import nn

from pinfeed import (
    ArgumentError,
    Config,
    Feeder,
    HostEmbedding,
    HostEmbeddingBag,
    NpyStore,
    PinnedStore,
    Ranks,
    RemoteStore,
    errors,
    rows,
    train_rows,
)
from pinfeed.memory.limits import MAX_DEPTH

NO_NUMBERS: list[Any] = [None, True, 1.0, "1", np.array([1, 2]), torch.tensor(1.5)]


# ---- whole numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [fed, wrapped, read, trained, Config], ids=lambda make: make.__name__
)
def test_a_depth_that_takes_memory_for_nothing_is_refused(make: Callable[..., Any]) -> None:
    alternative = "" if make is read else ", or None to let pinfeed choose"
    message = (
        "depth=1000000: expected a whole number, from 0 to 1,024 (0 is the synchronous loop)"
        f"{alternative}; each prefetched batch needs memory"
    )
    with pytest.raises(ArgumentError, match=re.escape(message)):
        make(depth=10**6)
    with pytest.raises(ArgumentError, match=f"depth={MAX_DEPTH + 1}: "):
        make(depth=MAX_DEPTH + 1)


def test_the_largest_depth_feeds_the_same_batches() -> None:
    x = np.arange(16).reshape(8, 2)
    with Feeder(x, batch_size=2, depth=MAX_DEPTH, device="cpu") as feeder:
        np.testing.assert_array_equal(torch.cat(list(feeder)).numpy(), x)


@pytest.mark.parametrize("value", NO_NUMBERS[1:], ids=repr)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (fed, "batch_size"),
        (fed, "depth"),
        (wrapped, "depth"),
        (read, "depth"),
        (read, "batch_size"),
        (read, "n_readers"),
        (read, "one_read_count"),
        (Config, "preferred_batch_size"),
        (Config, "depth"),
        (Config, "one_read_count"),
        (lambda **arguments: rows.block_shuffled(**{"block_rows": 2, **arguments}), "block_rows"),
        (
            lambda **arguments: rows.block_shuffled(**{"block_rows": 2, **arguments}),
            "window_blocks",
        ),
        (lambda **arguments: RemoteStore("memory://x.npy", **arguments), "attempts"),
    ],
)
def test_counts_are_whole_numbers(make: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(
        ArgumentError, match=re.escape(f"{name}={value!r}: expected a whole number")
    ):
        make(**{name: value})


def test_block_rows_of_none_is_no_number() -> None:
    with pytest.raises(ArgumentError, match="block_rows=None: expected a whole number, at least 1"):
        rows.block_shuffled(block_rows=None)  # type: ignore[arg-type]


def test_readers_beyond_counting_are_refused() -> None:
    with pytest.raises(
        ArgumentError,
        match="n_readers=1000000: expected a whole number, from 1 to 1,024; each is a thread",
    ):
        read(n_readers=10**6)


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 10**30},
        {"batch_size": None, "config": Config(preferred_batch_size=10**30)},
        {
            "batch_size": 8,
            "rows": rows.block_shuffled(10**40, block_rows=10**30, window_blocks=10**30),
        },
    ],
)
def test_sizes_beyond_the_rows_mean_all_of_them(arguments: dict[str, Any]) -> None:
    with fed(**arguments) as feeder:
        assert [len(batch) for batch in feeder] == [8]


def test_numbers_of_other_libraries_are_whole_numbers() -> None:
    config = Config(preferred_batch_size=np.uint8(4), depth=np.uint8(1))  # type: ignore[arg-type]
    assert (type(config.preferred_batch_size), type(config.depth)) == (int, int)
    with (
        fed(
            batch_size=np.int64(4), depth=np.uint8(1), shuffle=True, seed=torch.tensor(3)
        ) as feeder,
        fed(batch_size=4, shuffle=True, seed=3) as same,
    ):
        assert [batch.tolist() for batch in feeder] == [batch.tolist() for batch in same]


@pytest.mark.parametrize("headroom", ["a", None, -0.1, 1])
def test_headroom_is_a_share(headroom: Any) -> None:
    with pytest.raises(
        ArgumentError, match=re.escape(f"headroom={headroom!r}: expected a share in [0, 1)")
    ):
        Config(headroom=headroom)


# ---- seeds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", NO_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    "make",
    [
        lambda seed: fed(shuffle=True, seed=seed),
        lambda seed: fed(shuffle=False, seed=seed),
        lambda seed: read(shuffle=True, seed=seed),
        rows.shuffled,
        lambda seed: rows.block_shuffled(seed, block_rows=2),
    ],
)
def test_a_seed_is_a_whole_number(make: Callable[[Any], Any], seed: Any) -> None:
    message = (
        f"seed={seed!r}: expected a whole number; for a different order in every run, give "
        "seed=random.randrange(2**32)"
    )
    with pytest.raises(ArgumentError, match=re.escape(message)):
        make(seed)


@pytest.mark.parametrize("arguments", [{"seed": 1}, {"seed": 0}])
@pytest.mark.parametrize("make", [fed, read])
def test_a_seed_that_shuffles_nothing_is_refused(
    make: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    message = f"seed={arguments['seed']} was given without shuffle; expected shuffle=True, "
    with pytest.raises(ArgumentError, match=re.escape(message)):
        make(**arguments)
    make(shuffle=False, **arguments).close()
    make(shuffle=True, **arguments).close()


def test_a_seed_next_to_an_order_is_refused() -> None:
    with pytest.raises(
        ArgumentError,
        match=re.escape(
            "leave seed out (an order has its own: rows=pinfeed.rows.shuffled(seed=1))"
        ),
    ):
        fed(rows=rows.sequential(), seed=1)


# ---- ranks and flags -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "world_size"),
    [("0", 2), (0, "2"), (0, 2.0), (True, 2), (-1, 2), (2, 2), (0, 0), (0, -1)],
)
def test_ranks_are_whole_numbers(rank: Any, world_size: Any) -> None:
    message = f"rank={rank!r}, world_size={world_size!r}"
    with pytest.raises(
        ArgumentError,
        match=re.escape(f"{message}: expected 0 <= rank < world_size, both whole numbers"),
    ):
        rows.per_rank(rows.shuffled(), rank=rank, world_size=world_size)
    with pytest.raises(
        ArgumentError,
        match=re.escape(f"Ranks({message}): expected 0 <= rank < world_size, both whole numbers"),
    ):
        Ranks(rank=rank, world_size=world_size)


@pytest.mark.parametrize("order", [[1, 2], rows.orders.Shuffled], ids=["list", "class"])
@pytest.mark.parametrize(
    "make",
    [
        lambda order: rows.per_rank(order, rank=0, world_size=2),
        lambda order: rows.bucketed([1, 2], batch_size=1, order=order),
        lambda order: rows.element_batches([1, 2], 4, order=order),
        lambda order: rows.mixed({"a": 2}, {"a": 1}, order=order),
    ],
    ids=["per_rank", "bucketed", "element_batches", "mixed"],
)
def test_objects_that_are_no_orders_are_refused(make: Callable[[Any], Any], order: Any) -> None:
    with pytest.raises(
        ArgumentError, match=re.escape(f"order={order!r}: expected an order of pinfeed.rows")
    ):
        make(order)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (fed, "shuffle"),
        (fed, "drop_last"),
        (fed, "verify"),
        (fed, "progress"),
        (fed, "timeline"),
        (wrapped, "progress"),
        (wrapped, "timeline"),
        (read, "shuffle"),
        (read, "drop_last"),
        (read, "progress"),
        (read, "timeline"),
        (Ranks, "split_batches"),
        (
            lambda drop_last: rows.per_rank(
                rows.shuffled(), rank=0, world_size=2, drop_last=drop_last
            ),
            "drop_last",
        ),
        (
            lambda overwrite: NpyStore.create("is-not-made.npy", (3, 3), overwrite=overwrite),
            "overwrite",
        ),
        (
            lambda overwrite: HostEmbedding(4, 2, store="is-not-made.npy", overwrite=overwrite),
            "overwrite",
        ),
        (lambda freeze: HostEmbedding.from_pretrained(torch.ones(4, 2), freeze=freeze), "freeze"),
        (HostEmbedding(4, 2).requires_grad_, "requires_grad"),
        (
            lambda scale_grad_by_freq: HostEmbedding(4, 2, scale_grad_by_freq=scale_grad_by_freq),
            "scale_grad_by_freq",
        ),
        (
            lambda include_last_offset: HostEmbeddingBag(
                4, 2, include_last_offset=include_last_offset
            ),
            "include_last_offset",
        ),
    ],
)
def test_a_string_is_no_flag(make: Callable[..., Any], name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}='False': expected True or False"):
        make(**{name: "False"})


@pytest.mark.parametrize(
    "make",
    [NpyStore.create, lambda path, shape, **flags: HostEmbedding(*shape, store=path, **flags)],
)
def test_a_string_as_overwrite_replaces_no_file(tmp_path: Path, make: Callable[..., Any]) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(20.0).reshape(10, 2))
    before = path.read_bytes()
    with pytest.raises(ArgumentError, match="overwrite='no': expected True or False"):
        make(path, (10, 2), overwrite="no")
    assert path.read_bytes() == before
    with pytest.raises(ArgumentError, match="keep_cache='no': expected True or False"):
        NpyStore(path, keep_cache="no")  # type: ignore[arg-type]


def normal(**arguments: Any) -> PinnedStore:
    return PinnedStore.normal((3, 2), pin=False, **arguments)


# ---- numbers, dtypes, paths and stores of tables -------------------------------------------------


@pytest.mark.parametrize(
    ("make", "name", "values", "expected"),
    [
        (table, "padding_idx", [True, 1.0, "1", 4, -5], "a whole number, from -4 to 3"),
        (table, "max_norm", [-1, "x", True, float("nan")], "a number, at least 0"),
        (table, "norm_type", [None, "x", float("nan")], "a number"),
        (normal, "seed", [None, True, "1", 1.5, -1], "a whole number, at least 0"),
        (normal, "mean", [None, "x", True], "a number"),
        (normal, "std", [None, "x", -1], "a number, at least 0"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_invalid_numbers_are_refused(
    make: Callable[..., Any], name: str, values: list[Any], expected: str
) -> None:
    for value in values:
        with pytest.raises(
            ArgumentError, match=re.escape(f"{name}={value!r}: expected {expected}")
        ):
            make(**{name: value})


def test_numbers_of_numpy_are_numbers() -> None:
    assert (
        table(padding_idx=np.int64(-1), max_norm=np.float32(1), norm_type=np.int64(1)).padding_idx
        == 3
    )
    assert normal(std=0, mean=np.float64(2)).array.tolist() == [[2, 2]] * 3


def raw(path: Path, dtype: Any) -> NpyStore:
    path.write_bytes(bytes(64))
    return NpyStore.raw(path, shape=(-1, 2), dtype=dtype)


DTYPE_TAKERS = [
    lambda path, dtype: NpyStore.create(path, (3, 2), dtype),
    raw,
    lambda path, dtype: PinnedStore.zeros((3, 2), dtype, pin=False),
    lambda path, dtype: PinnedStore.normal((3, 2), dtype, pin=False),
    lambda path, dtype: HostEmbedding(3, 2, dtype=dtype).store,
]


@pytest.mark.parametrize("make", DTYPE_TAKERS)
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float16, "float16"),
        (torch.bfloat16, "bfloat16"),
        (np.float64, "float64"),
        (float, "float64"),
        ("f4", "float32"),
    ],
    ids=str,
)
def test_a_dtype_is_spelled_as_in_torch_or_numpy(
    tmp_path: Path, make: Callable[..., Any], dtype: Any, name: str
) -> None:
    store = make(tmp_path / "x.npy", dtype)
    assert store.dtype.name == name
    store.close()


@pytest.mark.parametrize("make", DTYPE_TAKERS)
@pytest.mark.parametrize("dtype", ["float33", torch.qint8, 3, "M8[s]"], ids=str)
def test_unknown_dtypes_are_refused(tmp_path: Path, make: Callable[..., Any], dtype: Any) -> None:
    with pytest.raises(
        errors.StoreError,
        match=r"(is unknown|no torch counterpart).*; expected one of bfloat16, bool, ",
    ):
        make(tmp_path / "x.npy", dtype)


@pytest.mark.parametrize("make", DTYPE_TAKERS[:-1])
def test_no_dtype_is_not_float64(tmp_path: Path, make: Callable[..., Any]) -> None:
    with pytest.raises(errors.StoreError, match="dtype=None is unknown"):
        make(tmp_path / "x.npy", None)


PATH_TAKERS = [lambda path: NpyStore.create(path, (3, 2)), HostEmbedding(4, 2).export]


@pytest.mark.parametrize("path", [None, 3, b"x.npy"], ids=repr)
@pytest.mark.parametrize("make", PATH_TAKERS)
def test_objects_that_are_no_paths_are_refused(make: Callable[[Any], Any], path: Any) -> None:
    with pytest.raises(
        ArgumentError,
        match=re.escape(f"path={path!r}: expected a path, as a str or a pathlib.Path"),
    ):
        make(path)


@pytest.mark.parametrize("make", [*PATH_TAKERS, lambda path: HostEmbedding(4, 2, store=path)])
def test_a_file_in_a_directory_that_does_not_exist(
    tmp_path: Path, make: Callable[[Any], Any]
) -> None:
    with pytest.raises(
        errors.FileMissing,
        match=re.escape(f"create it with os.makedirs({str(tmp_path / 'run')!r})"),
    ):
        make(tmp_path / "run" / "x.npy")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", PATH_TAKERS)
def test_a_directory_is_no_file(tmp_path: Path, make: Callable[[Any], Any]) -> None:
    with pytest.raises(errors.StoreError, match="is a directory; expected the path of a"):
        make(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "store", [np.zeros((4, 2)), torch.zeros(4, 2), 3, [1]], ids=lambda store: type(store).__name__
)
def test_rows_in_place_of_a_store(store: Any) -> None:
    with pytest.raises(
        ArgumentError,
        match=(
            rf"store={type(store).__name__}; expected a path of a .npy file, or a Store; "
            r".*ArrayStore"
        ),
    ):
        HostEmbedding(4, 2, store=store)


@pytest.mark.parametrize(
    "source",
    [[[1.0, 2.0]], [np.zeros((2, 2))] * 2, ((1.0, 2.0),)],
    ids=["numbers", "arrays", "tuple"],
)
@pytest.mark.parametrize("make", [HostEmbedding.from_pretrained, PinnedStore])
def test_rows_in_a_list_are_an_array_first(make: Callable[[Any], Any], source: Any) -> None:
    with pytest.raises(
        errors.StoreError, match=re.escape("for a list of rows, give np.asarray(list)")
    ):
        make(source)


def test_a_shape_in_place_of_rows() -> None:
    with pytest.raises(
        errors.StoreError,
        match=re.escape(
            "got the tuple (3, 4); expected rows, or the path of a file; create a store"
        ),
    ):
        PinnedStore((3, 4))


def test_a_table_that_is_larger_than_memory() -> None:
    with pytest.raises(
        MemoryError,
        match=r"needs 35,184,372,088,832 bytes, .* HostEmbedding\(\.\.\., store=path\)",
    ):
        HostEmbedding(2**40, 8, pin=False)


@pytest.mark.parametrize("init", [lambda tensor: torch.randn(4, 2), lambda tensor: tensor + 1])
def test_an_init_that_fills_another_tensor(tmp_path: Path, init: Callable[..., Any]) -> None:
    message = "returned a new tensor; expected a function that fills the given tensor in place"
    for store in (None, tmp_path / "x.npy"):
        with pytest.raises(ArgumentError, match=message):
            HostEmbedding(4, 2, init=init, store=store)
    assert not list(tmp_path.iterdir())
    found = table(init="ones")
    with pytest.raises(ArgumentError, match=message):
        found.reset_parameters(init)
    assert found.store.array.tolist() == [[1, 1]] * 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "init", [nn.init.ones_, lambda tensor: tensor.fill_(1)[0], lambda tensor: [tensor.fill_(1)]]
)
def test_an_init_that_fills_its_tensor(init: Callable[..., Any]) -> None:
    assert table(init=init).read([0, 3]).tolist() == [[1, 1]] * 2


def test_ids_in_lists_and_arrays() -> None:
    rows = torch.arange(8.0).view(4, 2)
    one, bag = (
        HostEmbedding.from_pretrained(rows),
        HostEmbeddingBag.from_pretrained(rows, mode="sum"),
    )
    for ids in ([3, 1], (3, 1), np.array([3, 1], np.uint8), torch.tensor([3, 1])):
        torch.testing.assert_close(one(ids), rows[[3, 1]], rtol=0, atol=0)
        torch.testing.assert_close(bag(ids, [0, 1]), rows[[3, 1]], rtol=0, atol=0)
    assert one([]).shape == (0, 2)
    for wrong in ([1.5], ["a"], [[1], [1, 2]], None, [True]):
        with pytest.raises(
            errors.RowIndexError, match="expected integers in a tensor, an array or a list"
        ):
            one(wrong)
    with pytest.raises(errors.RowIndexError, match="offsets: a list of float64; expected integers"):
        bag([3, 1], [0.5])


def test_ids_in_lists_and_arrays_in_a_loop() -> None:
    words = table()
    for (x,) in train_rows(
        [(torch.tensor([2, 1]),)], {words: lambda batch: batch[0]}, device="cpu"
    ):
        expected = words(x)
        torch.testing.assert_close(words([2, 1]), expected)
        torch.testing.assert_close(words(np.array([2, 1])), expected)
        with pytest.raises(errors.RowIndexError, match="id 3 was not announced"):
            words([3])

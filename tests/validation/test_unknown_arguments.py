"""Arguments that a function does not have: the names that other libraries use."""

import dataclasses
import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.callables import fed, read, table, trained, wrapped
from torch.utils.data import DataLoader

from pinfeed import (
    BigBatch,
    Config,
    Feeder,
    HostEmbedding,
    HostEmbeddingBag,
    NpyStore,
    PinnedStore,
    RowDataset,
    errors,
    train_rows,
    wrap_loader,
    wrap_readers,
)

OF_DATA_LOADER = [name for name in inspect.signature(DataLoader).parameters if name != "dataset"]


@pytest.mark.parametrize("make", [fed, wrapped, read, trained], ids=lambda make: make.__name__)
def test_every_argument_of_a_dataloader_is_explained(make: Callable[..., Any]) -> None:
    """The error gives a hint, not a list of arguments or a guess."""
    own = inspect.signature(
        {fed: Feeder, wrapped: wrap_loader, read: wrap_readers, trained: train_rows}[make]
    ).parameters
    for name in OF_DATA_LOADER:
        if name in own:
            continue
        with pytest.raises(errors.UnknownArgument, match=f"has no argument '{name}'; ") as caught:
            make(**{name: 4})
        assert not re.search("expected one of|did you mean", str(caught.value)), name


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (fed, {"sampler": [1]}, "Feeder has no argument 'sampler'; give it as rows="),
        (
            fed,
            {"num_workers": 4},
            (
                "Feeder has no argument 'num_workers'; pinfeed chooses the number of reader "
                "threads; leave it out"
            ),
        ),
        (fed, {"gpu_memory_limit": 1}, "config=pinfeed.Config(gpu_memory_limit=...)"),
        (fed, {"batchsize": 8}, "Feeder has no argument 'batchsize'; did you mean 'batch_size'?"),
        (fed, {"Shuffle": True}, "did you mean 'shuffle'?"),
        (
            fed,
            {"colour": 1},
            "Feeder has no argument 'colour'; expected one of source, batch_size, config, rows, ",
        ),
        (
            wrapped,
            {"num_workers": 4},
            "'num_workers'; give it to the DataLoader: DataLoader(dataset, num_workers=",
        ),
        (wrapped, {"dept": 4}, "did you mean 'depth'?"),
        (
            read,
            {"dataset": 4},
            (
                "wrap_readers has no argument 'dataset'; give the inputs and the outputs as the "
                "first two arguments, without names"
            ),
        ),
        (
            read,
            {"num_workers": 4},
            (
                "wrap_readers has no argument 'num_workers'; give the number of reader threads as "
                "n_readers="
            ),
        ),
        (
            Config,
            {"batch_size": 4},
            "Config has no argument 'batch_size'; did you mean 'preferred_batch_size'?",
        ),
        (
            Config,
            {"gpu_memory": 4},
            "Config has no argument 'gpu_memory'",
        ),
        (Config, {"Depth": 4}, "Config has no argument 'Depth'; did you mean 'depth'?"),
        (
            BigBatch,
            {"batch_size": 4},
            "BigBatch has no argument 'batch_size'",
        ),
        (
            trained,
            {"optimiser": None},
            "train_rows has no argument 'optimiser'; did you mean 'optimizer'?",
        ),
    ],
)
def test_an_unknown_argument_gets_its_replacement(
    make: Callable[..., Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(errors.UnknownArgument, match=re.escape(message)) as caught:
        make(**arguments)
    assert isinstance(caught.value, TypeError), "as it is without pinfeed"


def test_arguments_of_torch_and_numpy_are_explained(tmp_path: Path) -> None:
    path, rows_of = tmp_path / "x.npy", torch.ones(4, 2)
    np.save(path, rows_of.numpy())
    for call, message in [
        (
            lambda: table(sparse=True),
            "HostEmbedding has no argument 'sparse'; pinfeed always moves and trains only",
        ),
        (
            lambda: table(device="cuda"),
            "HostEmbedding has no argument 'device'; the table stays in host memory",
        ),
        (
            lambda: table(_weight=rows_of),
            "give the rows to HostEmbedding.from_pretrained(rows, freeze=False)",
        ),
        (
            lambda: HostEmbedding.from_pretrained(rows_of, sparse=True),
            "has no argument 'sparse'; pinfeed always moves",
        ),
        (
            lambda: HostEmbeddingBag(4, 2, sparse=True),
            "has no argument 'sparse'; pinfeed always moves",
        ),
        (
            lambda: NpyStore(path, mmap_mode="r"),
            "NpyStore has no argument 'mmap_mode'; give mode='r' to read",
        ),  # type: ignore[call-arg]
        (
            lambda: PinnedStore(path, pinned=True),
            "PinnedStore has no argument 'pinned'; give pin=True",
        ),  # type: ignore[call-arg]
    ]:
        with pytest.raises(errors.UnknownArgument, match=re.escape(message)):
            call()
    for name in OF_DATA_LOADER:
        with pytest.raises(
            errors.UnknownArgument,
            match=f"has no argument '{name}'; a RowDataset has rows, not batches",
        ):
            RowDataset(path, **{name: 4})


def test_all_unknown_arguments_are_explained_at_once() -> None:
    with pytest.raises(errors.UnknownArgument) as caught:
        fed(num_workers=4, pin_memory=True)
    assert [line.split(";")[0] for line in str(caught.value).splitlines()] == [
        "Feeder has no argument 'num_workers'",
        "Feeder has no argument 'pin_memory'",
    ]


def test_a_config_is_a_dataclass_like_any_other() -> None:
    config = Config(depth=3)
    assert dataclasses.replace(config, depth=4) == Config(depth=4)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(
        errors.UnknownArgument, match="has no argument 'dept'; did you mean 'depth'"
    ):
        dataclasses.replace(config, dept=4)  # type: ignore[call-arg]


def test_the_batch_size_of_a_feeder() -> None:
    with fed() as feeder, fed(batch_size=None, rows=iter([[1]])) as of_any_size:
        assert (feeder.batch_size, of_any_size.batch_size) == (2, None)


@pytest.mark.parametrize(
    "function", [Feeder, wrap_loader, wrap_readers, train_rows, Config, BigBatch]
)
def test_signatures_name_every_argument(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters.values()
    assert len(parameters) > 4
    assert all(
        one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        and one.annotation is not one.empty
        for one in parameters
    )

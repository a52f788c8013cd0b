"""Sharded tables: partition of rows, initial values, arguments and files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sharded_programs import trained
from support.simranks import RankThreads
from torch import nn

from pinfeed import (
    ArrayStore,
    HostEmbedding,
    ShardedEmbedding,
    train_rows,
)
from pinfeed.errors import (
    ArgumentError,
    StoreError,
)
from pinfeed.training.distributed import sharded_table
from pinfeed.training.distributed.row_exchange import RowPartition


@given(st.integers(1, 40), st.integers(1, 6), st.data())
@settings(max_examples=30)
def test_every_row_has_one_owner(n_rows: int, size: int, data: Any) -> None:
    owners = RowPartition(n_rows, size)
    rows = np.array(data.draw(st.lists(st.integers(0, n_rows - 1))), np.int64)
    start = data.draw(st.integers(0, n_rows))
    stop = data.draw(st.integers(start, n_rows))
    order, counts = owners.by_owner(rows)
    for rank, of_rank in enumerate(np.split(rows[order], np.cumsum(counts)[:-1])):
        own = owners.own(rank, 0, n_rows)
        assert owners.local(own).tolist() == list(range(owners.n_own(rank)))
        assert set(of_rank) <= set(own)
        assert owners.own(rank, start, stop).tolist() == [row for row in own if start <= row < stop]
    assert sorted(order) == list(range(len(rows)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("init", ["normal", "uniform", "xavier_uniform", "kaiming_normal", "ones"])
def test_chunks_are_drawn_as_the_whole_tensor_is(
    init: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_table, "CHUNK_BYTES", 400)
    fill = getattr(nn.init, f"{init}_")
    for shape in ((1, 1), (37, 1), (100, 3), (64, 5)):
        torch.manual_seed(0)
        whole, state = torch.empty(shape, dtype=dtype), None
        fill(whole)
        state = torch.get_rng_state()
        torch.manual_seed(0)
        pieces = list(sharded_table.draw_chunks(fill, shape, dtype))
        assert torch.equal(torch.cat([piece for _, piece in pieces]), whole)
        assert [start for start, _ in pieces] == np.cumsum(
            [0, *(len(piece) for _, piece in pieces)]
        )[:-1].tolist()
        assert torch.equal(torch.get_rng_state(), state)
    assert len(pieces) > 1


def test_invalid_sharded_tables_are_refused() -> None:
    group = RankThreads(4).groups[0]
    wrong: list[tuple[dict[str, Any], str]] = [
        # The error depends on the version of torch.
        (
            {"init": "orthogonal"},
            "init has no effect on a tensor without data|init calls aten.new_empty.default",
        ),
        ({"init": "eye"}, "init calls aten.eye.*, which needs the whole table at once"),
        ({"init": lambda t: t.copy_(torch.zeros(9, 2, device="meta"))}, "init calls aten"),
        (
            {"init": lambda t: t.copy_(torch.zeros(9, 2)).numpy()},
            "init failed on a tensor without data",
        ),
        ({"init": lambda t: t.normal_().uniform_()}, "init draws the same numbers 2 times"),
        ({"max_norm": 1.0}, "max_norm=1.0 of a sharded table: it would change rows"),
        ({"max_norm": 0.0}, "max_norm=0.0 of a sharded table: it would change rows"),
        ({"scale_grad_by_freq": True}, "needs the id counts of the batches of all ranks"),
        ({"gradients": "max"}, "gradients='max': expected 'mean' or 'sum'"),
        ({"num_embeddings": 3}, "3 rows over 4 ranks"),
        ({"process_group": None}, "expected torch.distributed.init_process_group"),
    ]
    for options, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            ShardedEmbedding(
                **{"num_embeddings": 9, "embedding_dim": 2, "process_group": group, **options}
            )
    with pytest.raises(StoreError, match=r"a store of shape \(9, 2\); expected \(3, 2\)"):
        ShardedEmbedding(9, 2, process_group=group, store=ArrayStore(np.zeros((9, 2), "f4")))
    one, other = (
        ShardedEmbedding(9, 2, process_group=group, name="one"),
        HostEmbedding(9, 2, name="other"),
    )
    with pytest.raises(
        ArgumentError,
        match=r"one \(sharded\), other \(not sharded\); expected either all tables sharded",
    ):
        train_rows([[]], {one: 0, other: 0}, device="cpu")


def test_files_and_another_number_of_ranks(tmp_path: Path) -> None:
    """A table in files of the ranks is exported as one file, from which other ranks begin."""
    ranks = RankThreads(3)

    def program(rank: int) -> Any:
        table = ShardedEmbedding(
            10, 2, store=tmp_path / "users.npy", process_group=ranks.groups[rank]
        )
        trained(table, [torch.tensor([rank, 9])])
        table.export(tmp_path / "whole.npy")
        whole = table.to_embedding().weight.detach()
        table.close()
        return whole

    wholes = ranks.run(program)
    exported = torch.from_numpy(np.load(tmp_path / "whole.npy"))
    assert all(torch.equal(exported, whole) for whole in wholes)
    assert {path.name for path in tmp_path.glob("users.*")} >= {
        f"users.{rank}-of-3.npy" for rank in range(3)
    }
    four = RankThreads(4)
    tables = [
        ShardedEmbedding.from_pretrained(tmp_path / "whole.npy", process_group=group)
        for group in four.groups
    ]
    assert all(
        torch.equal(exported, whole)
        for whole in four.run(lambda rank: tables[rank].read(range(10)))
    )

"""Checkpoints and exports of sharded tables, which all ranks write together."""

import contextlib
import os
import shutil
from pathlib import Path

import numpy as np
import torch
from support.sharded_programs import (
    ADAM,
    BATCHES,
    N,
    RankLoop,
)
from support.simranks import RankThreads

from pinfeed import (
    RowOptimizer,
    ShardedEmbedding,
    checkpoint,
    train_rows,
)
from pinfeed.errors import (
    RankError,
    StoreError,
)


def saved(
    ranks: RankThreads,
    rank: int,
    path: Path,
    stop: int,
    *,
    going_on: bool = False,
    keep: int = 1,
    store: Path | None = None,
) -> torch.Tensor:
    """Train up to batch ``stop``, save in its step, leave the loop, and return the whole table."""
    table = ShardedEmbedding(
        N, 2, process_group=ranks.groups[rank], init="ones", name="table", store=store
    )
    optimizer = RowOptimizer(ADAM, [table], lr=0.1)
    loop = train_rows(
        [batch[rank] for batch in BATCHES],
        {table: lambda ids: ids},
        optimizer=optimizer,
        device="cpu",
    )
    things = {"table": table, "optimizer": optimizer, "loop": loop}
    with contextlib.closing(table), contextlib.closing(optimizer):
        if going_on:
            checkpoint.resume(path, **things)
        with contextlib.closing(loop):
            for ids in loop:
                table(ids).pow(2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if loop.state_dict()["batch"] == stop:
                    checkpoint.save(path, keep=keep, **things)
                    break
        return table.read(range(N))


def test_a_run_resumes_at_the_last_save_of_all_ranks(tmp_path: Path) -> None:
    ranks = RankThreads(2)
    want = ranks.run(lambda rank: saved(ranks, rank, tmp_path / "whole", 6))
    ranks.run(lambda rank: saved(ranks, rank, tmp_path / "parts", 2))
    assert checkpoint.exists(tmp_path / "parts")
    got = ranks.run(lambda rank: saved(ranks, rank, tmp_path / "parts", 6, going_on=True))
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("parts/*/*")) == [
        f"parts/{rank}-of-2/00000002" for rank in (0, 1)
    ]


def test_a_table_in_files_of_ranks_is_resumed_by_its_program(tmp_path: Path) -> None:
    ranks, store = RankThreads(2), tmp_path / "users.npy"
    want = ranks.run(lambda rank: saved(ranks, rank, tmp_path / "whole", 6))
    ranks.run(lambda rank: saved(ranks, rank, tmp_path / "parts", 2, store=store))
    for path in tmp_path.glob("users.1-of-2.*"):
        # Rank 1 has lost its files.
        path.unlink()
    first, second = ranks.run(lambda rank: saved(ranks, rank, tmp_path / "parts", 6, store=store))
    assert isinstance(first, StoreError)
    assert "users.0-of-2.npy existed before table was made" in str(first)
    assert isinstance(second, RankError)
    assert "rank 0: failed (StoreError" in str(second)
    got = ranks.run(
        lambda rank: saved(ranks, rank, tmp_path / "parts", 6, going_on=True, store=store)
    )
    assert torch.equal(got[0], want[0])


def test_an_existing_file_is_not_filled_from_a_whole_table(tmp_path: Path) -> None:
    ranks, store = RankThreads(1), tmp_path / "users.npy"
    for value in (1, 2):
        whole = torch.full((N, 2), float(value))
        table = ShardedEmbedding.from_pretrained(whole, process_group=ranks.groups[0], store=store)
        assert table.awaits_resume == (value == 2)
        table.close()
    assert (np.load(tmp_path / "users.0-of-1.npy") == 1).all()


def test_a_save_that_one_rank_lacks(tmp_path: Path) -> None:
    """The incomplete save is not resumed, and its number is not used again."""
    ranks = RankThreads(2)
    assert not checkpoint.exists(tmp_path)
    ranks.run(lambda rank: saved(ranks, rank, tmp_path, 2, keep=2))
    ranks.run(lambda rank: saved(ranks, rank, tmp_path, 4, going_on=True, keep=2))
    # This simulates a rank that was killed before it renamed its save.
    shutil.rmtree(tmp_path / "1-of-2" / "00000002")
    want = ranks.run(lambda rank: saved(ranks, rank, tmp_path / "other", 4))
    got = ranks.run(lambda rank: saved(ranks, rank, tmp_path, 4, going_on=True))
    assert torch.equal(got[0], want[0])
    assert [sorted(os.listdir(tmp_path / f"{rank}-of-2")) for rank in (0, 1)] == [
        ["00000003"],
        ["00000003"],
    ]


def test_only_saves_that_all_ranks_have_are_kept(tmp_path: Path) -> None:
    ranks = RankThreads(2)
    ranks.run(lambda rank: saved(ranks, rank, tmp_path, 2, keep=2))
    ranks.run(lambda rank: saved(ranks, rank, tmp_path, 4, keep=2))
    # This simulates a rank that was killed before it renamed its save.
    shutil.rmtree(tmp_path / "1-of-2" / "00000002")
    ranks.run(lambda rank: saved(ranks, rank, tmp_path, 4, keep=2))
    assert [sorted(os.listdir(tmp_path / f"{rank}-of-2")) for rank in (0, 1)] == [
        ["00000001", "00000003"]
    ] * 2


def test_a_folder_that_is_named_as_if_there_were_many_ranks(tmp_path: Path) -> None:
    (tmp_path / f"0-of-{10**12}").mkdir()
    assert not checkpoint.exists(tmp_path)


def test_a_save_that_fails_on_one_rank(tmp_path: Path) -> None:
    ranks = RankThreads(2)
    ranks.run(lambda rank: saved(ranks, rank, tmp_path, 2))
    (tmp_path / "1-of-2" / f".writing-{os.getpid()}").write_text("in the way")
    first, second = ranks.run(lambda rank: saved(ranks, rank, tmp_path, 4, going_on=True))
    assert isinstance(second, FileExistsError)
    assert "rank 1: failed (FileExistsError" in str(first)
    assert checkpoint.exists(tmp_path)


def test_another_number_of_ranks(tmp_path: Path) -> None:
    ranks, three = RankThreads(2), RankThreads(3)
    ranks.run(lambda rank: saved(ranks, rank, tmp_path, 2))
    for error in three.run(
        lambda rank: checkpoint.resume(
            tmp_path, table=ShardedEmbedding(N, 2, process_group=three.groups[rank])
        )
    ):
        assert "was saved by 2 ranks and is resumed by 3" in str(error)
    for error in ranks.run(
        lambda rank: checkpoint.resume(
            tmp_path / "no", table=ShardedEmbedding(N, 2, process_group=ranks.groups[rank])
        )
    ):
        assert "has no checkpoint that all 2 ranks have completed" in str(error)


def test_rank_0_cannot_export(tmp_path: Path) -> None:
    ranks = RankThreads(2)
    first, second = ranks.run(
        lambda rank: RankLoop(ranks, rank).table.export(tmp_path / "no" / "whole.npy")
    )
    assert isinstance(first, FileNotFoundError)
    assert "rank 0: failed (FileMissing" in str(second)

"""Ranks as processes: process groups, timeouts, GPUs and the example."""

import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

# Its functions keep the process group that is there at the time of the import, with its file
# descriptors. torch imports it with its compiler, possibly while a test has a process group.
import torch.distributed.nn
from support import sharded_ranks
from support.programs import WITHOUT_A_NETWORK, Programs
from support.sharded_programs import N
from torch import distributed

from pinfeed import (
    HostEmbedding,
    ShardedEmbedding,
)
from pinfeed.training.distributed import rank_loop

ROOT = Path(__file__).parents[3]


def in_time(*command: str, seconds: float = 60) -> str:
    """Run a program and its children with a time limit, and return its output."""
    environment = {
        **os.environ,
        **WITHOUT_A_NETWORK,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=environment,
    )
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"not done after {seconds} s: {process.communicate()[0]}") from None
    assert process.returncode == 0, out
    return out


def test_process_groups_end_with_the_group_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is the only rank."""
    monkeypatch.setattr(rank_loop, "_rank_groups", {})
    n_open = []
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(4):
            group = distributed.new_group([0])
            table = ShardedEmbedding(N, 2, init="ones", process_group=group)
            assert table.read([N - 1]).tolist() == [[1, 1]]
            distributed.destroy_process_group(group)
            n_open.append(len(os.listdir("/proc/self/task")))
    finally:
        distributed.destroy_process_group()
        rank_loop._rank_groups.clear()
    assert len(set(n_open[1:])) == 1, "threads of destroyed groups remain"


def test_process_groups_have_the_timeout_of_the_users_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_loop, "_rank_groups", {})
    distributed.init_process_group(
        "gloo", store=distributed.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=100)
    )
    try:
        ShardedEmbedding(N, 2)
        ShardedEmbedding(
            N, 2, process_group=distributed.new_group([0], timeout=timedelta(seconds=7))
        )
        ShardedEmbedding(N, 2, process_group=distributed.new_group([0]))
        made = [group for _, groups in rank_loop._rank_groups.values() for group in groups]
        timeouts = [
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group in made
        ]
    finally:
        distributed.destroy_process_group()
        rank_loop._rank_groups.clear()
    assert timeouts == [100, 100, 7, 7, 1800, 1800]


@pytest.mark.slow
def test_ranks_as_processes(tmp_path: Path, programs: Programs) -> None:
    """Ranks work as processes: 2 and 4 over gloo, the example, and a pair in which one rank hangs.

    DistributedDataParallel trains the dense part.
    """
    script = ROOT / "tests" / "support" / "sharded_ranks.py"
    done = programs.run(script, tmp_path, "2", "4", "example", "absent")
    assert done.returncode == 0, done
    out = done.stdout
    lonely = torch.load(tmp_path / "absent" / "0.pt")
    assert (
        "RankError('rank 0 of 2 lost the other ranks in an exchange of control bytes: "
        in lonely["read"]
    )
    assert (
        "RankError('rank 0 of 2 made a sharded table, but another rank did not within the timeout"
        in lonely["made"]
    )
    assert "(0:00:02)" in lonely["made"]
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\d\.\d+), \d+ steps/s", out)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert "100 of 200 people are on rank 0; bytes sent per step: ids" in out
    for size in (2, 4):
        joined = [batch.flatten() for batch in sharded_ranks.batches_of(size)]
        torch.manual_seed(0)
        one = HostEmbedding(sharded_ranks.N, sharded_ranks.DIM, dtype=torch.float64)
        scores, initial_rows = sharded_ranks.Scores(), one.read(range(sharded_ranks.N))
        losses = sharded_ranks.train(one, scores, joined, depth=2)
        whole = HostEmbedding.from_pretrained(sharded_ranks.whole_numbers(), freeze=False)
        sharded_ranks.exact(whole, joined, depth=0)
        seen = [torch.load(tmp_path / str(size) / f"{rank}.pt") for rank in range(size)]
        for rank, of_rank in enumerate(seen):
            assert of_rank["n own rows"] == len(range(rank, sharded_ranks.N, size))
            for depth in (0, 2):
                assert torch.equal(of_rank[f"initial {depth}"], initial_rows), (
                    "the seed gives the same table"
                )
                torch.testing.assert_close(
                    of_rank[f"table {depth}"],
                    one.read(range(sharded_ranks.N)),
                    rtol=1e-7,
                    atol=1e-9,
                )
                torch.testing.assert_close(
                    of_rank[f"layer {depth}"], scores.layer.weight.detach(), rtol=1e-9, atol=1e-12
                )
            np.testing.assert_allclose(
                np.mean([other["losses 2"] for other in seen], axis=0), losses, rtol=1e-9
            )
            assert of_rank["losses 0"] == of_rank["losses 2"], "bit for bit, at any depth"
            for name in ("table 0", "exported"):
                assert torch.equal(of_rank[name], seen[0]["table 2"])
            for name in ("exact 0", "exact 3", "resumed"):
                assert torch.equal(of_rank[name], whole.read(range(sharded_ranks.N))), (
                    "bit for bit, where sums are exact"
                )
            assert of_rank["of a group"].tolist() == [[1] * sharded_ranks.DIM] * 2
            assert of_rank["n rows of a group"] == len(range(rank // 2, sharded_ranks.N, size // 2))
            assert f"rank {rank} is not in the process_group" in of_rank["of another group"]
            assert "a bad record" in of_rank["error"]
            assert of_rank["error"].startswith("ValueError" if rank == 1 else "RankError")
            assert "rank 0: has no batch 2; rank" in of_rank["uneven"]
            if rank != 1:
                assert (
                    "lost the other ranks" in of_rank["lost"] or "left its loop" in of_rank["lost"]
                ), of_rank["lost"]


@pytest.mark.stress
def test_the_example_under_torchrun() -> None:
    arguments = (
        "--standalone",
        "--nproc-per-node=2",
        str(ROOT / "examples" / "sharded_tables.py"),
        "--ratings=4000",
    )
    assert "epoch 2: loss" in in_time("-m", "torch.distributed.run", *arguments, seconds=110)


@pytest.mark.gpu
def test_a_rank_on_each_gpu(tmp_path: Path) -> None:
    """NCCL refuses two ranks on one GPU, so a machine with one GPU has one rank.

    The sums of whole numbers are exact in any order, so the table equals that of the CPU.
    """
    job = f"cuda-{torch.cuda.device_count()}"
    in_time(str(ROOT / "tests" / "support" / "sharded_ranks.py"), str(tmp_path), job)
    results = sorted((tmp_path / job).glob("*.pt"))
    assert len(results) == torch.cuda.device_count()
    whole = HostEmbedding.from_pretrained(sharded_ranks.whole_numbers(), freeze=False)
    sharded_ranks.exact(
        whole, [batch.flatten() for batch in sharded_ranks.batches_of(len(results))], depth=0
    )
    for path in results:
        assert all(
            torch.equal(seen, whole.read(range(sharded_ranks.N)))
            for seen in torch.load(path).values()
        )

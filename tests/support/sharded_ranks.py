"""Ranks as processes, for test_sharded_processes.py: ``python sharded_ranks.py DIRECTORY JOB...``.

Each rank saves its results in the directory. A job is one of these:

- a number of ranks on the CPU;
- ``cuda-N``: one rank on each of N GPUs;
- ``example``: examples/sharded_tables.py on two ranks, as under torchrun;
- ``absent``: two ranks, and one of them hangs.

torch is loaded once and the processes are forked, because loading it takes longer than all jobs.
CUDA does not work in a process that was forked after the first CUDA call. Counting the GPUs is
such a call, so the caller counts them.
"""

import os
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import pinfeed

N = 23
DIM = 4
N_BATCHES = 6
N_IDS = 5


class Scores(nn.Module):
    """A dense part of the model, for DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, 1, dtype=torch.float64)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows).tanh().squeeze(-1)


def batches_of(size: int) -> list[torch.Tensor]:
    """Return batches of ids for all ranks, each of shape (ranks, N_IDS)."""
    return list(
        torch.randint(0, N, (N_BATCHES, size, N_IDS), generator=torch.Generator().manual_seed(size))
    )


def train(
    table: pinfeed.HostEmbedding,
    scores: nn.Module,
    batches: Any,
    *,
    depth: int,
    device: str = "cpu",
) -> list[float]:
    """Train a table and a dense part; return the mean losses of the batches."""
    rows, dense = (
        pinfeed.RowOptimizer(torch.optim.Adam, [table], lr=0.1),
        torch.optim.SGD(scores.parameters(), lr=0.1),
    )
    losses = []
    with pinfeed.train_rows(
        batches, {table: lambda ids: ids}, optimizer=rows, depth=depth, device=device
    ) as loop:
        for ids in loop:
            loss = (scores(table(ids)) - ids / N).pow(2).mean()
            loss.backward()
            for optimizer in (rows, dense):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def exact(table: pinfeed.HostEmbedding, batches: Any, *, depth: int, device: str = "cpu") -> None:
    """Train with whole numbers, whose sums are exact in any order."""
    rows = pinfeed.RowOptimizer(torch.optim.SGD, [table], lr=0.5)
    for ids in pinfeed.train_rows(
        batches, {table: lambda ids: ids}, optimizer=rows, depth=depth, device=device
    ):
        table(ids).sum(1).pow(2).mul(0.5).sum().backward()
        rows.step()
        rows.zero_grad()


def whole_numbers() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(-3, 4, (N, DIM)).astype("f8")


def error_of(program: Any) -> str:
    try:
        program()
    except Exception as error:
        return repr(error)
    return "none"


def rank_program(rank: int, size: int, directory: Path) -> dict[str, Any]:
    """Run all checks on one process group; in the last one, rank 1 dies."""
    seen: dict[str, Any] = {}
    batches = [batch[rank] for batch in batches_of(size)]
    for depth in (0, 2):
        torch.manual_seed(0)
        table = pinfeed.ShardedEmbedding(N, DIM, dtype=torch.float64, name="table")
        scores = DistributedDataParallel(Scores())
        seen[f"initial {depth}"], seen["n own rows"] = table.read(range(N)), table.store.n_rows
        seen[f"losses {depth}"] = train(table, scores, batches, depth=depth)
        seen[f"table {depth}"], seen[f"layer {depth}"] = (
            table.read(range(N)),
            scores.module.layer.weight.detach(),
        )
    table.export(directory / "whole.npy")
    seen["exported"] = torch.from_numpy(np.load(directory / "whole.npy"))
    for depth in (0, 3):
        table = pinfeed.ShardedEmbedding.from_pretrained(
            whole_numbers(), freeze=False, gradients="sum"
        )
        exact(table, batches, depth=depth)
        seen[f"exact {depth}"] = table.read(range(N))
    pinfeed.checkpoint.save(directory / "checkpoint", table=table)
    table.reset_parameters("zeros")
    pinfeed.checkpoint.resume(directory / "checkpoint", table=table)
    seen["resumed"] = table.read(range(N))

    groups = [distributed.new_group([*range(first, size, 2)]) for first in (0, 1)]
    table = pinfeed.ShardedEmbedding(N, DIM, init="ones", process_group=groups[rank % 2])
    seen["of a group"], seen["n rows of a group"] = table.read([rank, 0]), table.store.n_rows
    seen["of another group"] = error_of(
        lambda: pinfeed.ShardedEmbedding(N, DIM, process_group=groups[1 - rank % 2])
    )
    table = pinfeed.ShardedEmbedding(N, DIM, init="zeros")

    def failing() -> Any:
        for i, ids in enumerate(batches):
            if i == 3 and rank == 1:
                raise ValueError("a bad record")
            yield ids

    seen["error"] = error_of(lambda: exact(table, failing(), depth=2))
    seen["uneven"] = error_of(lambda: exact(table, batches[: 2 + (rank > 0)], depth=2))

    def dying() -> Any:
        for i, ids in enumerate(batches):
            if i == 3 and rank == 1:
                os._exit(0)
            yield ids

    start = time.monotonic()
    # Saved before the last check, in which rank 1 dies.
    torch.save(seen, directory / f"{rank}.pt")
    seen["lost"] = error_of(lambda: exact(table, dying(), depth=2))
    seen["lost after"] = time.monotonic() - start
    return seen


def rank_on_gpu(rank: int, size: int, directory: Path) -> dict[str, Any]:
    """Send deferred rows and gradients by NCCL, and all else as on the CPU."""
    torch.cuda.set_device(rank)
    seen = {}
    for depth in (0, 1, 2):
        table = pinfeed.ShardedEmbedding.from_pretrained(
            whole_numbers(), freeze=False, gradients="sum"
        )
        exact(
            table, [batch[rank] for batch in batches_of(size)], depth=depth, device=f"cuda:{rank}"
        )
        seen[f"exact {depth}"] = table.read(range(N))
    return seen


def example(rank: int, size: int, directory: Path) -> dict[str, Any]:
    sys.argv = [
        "sharded_tables.py",
        "--people=200",
        "--films=50",
        "--ratings=4000",
        "--batch-size=100",
        "--epochs=2",
    ]
    runpy.run_path(
        str(Path(__file__).parents[2] / "examples" / "sharded_tables.py"), run_name="__main__"
    )
    return {}


def absent(rank: int, size: int, directory: Path) -> dict[str, Any]:
    """Read and make a table without rank 1, in groups with a timeout of two seconds."""
    for_reads, for_tables = (distributed.new_group(timeout=timedelta(seconds=2)) for _ in range(2))
    table = pinfeed.ShardedEmbedding(N, DIM, process_group=for_reads)
    if rank == 1:
        # Reading the pipe ends when rank 0 has its errors.
        (directory / "heard").read_bytes()
        return {}
    seen = {
        "read": error_of(lambda: table.read([0])),
        "made": error_of(lambda: pinfeed.ShardedEmbedding(N, DIM, process_group=for_tables)),
    }
    (directory / "heard").write_bytes(b"")
    return seen


def joined_group(
    program: Callable[..., dict[str, Any]], backend: str
) -> Callable[..., dict[str, Any]]:
    def run(rank: int, size: int, directory: Path) -> dict[str, Any]:
        distributed.init_process_group(
            backend, init_method=f"file://{directory}/group", rank=rank, world_size=size
        )
        return program(rank, size, directory)

    return run


def main(directory: Path, job: str) -> None:
    """Fork the ranks of a job and wait for them."""
    directory.mkdir()
    if job.startswith("cuda-"):
        size, program = (
            int(job.removeprefix("cuda-")),
            joined_group(rank_on_gpu, "cpu:gloo,cuda:nccl"),
        )
    elif job == "example":
        size, program = 2, example
    elif job == "absent":
        os.mkfifo(directory / "heard")
        size, program = 2, joined_group(absent, "gloo")
    else:
        size, program = int(job), joined_group(rank_program, "gloo")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    sys.stdout.flush()
    children = []
    for rank in range(size):
        if not (child := os.fork()):
            status = 1
            try:
                torch.set_num_threads(1)
                os.environ.update(
                    RANK=str(rank),
                    WORLD_SIZE=str(size),
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=str(port),
                )
                torch.save(program(rank, size, directory), directory / f"{rank}.pt")
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        children.append(child)
    for child in children:
        if os.waitpid(child, 0)[1]:
            sys.exit(f"a rank of {size} failed")


if __name__ == "__main__":
    # The first optimizer imports much of torch, which the ranks then need not do.
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    for name in sys.argv[2:]:
        main(Path(sys.argv[1], name), name)

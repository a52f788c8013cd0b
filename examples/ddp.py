"""DistributedDataParallel with the same global batches in any number of processes.

A run can be resumed in another number of processes:

    torchrun --standalone --nproc-per-node 2 examples/ddp.py --stop-after 30
    # resumes with batch 31
    torchrun --standalone --nproc-per-node 4 examples/ddp.py
    # one process: the same losses
    python examples/ddp.py --folder elsewhere

Each process uses one GPU (nccl). Without a GPU, processes compute on the CPU (gloo). All of them
read the same files.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pinfeed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "pinfeed-ddp",
        help="files and checkpoints",
    )
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument(
        "--batch-size", type=int, default=100, help="batch size of all processes together"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--stop-after", type=int, help="stop after this number of batches, like a preempted job"
    )
    return parser.parse_args()


def join_job() -> torch.device:
    """Join the process group of the job, and return the device of this process."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def write_files(folder: Path, n_rows: int) -> dict[str, str]:
    """Return the paths of inputs and targets. Rank 0 writes files that do not exist."""
    paths = {name: str(folder / f"{name}.npy") for name in ("x", "y")}
    if dist.get_rank() == 0 and not os.path.exists(paths["y"]):
        folder.mkdir(parents=True, exist_ok=True)
        x = np.random.default_rng(0).normal(size=(n_rows, 32)).astype("float32")
        np.save(paths["x"], x)
        np.save(paths["y"], np.sin(x.sum(1, keepdims=True)))
    dist.barrier()
    return paths


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    # Every rank begins with the same weights.
    torch.manual_seed(0)
    net = DistributedDataParallel(
        nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    paths = write_files(arguments.folder, arguments.rows)
    checkpoint = arguments.folder / "checkpoint"
    ranks = pinfeed.Ranks("drop", split_batches=True)
    with pinfeed.Feeder(
        paths, batch_size=arguments.batch_size, shuffle=True, drop_last=True, ranks=ranks
    ) as feeder:
        print(f"{feeder.plan.notes[0]}, on {feeder.device}, {dist.get_backend()}", flush=True)
        parts = {"model": net.module, "optimizer": optimizer, "feeder": feeder}
        losses: list[torch.Tensor] = []
        if checkpoint.exists():
            saved = pinfeed.checkpoint.resume(checkpoint, **parts)
            losses = list(torch.tensor(saved["losses"], device=device))
            print(f"resumes after {len(losses)} batches", flush=True)
        while feeder.epoch < arguments.epochs:
            number = feeder.epoch
            for batch in feeder:
                loss = nn.functional.mse_loss(net(batch["x"]), batch["y"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                # The mean over ranks, as DistributedDataParallel computes it for gradients.
                mean = loss.detach() / dist.get_world_size()
                dist.all_reduce(mean)
                losses.append(mean)
                leave = len(losses) == arguments.stop_after
                if dist.get_rank() == 0 and (leave or len(losses) % 50 == 0):
                    pinfeed.checkpoint.save(
                        checkpoint, **parts, losses=[float(loss) for loss in losses]
                    )
                if leave:
                    return
            if dist.get_rank() == 0:
                mean_loss = torch.stack(losses[number * len(feeder) :]).mean()
                print(f"epoch {number}: mean loss {mean_loss:.4f}", flush=True)


def main() -> None:
    arguments = parse()
    device = join_job()
    try:
        train(arguments, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

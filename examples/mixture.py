"""A mixture of two sources of tokens, in a run that may be killed at any time.

    python examples/mixture.py --folder run
    # kill it, and continue after the last checkpoint, also in another number of processes
    torchrun --standalone --nproc-per-node 2 examples/mixture.py --folder run

The shares of the sources are those of SlimPajama and StarCoder in the training of TinyLlama. A
checkpoint contains the position in the mixture, which is a few numbers. The resumed run continues
with the next batch, so that all steps together have the batches of a run that was never killed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pinfeed

WEIGHTS = {"web": 0.693584, "code": 0.306416}
LENGTH = 64
N_TOKENS = 256
# Sequences of a step of all processes together.
BATCH_SIZE = 16


def prepare(folder: Path, n_sequences: int = 2000) -> None:
    """Write a file of tokens for each source, unless it exists."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(WEIGHTS):
        path = folder / f"{name}.bin"
        if not path.exists():
            rng = np.random.default_rng(number)
            rng.integers(N_TOKENS, size=n_sequences * (LENGTH + 1), dtype=np.uint16).tofile(path)


def train(
    folder: Path,
    n_steps: int,
    save_every: int = 50,
    on_batch: Callable[[int, torch.Tensor], None] = lambda step, tokens: None,
) -> list[float]:
    """Train up to a number of steps, from the checkpoint on if there is one.

    Args:
        folder: Folder of the files and of the checkpoint.
        n_steps: Number of steps of the whole run.
        save_every: Number of steps between two checkpoints.
        on_batch: Called with the number of each step and the tokens of this process.

    Returns:
        The losses of the steps of this process.
    """
    sources = {
        name: pinfeed.NpyStore.windows(
            folder / f"{name}.bin", length=LENGTH + 1, step=LENGTH + 1, dtype="uint16"
        )
        for name in WEIGHTS
    }
    order = pinfeed.rows.mixed(sources, WEIGHTS, seed=42)
    # With split_batches, a step has the same sequences in any number of processes.
    ranks = pinfeed.Ranks("drop", split_batches=True)
    checkpoint = folder / "checkpoint"
    with (
        pinfeed.concat(sources) as rows,
        pinfeed.Feeder(
            rows, batch_size=BATCH_SIZE, rows=order, ranks=ranks, drop_last=True
        ) as feeder,
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(N_TOKENS, 32), nn.Linear(32, N_TOKENS))
        model.to(feeder.device)
        net = DistributedDataParallel(model) if dist.is_initialized() else model
        optimizer = torch.optim.AdamW(model.parameters())
        batches = pinfeed.endless(feeder)
        parts = {"model": model, "optimizer": optimizer, "batches": batches}
        first = 0
        if pinfeed.checkpoint.exists(checkpoint):
            first = pinfeed.checkpoint.resume(checkpoint, **parts)["step"]
        losses = []
        for step in range(first, n_steps):
            tokens = next(batches).long()
            on_batch(step, tokens)
            logits = net(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if (step + 1) % save_every == 0 and os.environ.get("RANK", "0") == "0":
                pinfeed.checkpoint.save(checkpoint, **parts, step=step + 1)
        return losses


def main(folder: Path, n_steps: int = 200) -> None:
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        prepare(folder)
        losses = train(folder, n_steps)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if losses:
        print(f"steps {n_steps - len(losses)} to {n_steps}: mean loss {np.mean(losses):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(tempfile.gettempdir()) / "pinfeed-mixture"
    parser.add_argument("--folder", type=Path, default=default, help="files and checkpoint")
    main(parser.parse_args().folder)

"""Jobs of ``examples/mixture.py`` in several processes, which can be killed at any batch.

Run as ``python mixture_job.py FOLDER N_STEPS WORLD_SIZE:KILLED_AT ...``. The jobs run one after the
other. Each process writes the tokens of its batches to a file in the folder. At batch
``KILLED_AT``, all processes of the job are killed; -1 kills none.
"""

import importlib.util
import json
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
SAVE_EVERY = 4


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mixture", ROOT / "examples" / "mixture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(folder: Path, job: str, rank: int, steps: tuple[int, int], ready: Connection) -> None:
    """Run one process of a job, as torchrun starts it."""
    n_steps, killed_at = steps
    world_size = int(job.partition(":")[0])
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    store = f"file://{folder}/rendezvous-{job}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    with (folder / f"{job}-{rank}.jsonl").open("w", buffering=1) as file:

        def on_batch(step: int, tokens: torch.Tensor) -> None:
            file.write(json.dumps([step, rank, tokens.tolist()]) + "\n")
            if step == killed_at:
                ready.send(step)
                signal.pause()

        example().train(folder, n_steps, SAVE_EVERY, on_batch)
    dist.destroy_process_group()


def run_job(folder: Path, n_steps: int, job: str) -> None:
    """Fork the processes of a job, and kill them when all have received their last batch."""
    world_size, killed_at = map(int, job.split(":"))
    context = multiprocessing.get_context("fork")
    processes = []
    last_batches = []
    for rank in range(world_size):
        here, there = context.Pipe(duplex=False)
        given = (folder, job, rank, (n_steps, killed_at), there)
        process = context.Process(target=run, args=given)
        process.start()
        there.close()
        processes.append(process)
        last_batches.append(here)
    if killed_at >= 0:
        assert [ready.recv() for ready in last_batches] == [killed_at] * world_size
        for process in processes:
            process.kill()
    for process in processes:
        process.join()
        assert process.exitcode == (-signal.SIGKILL if killed_at >= 0 else 0)


def main(folder: Path, n_steps: int, *jobs: str) -> None:
    """Run jobs whose processes are forked from this one, which computes nothing."""
    # Otherwise, the optimizer imports the module in every process.
    importlib.import_module("torch._dynamo")
    for job in jobs:
        run_job(folder, n_steps, job)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])

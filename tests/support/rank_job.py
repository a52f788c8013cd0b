"""Jobs of 1, 2 and 4 processes over gloo, whose reports ``test_ranks.py`` reads.

Run as ``python rank_job.py FOLDER``.
"""

import contextlib
import importlib
import itertools
import json
import logging
import multiprocessing
import os
import runpy
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from pinfeed import ArrayStore, Feeder, Ranks, rows, wrap_readers

WORLDS = (1, 2, 4)
N_ROWS, GLOBAL_BATCH = 97, 16
CRASH = 3
"""Exit status of a rank that has failed."""
EXAMPLE = ["--rows", "2000", "--epochs", "2"]

Report = dict[str, Any]


def dyadic() -> tuple[np.ndarray, np.ndarray]:
    """Return numbers with few bits, so that sums of products are exact in any order."""
    generator = np.random.default_rng(0)
    inputs = generator.integers(-2, 3, (N_ROWS, 4)).astype(float)
    targets = generator.integers(-4, 5, (N_ROWS, 1)).astype(float)
    return inputs, targets


def normal() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    return generator.normal(size=(N_ROWS, 4)), generator.normal(size=(N_ROWS, 1))


def model() -> nn.Module:
    layer = nn.Linear(4, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -0.5, 2.0, 0.25]]))
    return layer


def parameters(net: nn.Module) -> list[float]:
    return [value for parameter in net.parameters() for value in parameter.flatten().tolist()]


def mean(loss: torch.Tensor) -> float:
    """Return the mean of a loss over all ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def listed(feeder: Any, n: int | None = None) -> list[list[int]]:
    with feeder:
        return [x.tolist() for x in itertools.islice(feeder, n)]


def shares(rank: int, world_size: int) -> Report:
    """Return the rows of this rank, which torch.distributed identifies."""
    x = np.arange(N_ROWS)
    report: Report = {
        mode: listed(Feeder(x, batch_size=5, shuffle=True, ranks=mode))
        for mode in ("pad", "drop", "join")
    }  # type: ignore[arg-type]
    blocks = rows.block_shuffled(1, block_rows=4, window_blocks=2)
    report["blocks"] = listed(Feeder(x, batch_size=5, rows=blocks, ranks="join"))
    report["split"] = listed(
        Feeder(x, batch_size=GLOBAL_BATCH, shuffle=True, ranks=Ranks("join", split_batches=True))
    )

    def read(number: int) -> Iterator[int]:
        yield number

    with wrap_readers(
        x.tolist(), x.tolist(), read_input=read, get_output=read, batch_size=5, ranks="join"
    ) as feeder:
        report["readers"] = [batch.tolist() for batch, _ in feeder]
    group_size = max(1, world_size // 2)
    group = dist.new_subgroups(group_size=group_size)[0]
    assert group.rank() == rank % group_size
    report["group"] = listed(
        Feeder(x, batch_size=5, ranks=Ranks("join", rank=group.rank(), world_size=group.size()))
    )
    return report


def warnings() -> Report:
    """Return the warnings about a feeder without ``ranks``, and its rows."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pinfeed").addHandler(handler)
    x = np.arange(6)
    meant = [
        listed(Feeder(x, batch_size=6, ranks="all")),
        listed(Feeder(x, batch_size=6, rows=[0, 1, 2, 3, 4, 5])),
    ]
    assert not said
    return {
        "rows": [
            *meant,
            listed(Feeder(x, batch_size=6)),
            listed(Feeder(x, batch_size=6, shuffle=True, seed=3)),
        ],
        "said": said,
    }


def train(data: tuple[np.ndarray, np.ndarray], lr: float, n_steps: int) -> Report:
    """Train under DDP, with global batches that are the same at any world size."""
    net = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    losses = []
    ranks = Ranks("drop", split_batches=True)
    with Feeder(data, batch_size=GLOBAL_BATCH, shuffle=True, drop_last=True, ranks=ranks) as feeder:
        while len(losses) < n_steps:
            for x, y in itertools.islice(feeder, n_steps - len(losses)):
                loss = mse_loss(net(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(mean(loss))
    return {"losses": losses, "parameters": parameters(net)}


def join() -> Report:
    """Train with uneven ranks in torch's ``Join`` context."""
    net = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    x, y = normal()
    batches = []
    with Feeder((x, y), batch_size=8, shuffle=True, ranks="join") as feeder, Join([net]):
        n = len(feeder)
        for batch in feeder.batches():
            optimizer.zero_grad()
            mse_loss(net(batch.data[0]), batch.data[1]).backward()
            optimizer.step()
            batches.append(batch.rows.tolist())
    return {"n": n, "batches": batches, "parameters": parameters(net)}


def resume(folder: Path, rank: int, world_size: int) -> Report:
    """Leave an epoch with two ranks, with and without global batches, and resume it with four."""
    report: Report = {}
    for name, ranks in (("split", Ranks("join", split_batches=True)), ("each", Ranks("join"))):
        path = folder / f"{name}.json"
        with Feeder(np.arange(N_ROWS), batch_size=8, shuffle=True, seed=5, ranks=ranks) as feeder:
            if world_size == 4:
                feeder.load_state_dict(json.loads(path.read_text()))
            report[name] = [
                x.tolist() for x in itertools.islice(feeder, 3 if world_size == 2 else None)
            ]
            if world_size == 2 and rank == 1:
                path.write_text(json.dumps(feeder.state_dict()))
    return report


class Failing(ArrayStore):
    """A store that fails in the third batch."""

    gathers = 0

    def gather(self, numbers: np.ndarray, out: np.ndarray) -> None:
        self.gathers += 1
        if self.gathers == 3:
            raise OSError("the disk is gone")
        super().gather(numbers, out)


def crash(rank: int) -> Report:
    """Let the source of rank 1 fail: its loop raises, and the collective of the others fails."""
    store = (Failing if rank == 1 else ArrayStore)(np.arange(N_ROWS, dtype=np.float64))
    report: Report = {"batches": 0}
    try:
        with Feeder(store, batch_size=4, ranks="pad", depth=1) as feeder:
            for x in feeder:
                mean(x.mean())
                report["batches"] += 1
    except (OSError, RuntimeError) as error:
        report["error"] = [type(error).__name__, str(error)]
    report["threads"] = [
        thread.name for thread in threading.enumerate() if thread.name.startswith("pinfeed")
    ]
    return report


def run(folder: Path, rank: int, world_size: int) -> None:
    """Run one process of a job, as torchrun starts it."""
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous-{world_size}"
    dist.init_process_group(
        "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    report: Report = {"shares": shares(rank, world_size), "warnings": warnings()}
    report["dyadic"] = train(dyadic(), 1 / 16, 4)
    report["normal"] = train(normal(), 0.05, 20)
    report["join"] = join()
    report["resume"] = resume(folder, rank, world_size)
    report["crash"] = crash(rank)
    (folder / f"{world_size}-{rank}.json").write_text(json.dumps(report))
    if "error" in report["crash"]:
        # End like a process that is killed, without a message to the other ranks.
        os._exit(CRASH)
    dist.destroy_process_group()


def example(folder: Path, options: list[str]) -> None:
    """Run the example in one process; a file next to its folder gets its output."""
    sys.argv = ["ddp.py", "--folder", str(folder), *EXAMPLE, *options]
    with folder.with_suffix(".txt").open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(Path(__file__).parents[2] / "examples" / "ddp.py"), run_name="__main__")


def main(folder: Path) -> None:
    """Fork every process from this one, which has loaded torch once and computed nothing."""
    # Without this import, DistributedDataParallel imports the module in every process.
    importlib.import_module("torch._dynamo")
    context = multiprocessing.get_context("fork")
    for world_size in WORLDS:
        processes = [
            context.Process(target=run, args=(folder, rank, world_size))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        with contextlib.suppress(FileNotFoundError):
            (folder / f"rendezvous-{world_size}").unlink()
        (folder / f"{world_size}.json").write_text(
            json.dumps([process.exitcode for process in processes])
        )
    for name, options in (("whole", []), ("left", ["--stop-after", "23"])):
        process = context.Process(target=example, args=(folder / name, options))
        process.start()
        process.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Jobs of 1, 2 and 4 real processes over gloo, a job that torchrun starts, and one with a GPU."""

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.programs import WITHOUT_A_NETWORK, Programs
from support.rank_job import CRASH, EXAMPLE, GLOBAL_BATCH, N_ROWS, WORLDS, model, normal, parameters
from torch.nn.functional import mse_loss

from pinfeed import rows

ROOT = Path(__file__).parents[2]
# Jobs take some seconds. A job that hangs fails after this time.
TIMEOUT_S = 100
TORCHRUN = "from torch.distributed.run import main; main()"

Reports = dict[int, list[dict[str, Any]]]


def launch(programs: Programs, program: str | Path, *arguments: str, warnings: str = "") -> str:
    """Return the output of a program, and end all processes that it has started."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment |= {**WITHOUT_A_NETWORK, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = programs.run(
        program, *arguments, timeout_s=TIMEOUT_S, warnings=warnings, environment=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Path:
    """The folder in which the processes have saved their reports."""
    folder = tmp_path_factory.mktemp("ranks")
    launch(programs, ROOT / "tests" / "support" / "rank_job.py", str(folder), warnings="error")
    return folder


@pytest.fixture(scope="module")
def reports(folder: Path) -> Reports:
    return {
        world: [json.loads((folder / f"{world}-{rank}.json").read_text()) for rank in range(world)]
        for world in WORLDS
    }


def flat(batches: Sequence[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def steps(ranks: list[list[list[int]]]) -> list[list[int]]:
    """Return the batches of all ranks, joined in the order of ranks."""
    return [flat(batch) for batch in itertools.zip_longest(*ranks, fillvalue=[])]


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_of_a_job_share_an_epoch(reports: Reports, world: int) -> None:
    shares = {
        name: [report["shares"][name] for report in reports[world]]
        for name in reports[world][0]["shares"]
    }
    everything = list(range(N_ROWS))
    assert (
        len({tuple(map(len, mine)) for mine in shares["pad"]})
        == len({tuple(map(len, mine)) for mine in shares["drop"]})
        == 1
    )
    assert set(flat(flat(shares["pad"]))) == set(everything)  # type: ignore[arg-type]
    assert (
        len(set(flat(flat(shares["drop"]))))
        == len(flat(flat(shares["drop"])))
        == N_ROWS // world * world
    )  # type: ignore[arg-type]
    for name in ("join", "blocks", "split", "readers"):
        assert sorted(flat(flat(shares[name]))) == everything  # type: ignore[arg-type]
    order = rows.shuffled(0).bind(N_ROWS, 0)(np.arange(N_ROWS)).tolist()
    assert steps(shares["split"]) == [
        order[i : i + GLOBAL_BATCH] for i in range(0, N_ROWS, GLOBAL_BATCH)
    ]
    half = shares["group"][: max(1, world // 2)]
    assert sorted(flat(flat(half))) == everything  # type: ignore[arg-type]
    assert shares["group"][len(half) :] == half[: world - len(half)], "every group has all rows"


@pytest.mark.parametrize("world", WORLDS)
def test_a_feeder_without_ranks_warns_once(reports: Reports, world: int) -> None:
    for rank, report in enumerate(reports[world]):
        assert [sorted(flat(batches)) for batches in report["warnings"]["rows"]] == [
            list(range(6))
        ] * 4
        assert len(report["warnings"]["said"]) == (1 if world > 1 and rank == 0 else 0)
    if world > 1:
        assert (
            f"each of the {world} processes iterates the same rows"
            in reports[world][0]["warnings"]["said"][0]
        )


def test_training_is_the_same_at_any_world_size(reports: Reports) -> None:
    """Results are equal bit for bit if sums are exact; other sums round differently."""
    one = reports[1][0]
    for report in flat([reports[world] for world in WORLDS]):  # type: ignore[arg-type]
        assert report["dyadic"] == one["dyadic"]  # type: ignore[index]
        for name in ("losses", "parameters"):
            np.testing.assert_allclose(report["normal"][name], one["normal"][name], rtol=1e-12)  # type: ignore[index]
    assert len(one["normal"]["losses"]) == 20 > N_ROWS // GLOBAL_BATCH
    assert one["normal"]["losses"][-1] < 0.5 * one["normal"]["losses"][0]


@pytest.mark.parametrize("world", WORLDS)
def test_uneven_ranks_under_join(reports: Reports, world: int) -> None:
    joined = [report["join"] for report in reports[world]]
    numbers = [one["n"] for one in joined]
    assert numbers == [len(one["batches"]) for one in joined]
    assert world == 1 or max(numbers) == min(numbers) + 1, "otherwise the test shows nothing"
    assert sorted(flat(flat([one["batches"] for one in joined]))) == list(range(N_ROWS))  # type: ignore[arg-type]
    x, y = map(torch.from_numpy, normal())
    net = model()
    for batches in itertools.zip_longest(*[one["batches"] for one in joined]):
        losses = [mse_loss(net(x[batch]), y[batch]) for batch in batches if batch is not None]
        # A rank that is done adds nothing.
        (gradient,) = torch.autograd.grad(sum(losses) / world, net.weight)
        net.weight.data -= 0.05 * gradient
    for one in joined:
        np.testing.assert_allclose(one["parameters"], parameters(net), rtol=1e-12)


@pytest.mark.parametrize("name", ["split", "each"])
def test_four_ranks_resume_the_epoch_of_two(reports: Reports, name: str) -> None:
    before, after, whole = (
        steps([report["resume"][name] for report in reports[world]]) for world in (2, 4, 1)
    )
    assert flat(before) + flat(after) == flat(whole), "the very next row, and every row once"
    if name == "split":
        assert before + after == whole, "the very next global batch"
    else:
        assert {len(batch) for batch in before} == {16}
        assert {len(batch) for batch in after[:-1]} == {32}


@pytest.mark.parametrize("world", WORLDS[1:])
def test_a_rank_that_fails_leaves_no_rank_waiting(
    reports: Reports, folder: Path, world: int
) -> None:
    for rank, report in enumerate(reports[world]):
        kind, message = report["crash"]["error"]
        assert kind == ("OSError" if rank == 1 else "RuntimeError")
        assert ("the disk is gone" in message) == (rank == 1)
        assert report["crash"]["batches"] == 2
        assert report["crash"]["threads"] == []
    assert json.loads((folder / f"{world}.json").read_text()) == [CRASH] * world


@pytest.mark.slow
def test_two_processes_of_torchrun_resume_the_example_of_one(
    folder: Path, programs: Programs
) -> None:
    """They end with the losses of one process that ran the whole example."""
    options = ["--standalone", "--nproc-per-node", "2", str(ROOT / "examples" / "ddp.py")]
    output = launch(programs, TORCHRUN, *options, "--folder", str(folder / "left"), *EXAMPLE)
    for rank in (0, 1):
        assert (
            f"rank {rank} of 2: 1000 of 2000 rows (drop), "
            "as parts of global batches of 100 rows, on"
        ) in output
    assert output.count("resumes after 23 batches") == 2
    first, second = (
        line for line in (folder / "whole.txt").read_text().splitlines() if "mean loss" in line
    )
    assert first in (folder / "left.txt").read_text()
    assert second in output


@pytest.mark.gpu
def test_a_process_of_a_gpu_job_takes_its_gpu(tmp_path: Path, programs: Programs) -> None:
    """NCCL refuses two ranks on one GPU, so a machine with one GPU has one process."""
    count = str(torch.cuda.device_count())
    options = ["--standalone", "--nproc-per-node", count, str(ROOT / "examples" / "ddp.py")]
    output = launch(programs, TORCHRUN, *options, "--folder", str(tmp_path), *EXAMPLE)
    for index in range(torch.cuda.device_count()):
        assert f"on cuda:{index}, nccl" in output

"""A killed mixture continues in other processes with the tokens of a run that was not killed."""

import json
import os
import random
from pathlib import Path

import pytest
from support import mixture_job
from support.programs import WITHOUT_A_NETWORK, Programs

# More than two epochs.
N_STEPS = 40

Tokens = list[list[int]]
"""Tokens of the sequences of a step, those of all processes together."""


def whole_run(folder: Path) -> dict[int, Tokens]:
    found = {}
    example = mixture_job.example()
    example.prepare(folder, n_sequences=200)
    example.train(
        folder, N_STEPS, on_batch=lambda step, tokens: found.update({step: tokens.tolist()})
    )
    return found


def tokens_of(folder: Path, job: str) -> dict[int, Tokens]:
    """Return the tokens of the steps of a job, those of all ranks joined."""
    records = []
    for path in folder.glob(f"{job}-*.jsonl"):
        records += [json.loads(line) for line in path.read_text().splitlines()]
    found: dict[int, Tokens] = {}
    for step, _, tokens in sorted(records):
        found.setdefault(step, []).extend(tokens)
    return found


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("seed", "world_sizes"), [(0, (1, 1)), (1, (2, 4, 1))], ids=str)
def test_killed_runs_have_the_tokens_of_one_run(
    programs: Programs, tmp_path: Path, seed: int, world_sizes: tuple[int, ...]
) -> None:
    whole = whole_run(tmp_path / "whole")
    mixture_job.example().prepare(tmp_path, n_sequences=200)
    kills = sorted(random.Random(seed).sample(range(N_STEPS), len(world_sizes) - 1))
    ends = [*kills, -1]
    jobs = [f"{n}:{killed_at}" for n, killed_at in zip(world_sizes, ends, strict=True)]
    environment = {**os.environ, **WITHOUT_A_NETWORK, "PYTHONPATH": str(mixture_job.ROOT)}
    program = Path(mixture_job.__file__)
    result = programs.run(program, tmp_path, N_STEPS, *jobs, environment=environment)
    assert result.returncode == 0, result.stderr
    begin = 0
    for job, killed_at in zip(jobs, ends, strict=True):
        found = tokens_of(tmp_path, job)
        end = killed_at + 1 if killed_at >= 0 else N_STEPS
        # The steps after the last checkpoint are repeated, and none is left out.
        assert list(found) == list(range(begin, end))
        assert found == {step: whole[step] for step in found}
        begin = killed_at // mixture_job.SAVE_EVERY * mixture_job.SAVE_EVERY

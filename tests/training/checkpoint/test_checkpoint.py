"""A resumed run equals one that was not interrupted."""

import json
import os
import pathlib
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.programs import Programs
from support.resumable_training import SAMPLES, SIZE, Training

import pinfeed
from pinfeed import HostEmbedding, checkpoint
from pinfeed.errors import ArgumentError, CheckpointError, StoreError


def assert_equal(one: Training, other: Training) -> None:
    assert len(one.result) == len(other.result) == 6
    for a, b in zip(one.result, other.result, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("depth", "generator"), [(0, False), (1, True), (3, False), (3, True)])
def test_a_resumed_run_equals_one_that_was_not_interrupted(
    tmp_path: pathlib.Path, depth: int, generator: bool
) -> None:
    whole = Training(depth=depth, generator=generator).run(3)
    for save_at in (1, 4, 9, 13, 18):
        path = tmp_path / f"step {save_at}"
        saved = Training(depth=depth, generator=generator).run(
            3, save_at=save_at, path=path, stop=True
        )
        assert saved.losses == whole.losses[:save_at]
        resumed = Training(depth=depth, generator=generator)
        # A new process has other generators.
        torch.manual_seed(99)
        np.random.seed(99)  # noqa: NPY002
        assert checkpoint.resume(path, **resumed.parts) == {"step": save_at}
        resumed.run(3)
        assert resumed.losses == whole.losses[save_at:], f"saved at step {save_at}"
        assert_equal(resumed, whole)


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("n", "drop_last"),
    [(3 * SIZE, False), (3 * SIZE, True), (3 * SIZE + 2, True), (2 * SIZE + 1, False)],
)
@pytest.mark.parametrize("depth", [0, 2])
def test_a_run_that_was_saved_in_the_last_batch_of_an_epoch(
    tmp_path: pathlib.Path, n: int, drop_last: bool, depth: int
) -> None:
    """The loader's own generator ends up where the epoch leaves it.

    This includes numbers that the loader draws at the request after the last batch.
    """
    options: dict[str, Any] = {"depth": depth, "generator": True, "n": n, "drop_last": drop_last}
    whole = Training(**options).run(3)
    Training(**options).run(3, save_at=3, path=tmp_path, stop=True)
    resumed = Training(**options)
    checkpoint.resume(tmp_path, **resumed.parts)
    assert resumed.batches.epoch == 1
    resumed.run(3)
    assert resumed.losses == whole.losses[3:]
    assert_equal(resumed, whole)


def test_saving_changes_nothing(tmp_path: pathlib.Path) -> None:
    whole = Training().run(2)
    saving = Training().run(2, save_at=5, path=tmp_path)
    assert saving.losses == whole.losses
    assert_equal(saving, whole)


def test_worker_processes(tmp_path: pathlib.Path) -> None:
    whole = Training(workers=1).run(1)
    Training(workers=1).run(1, save_at=3, path=tmp_path, stop=True)
    resumed = Training(workers=1)
    checkpoint.resume(tmp_path, **resumed.parts)
    assert resumed.run(1).losses == whole.losses[3:]


def test_a_table_in_a_file_returns_to_its_saved_rows(tmp_path: pathlib.Path) -> None:
    """The program that began a run resumes it: it makes the same table with the same path."""
    whole = Training().run(2)
    # The file is trained further after the save.
    saved = Training(path=tmp_path).run(1, save_at=4, path=tmp_path / "checkpoint")
    resumed = Training(path=tmp_path)
    checkpoint.resume(tmp_path / "checkpoint", **resumed.parts)
    assert_equal(resumed.run(2), whole)
    for training in (saved, resumed):
        training.table.close()
        training.rows.close()


def test_files_of_a_run_that_is_not_resumed_stay_as_they_are(
    tmp_path: pathlib.Path,
) -> None:
    before = Training(path=tmp_path).run(1)
    checkpoint.save(tmp_path / "checkpoint", **before.parts)
    before.table.close()
    before.rows.close()
    contents = {path.name: path.read_bytes() for path in tmp_path.glob("*.npy")}
    assert len(contents) == 4
    again = Training(path=tmp_path)
    told = (
        r"words\.npy existed before words was made, .*; "
        r"expected checkpoint\.resume, .* overwrite=True"
    )
    uses: list[Callable[[], object]] = [
        lambda: again.run(1),
        lambda: again.table.read([0]),
        lambda: again.table.eval()(torch.tensor([0])),
        lambda: again.table.export(tmp_path / "export"),
        lambda: again.table.to_embedding(),
        lambda: again.table.reset_parameters("ones"),
        lambda: checkpoint.save(tmp_path / "checkpoint", **again.parts),
    ]
    for use in uses:
        with pytest.raises(StoreError, match=told):
            use()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        checkpoint.resume(tmp_path / "nowhere", **again.parts)
    with pytest.raises(StoreError, match=told):
        again.run(1)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.npy")} == contents
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["00000001"]
    checkpoint.resume(tmp_path / "checkpoint", **again.parts)
    assert_equal(again.run(2), Training().run(2))
    again.table.close()
    again.rows.close()


def test_only_the_last_saves_are_kept(tmp_path: pathlib.Path) -> None:
    training = Training()
    for _ in range(4):
        last = checkpoint.save(tmp_path, keep=2, **training.parts)
    assert sorted(os.listdir(tmp_path)) == ["00000003", "00000004"]
    assert last.name == "00000004"
    checkpoint.save(tmp_path, **training.parts)
    assert os.listdir(tmp_path) == ["00000005"]


@pytest.mark.parametrize("keep", [2, 3, 5])
def test_so_many_saves_are_kept(tmp_path: pathlib.Path, keep: int) -> None:
    for i in range(8):
        checkpoint.save(tmp_path, keep=keep, i=i)
        assert [child.name for child in sorted(tmp_path.iterdir())] == [
            f"{n:08d}" for n in range(max(1, i + 2 - keep), i + 2)
        ]


def test_a_save_takes_the_memory_of_one_chunk(tmp_path: pathlib.Path) -> None:
    table = HostEmbedding(400_000, 64, init="zeros")  # 102 MB
    checkpoint.save(tmp_path, table=table)
    for work in (
        lambda: checkpoint.save(tmp_path, table=table),
        lambda: checkpoint.resume(tmp_path, table=table),
    ):
        tracemalloc.start()
        work()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 40 << 20, "one chunk of 16 MiB for the rows, one for the checksum"


RUNS = """
import os, pathlib, signal, sys
import torch._dynamo  # for the optimizers
sys.path.insert(0, {tests!r})
from support.programs import Programs
from support.resumable_training import Training
from pinfeed import checkpoint

def run(path, killed_after):
    training = Training()
    done = checkpoint.resume(path, **training.parts)["done"] if checkpoint.exists(path) else 0
    # The kernel ends the process at any point; 0 means never.
    signal.setitimer(signal.ITIMER_REAL, killed_after)
    for _ in range(training.batches.epoch, 5):
        for ids, y in training.batches:
            loss = ((training.model(training.table(ids).sum(1))[:, 0] - y) ** 2).mean()
            loss.backward()
            for optimizer in (training.rows, training.dense):
                optimizer.step()
                optimizer.zero_grad()
            training.scheduler.step()
            done += 1
            checkpoint.save(path, done=done, **training.parts)
    print("ended", done, [array.tobytes().hex() for array in training.result], flush=True)

for killed_after in [*map(float, sys.argv[2:]), 0]:
    # Each is a process of its own that need not import everything again.
    child = os.fork()
    if not child:
        run(pathlib.Path(sys.argv[1]), killed_after)
        os._exit(0)
    assert os.waitpid(child, 0)[1] in (0, signal.SIGALRM)
"""


def test_killed_at_any_moment(tmp_path: pathlib.Path, programs: Programs) -> None:
    """A run that saves at every step and is killed repeatedly ends like an undisturbed run."""
    program = RUNS.format(tests=str(pathlib.Path(__file__).parents[2]))
    # The result must be the same, whatever the signals interrupt.
    moments = np.random.default_rng(5).uniform(0.02, 0.3, 3).astype(str)
    done = programs.run(program, tmp_path / "checkpoint", *moments, timeout_s=100)
    assert done.returncode == 0, done.stderr
    n_done, result = done.stdout.rpartition("ended ")[2].split(" ", 1)
    assert int(n_done) == 5 * -(-SAMPLES // SIZE)
    assert result.strip() == str([array.tobytes().hex() for array in Training().run(5).result])


def test_the_manifest_names_everything(tmp_path: pathlib.Path) -> None:
    directory = checkpoint.save(tmp_path, **Training().parts)
    body = json.loads(json.loads((directory / "manifest.json").read_text())["body"])
    assert set(body["files"]) | {"manifest.json"} == set(os.listdir(directory))
    assert pinfeed.checkpoint.save is checkpoint.save


def test_a_file_is_no_directory(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ArgumentError, match="run' is a file; expected a directory"):
        checkpoint.save(tmp_path / "run", step=1)
    assert (tmp_path / "run").read_text() == "mine"

"""History of a training run: records, files, pictures; and the memory monitor."""

import gc
import json
import math
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from support.trainers import LOSS, N, loader, network, trainer_of

from pinfeed.compat.trainer import History, MemoryMonitor, Record, Trainer
from pinfeed.compat.trainer.recorder import Recorder
from pinfeed.errors import ArgumentError, DeviceError, MissingDependency


def record(kind: Any, batch: int | None, loss: float) -> Record:
    return Record(kind, 0, batch, loss, 1, 0.0, None, None, None)


def test_history_is_numbers(tmp_path: Path) -> None:
    with trainer_of() as trainer:
        history = trainer.train(2)
        trainer.evaluate(loader(), {"accuracy": lambda out, y: (out.argmax(1) == y).float().mean()})
    assert [(row.epoch, row.batch, row.samples) for row in history.batches] == [
        (e, b, s) for e in range(2) for b, s in enumerate([12, 12, 12, 8])
    ]
    for epoch in history.epochs:
        losses = [(row.loss, row.samples) for row in history.batches if row.epoch == epoch.epoch]
        assert epoch.loss == pytest.approx(sum(loss * n for loss, n in losses) / N)
        assert (
            epoch.seconds
            >= sum(row.seconds for row in history.batches if row.epoch == epoch.epoch)
            > 0
        )
    assert all(
        row.host_bytes > 1e6 and row.allocated_bytes is None and row.peak_bytes is None
        for row in history.rows
    )
    assert history.evaluations[0].epoch == 2
    assert not any(
        isinstance(value, torch.Tensor) for row in history.rows for value in vars(row).values()
    )
    for name in ("h.csv", "h.json"):
        history.save(tmp_path / name)
        assert History.load(tmp_path / name).rows == history.rows
    assert (
        json.loads((tmp_path / "h.json").read_text())[-1]["accuracy"]
        == history.evaluations[0].metrics["accuracy"]
    )
    history.draw(tmp_path / "h.png")
    assert (tmp_path / "h.png").stat().st_size > 10_000


def test_a_history_says_what_it_has() -> None:
    history = History()
    assert repr(history) == "<History: 0 epochs, 0 batches, 0 evaluations>"
    history.rows += [record(kind, batch, 0.5) for kind, batch in (("batch", 0), ("epoch", None))]
    assert (
        repr(history) == "<History: 1 epochs, 1 batches, 0 evaluations, last epoch with loss 0.5>"
    )


def test_invalid_uses_of_a_history_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History()
    with pytest.raises(
        ArgumentError, match=r"ends in '\.txt'; expected a path that ends in \.csv or \.json"
    ):
        history.save(tmp_path / "h.txt")
    with pytest.raises(ArgumentError, match="the history is empty"):
        history.draw(tmp_path / "h.png")
    (tmp_path / "other.csv").write_text("epoch,loss\n1,2\n")
    with pytest.raises(ArgumentError, match="row 0 has no 'kind'"):
        History.load(tmp_path / "other.csv")
    history.rows.append(record("batch", 0, math.nan))
    history.save(tmp_path / "h.csv")
    assert math.isnan(History.load(tmp_path / "h.csv").rows[0].loss)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(MissingDependency, match="matplotlib"):
        history.draw(tmp_path / "h.png")


def n_tensors() -> int:
    """Return the number of tensors in this process."""
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def test_losses_are_read_in_groups() -> None:
    recorder = Recorder(torch.device("cpu"))
    recorder.begin()
    n_before = n_tensors()
    for i in range(600):
        recorder.add(torch.tensor(float(i), dtype=torch.bfloat16 if i % 2 else torch.float32), 1)
    # An unread loss is a tensor and a view of it.
    assert n_tensors() - n_before < 2 * 100
    recorder.read()
    recorder.read()
    assert [found.loss for found in recorder.history.rows] == [
        float(torch.tensor(float(i), dtype=torch.bfloat16)) if i % 2 else i for i in range(600)
    ]


@pytest.mark.parametrize("path", [3, None, "h.csv"])
def test_invalid_paths_are_refused(path: Any, tmp_path: Path) -> None:
    with trainer_of() as trainer:
        trainer.train(1)
        with pytest.raises(
            ArgumentError,
            match=f"path={path!r}: expected the path of a picture, such as history.png",
        ):
            trainer.history.draw(path)
        if path != "h.csv":
            for save in (trainer.history.save, MemoryMonitor("cpu").save):
                with pytest.raises(
                    ArgumentError, match=f"path={path!r}: expected the path of a .csv or .json file"
                ):
                    save(path)


def test_memory_monitor(tmp_path: Path) -> None:
    monitor = MemoryMonitor("cpu")
    assert "anonymous" in str(monitor)
    monitor.snapshot("before")
    with mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        # A tensor might reuse the memory of an earlier one, so a new mapping is used.
        held.write(b"x" * len(held))
        after = monitor.snapshot("12")
        assert after.anonymous - monitor.snapshots[0].anonymous > 0.9 * len(held)
    assert after.allocated is after.reserved is after.free is after.total is None
    assert after.peak >= after.anonymous
    assert "12 " in str(monitor)
    for name in ("m.csv", "m.json"):
        monitor.save(tmp_path / name)
    assert [row["label"] for row in json.loads((tmp_path / "m.json").read_text())] == [
        "before",
        "12",
    ]
    assert (tmp_path / "m.csv").read_text().splitlines()[0].startswith("label,allocated,")
    if not torch.cuda.is_available():
        assert MemoryMonitor().snapshot().total is None
        with pytest.raises(DeviceError, match="machine has no GPU"):
            MemoryMonitor("cuda")


def test_losses_of_one_element() -> None:
    model = network()
    with Trainer(
        model,
        lambda outputs, targets: LOSS(outputs, targets).view(1),
        torch.optim.SGD(model.parameters(), lr=0.1),
        loader(),
    ) as trainer:
        trainer.train(1)
        assert isinstance(trainer.history.epochs[0].loss, float)

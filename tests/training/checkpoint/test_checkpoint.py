"""Checkpoints: a run that was saved, killed and resumed is the run that was not."""

import json
import os
import pathlib
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pinfeed
from pinfeed import HostEmbedding, RowOptimizer, checkpoint, train_rows
from pinfeed.errors import ArgumentError, CheckpointError, ClosedError, StoreError
from pinfeed.tensors.dtypes import BFLOAT16

N = 40
DIM = 6
SAMPLES = 60
SIZE = 7


class Training:
    """A run: tables, a dense model with dropout, optimizers, a scheduler, a shuffling loader."""

    def __init__(
        self,
        *,
        depth: int = 2,
        generator: bool = False,
        workers: int = 0,
        path: pathlib.Path | None = None,
        n: int = SAMPLES,
        drop_last: bool = False,
    ) -> None:
        torch.manual_seed(7)
        ids, y = torch.randint(0, N, (n, 3)), torch.randn(n)
        own = torch.Generator().manual_seed(3) if generator else None
        samples = TensorDataset(ids, y)
        self.loader = DataLoader(
            samples,
            batch_size=SIZE,
            shuffle=True,
            generator=own,
            num_workers=workers,
            drop_last=drop_last,
        )
        self.table = HostEmbedding(
            N, DIM, name="words", store=None if path is None else path / "words.npy"
        )
        self.rows = RowOptimizer(torch.optim.Adam, [self.table], lr=0.05, amsgrad=True)
        self.model = nn.Sequential(nn.Dropout(0.3), nn.Linear(DIM, 1))
        self.dense = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.rows, 5, 0.5)
        self.batches = train_rows(
            self.loader, {self.table: lambda batch: batch[0]}, optimizer=self.rows, depth=depth
        )
        self.losses: list[float] = []

    @property
    def parts(self) -> dict[str, Any]:
        return {
            "table": self.table,
            "rows": self.rows,
            "model": self.model,
            "dense": self.dense,
            "scheduler": self.scheduler,
            "batches": self.batches,
        }

    def run(
        self,
        until_epoch: int,
        *,
        save_at: int = -1,
        path: pathlib.Path | None = None,
        stop: bool = False,
    ) -> "Training":
        for _ in range(self.batches.epoch, until_epoch):
            for ids, y in self.batches:
                loss = ((self.model(self.table(ids).sum(1))[:, 0] - y) ** 2).mean()
                loss.backward()
                for optimizer in (self.rows, self.dense):
                    optimizer.step()
                    optimizer.zero_grad()
                self.scheduler.step()
                self.losses.append(loss.item())
                if len(self.losses) == save_at:
                    assert path is not None
                    checkpoint.save(path, step=save_at, **self.parts)
                    if stop:
                        return self
        return self

    @property
    def result(self) -> list[np.ndarray]:
        tables = next(iter(self.rows.tables.values())).stores
        stores = [self.table.store, *tables]
        found = []
        for store in stores:
            out = np.empty((store.n_rows, *store.row_shape), store.dtype)
            store.gather(np.arange(store.n_rows), out)
            found.append(out)
        return [*found, *(p.detach().numpy() for p in self.model.parameters())]


def assert_equal(one: Training, other: Training) -> None:
    assert len(one.result) == len(other.result) == 6
    for a, b in zip(one.result, other.result, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("save_at", [1, 4, 9, 13, 18])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("generator", [False, True])
def test_a_resumed_run_equals_one_that_was_not_interrupted(
    tmp_path: pathlib.Path, save_at: int, depth: int, generator: bool
) -> None:
    whole = Training(depth=depth, generator=generator).run(3)
    saved = Training(depth=depth, generator=generator).run(
        3, save_at=save_at, path=tmp_path, stop=True
    )
    assert saved.losses == whole.losses[:save_at]
    resumed = Training(depth=depth, generator=generator)
    # Another process's generators
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002
    assert checkpoint.resume(tmp_path, **resumed.parts) == {"step": save_at}
    resumed.run(3)
    assert resumed.losses == whole.losses[save_at:]
    assert_equal(resumed, whole)


@pytest.mark.parametrize(
    ("n", "drop_last"),
    [(3 * SIZE, False), (3 * SIZE, True), (3 * SIZE + 2, True), (2 * SIZE + 1, False)],
)
@pytest.mark.parametrize("depth", [0, 2])
def test_a_run_that_was_saved_in_the_last_batch_of_an_epoch(
    tmp_path: pathlib.Path, n: int, drop_last: bool, depth: int
) -> None:
    """The loader's own generator is where the epoch leaves it: what the loader draws when it is asked for its end counts as well."""
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


def test_a_table_in_a_file_goes_back_to_where_it_was_saved(tmp_path: pathlib.Path) -> None:
    """The program that resumes is the one that began: it makes the same table, with the same path."""
    whole = Training().run(2)
    # Goes on training the file after the save.
    saved = Training(path=tmp_path).run(1, save_at=4, path=tmp_path / "checkpoint")
    resumed = Training(path=tmp_path)
    checkpoint.resume(tmp_path / "checkpoint", **resumed.parts)
    assert_equal(resumed.run(2), whole)
    for training in (saved, resumed):
        training.table.close()
        training.rows.close()


def test_files_of_a_run_that_is_not_resumed_are_neither_used_nor_changed(
    tmp_path: pathlib.Path,
) -> None:
    before = Training(path=tmp_path).run(1)
    checkpoint.save(tmp_path / "checkpoint", **before.parts)
    before.table.close()
    before.rows.close()
    contents = {path.name: path.read_bytes() for path in tmp_path.glob("*.npy")}
    assert len(contents) == 4
    again = Training(path=tmp_path)
    told = r"words\.npy was there already when words was made, .*; expected checkpoint\.resume .* overwrite=True to begin anew"
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


@pytest.mark.parametrize("name", ["random", ".x", "a/b", "../x", ""])
def test_names_that_are_no_files(tmp_path: pathlib.Path, name: str) -> None:
    with pytest.raises(ArgumentError, match="expected a name that a variable may have"):
        checkpoint.save(tmp_path / "c", **{name: 1})
    assert not list(tmp_path.iterdir())


def test_numbers_of_numpy_are_saved_as_pythons(tmp_path: pathlib.Path) -> None:
    values = {
        "step": np.int64(3),
        "loss": np.float32(0.1),
        "done": np.bool_(True),
        "more": [np.uint8(1), {"a": np.float16(0.5)}],
    }
    checkpoint.save(tmp_path, **values)
    found = checkpoint.resume(tmp_path)
    assert found == {
        "step": 3,
        "loss": float(np.float32(0.1)),
        "done": True,
        "more": [1, {"a": 0.5}],
    }
    assert [type(found[name]) for name in ("step", "loss", "done")] == [int, float, bool]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (nn.Linear, r"x: Linear is a class; expected an object of it; give x=Linear\(\.\.\.\)"),
        (
            nn.Linear(1, 1).state_dict(),
            "x: a OrderedDict of tensors cannot be saved; .* give x=model, whose state_dict is saved",
        ),
        ({"a": torch.ones(1)}, "x: a dict of tensors cannot be saved"),
    ],
    ids=["class", "state_dict", "dict"],
)
def test_what_stands_for_a_module_is_refused(
    tmp_path: pathlib.Path, value: Any, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        checkpoint.save(tmp_path / "c", x=value)
    assert not (tmp_path / "c").exists()


def test_an_object_without_a_name(tmp_path: pathlib.Path) -> None:
    for function in (checkpoint.save, checkpoint.resume):
        with pytest.raises(
            ArgumentError,
            match=r"expected path alone; .* by name: \w+\(path, model=model, optimizer=optimizer\)",
        ):
            function(tmp_path / "c", nn.Linear(1, 1))  # type: ignore[operator]
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("path", [None, 3, b"c", ["c"]], ids=repr)
@pytest.mark.parametrize(
    "function", [checkpoint.save, checkpoint.resume, checkpoint.exists, checkpoint.check]
)
def test_a_directory_that_is_no_path(function: Any, path: Any) -> None:
    with pytest.raises(ArgumentError, match="expected a path, as a str or a"):
        function(path)


def test_one_save_in_place_of_the_directory(tmp_path: pathlib.Path) -> None:
    one = checkpoint.save(tmp_path / "c", step=1)
    for function in (checkpoint.resume, checkpoint.check):
        with pytest.raises(
            CheckpointError, match=f"00000001 is one save; .* give {str(tmp_path / 'c')!r}"
        ):
            function(one)


@pytest.mark.parametrize("value", [{1: 2}, [(1, 2)], {"a": {2: 3}}])
def test_values_that_would_come_back_as_others(tmp_path: pathlib.Path, value: object) -> None:
    with pytest.raises(ArgumentError, match="keys that are str"):
        checkpoint.save(tmp_path / "c", value=value)


TENSORS = {
    "a number": torch.tensor(3),
    "bfloat16": torch.arange(6.0).to(torch.bfloat16).view(2, 3),
    "part": torch.arange(1000.0)[10:12],
    "transposed": torch.arange(6).view(2, 3).T,
    "expanded": torch.ones(1, 3).expand(2, 3),
    "parameter": nn.Parameter(torch.ones(2)),
    "not a number": torch.tensor([float("nan"), -0.0]),
    "empty": torch.empty(0, 3),
    "conjugated": torch.tensor([1 + 2j]).conj(),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("given", [False, True])
def test_tensors_are_saved_exactly(tmp_path: pathlib.Path, name: str, given: bool) -> None:
    tensor = TENSORS[name]
    directory = checkpoint.save(tmp_path, step=tensor, n=3, model=nn.Linear(2, 2))
    assert (directory / "step.pt").stat().st_size < 4000, "the part that it is"
    other = {"step": torch.zeros(9)} if given else {}
    found = checkpoint.resume(tmp_path, model=nn.Linear(2, 2), **other)
    assert {name: type(value) for name, value in found.items()} == {"step": torch.Tensor, "n": int}
    assert found["step"].dtype == tensor.dtype
    torch.testing.assert_close(found["step"], tensor.detach(), rtol=0, atol=0, equal_nan=True)
    assert all((value == 0).all() for value in other.values()), "what is given is not changed"
    assert checkpoint.check(tmp_path)["objects"]["step"] == "tensor"


@pytest.mark.parametrize(
    "array",
    [
        np.array(2.5),
        np.arange(12.0).reshape(3, 4)[::-1, ::2],
        np.ones(3, BFLOAT16),
        np.array([True, False]),
        np.arange(3, dtype="u2"),
    ],
    ids=str,
)
def test_arrays_are_saved_exactly(tmp_path: pathlib.Path, array: np.ndarray) -> None:
    checkpoint.save(tmp_path, x=array)
    found = checkpoint.resume(tmp_path, x=array)["x"]
    assert (type(found), found.dtype, found.shape) == (np.ndarray, array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
        [torch.ones(2)],
        np.array(["a"]),
        np.ones(2, ">f4"),
        np.complex64(3),
        np.datetime64(3, "s"),
        (np.int64(3),),
        np.ma.masked_array([1]),
    ],
    ids=repr,
)
def test_tensors_and_arrays_that_cannot_be_saved(tmp_path: pathlib.Path, value: Any) -> None:
    with pytest.raises(
        ArgumentError,
        match=r"x: a .* cannot be saved; expected .* dense tensors and arrays of numbers",
    ):
        checkpoint.save(tmp_path / "c", x=value)
    assert not (tmp_path / "c").exists()


def test_a_tensor_of_a_checkpoint_that_is_damaged(tmp_path: pathlib.Path) -> None:
    table = HostEmbedding(4, 2, init="ones", name="table")
    directory = checkpoint.save(tmp_path, table=table, x=torch.ones(3))
    table.reset_parameters("zeros")
    sign(directory, lambda body: body["files"].pop("x.pt"))
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged: x.pt is not in it"):
        checkpoint.resume(tmp_path, table=table)
    torch.save({"no": "tensor"}, directory / "x.pt")
    sign(directory, lambda body: body["files"].update({"x.pt": of_file(directory / "x.pt")}))
    with pytest.raises(
        CheckpointError, match=r"x.pt is damaged: it has a dict, expected a dense tensor"
    ):
        checkpoint.resume(tmp_path, table=table)
    assert table.read(range(4)).tolist() == [[0, 0]] * 4


def of_file(path: pathlib.Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "crc32": [zlib.crc32(path.read_bytes())]}


def test_a_state_that_is_refused_leaves_the_rows_as_they_are(tmp_path: pathlib.Path) -> None:
    table = HostEmbedding(4, 2, init="ones", name="table")
    checkpoint.save(tmp_path, table=table, model=torch.nn.Linear(2, 2))
    table.reset_parameters("zeros")
    with pytest.raises(
        CheckpointError, match="model does not take over its state: RuntimeError: Error"
    ):
        checkpoint.resume(tmp_path, table=table, model=torch.nn.Linear(3, 2))
    assert table.read(range(4)).tolist() == [[0, 0]] * 4


def test_the_cause_is_told_where_an_object_refuses_its_state(tmp_path: pathlib.Path) -> None:
    class Refusing(Unsafe):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            raise MemoryError

    checkpoint.save(tmp_path, mine=Refusing())
    with pytest.raises(
        CheckpointError, match=r"mine does not take over its state: MemoryError$"
    ) as refusal:
        checkpoint.resume(tmp_path, mine=Refusing())
    assert isinstance(refusal.value.__cause__, MemoryError)


def sign(directory: pathlib.Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, with the checksum that it has then."""
    body = json.loads(json.loads((directory / "manifest.json").read_text())["body"])
    change(body)
    text = json.dumps(body)
    (directory / "manifest.json").write_text(
        json.dumps({"crc32": zlib.crc32(text.encode()), "body": text})
    )


def test_rows_that_the_manifest_does_not_list(tmp_path: pathlib.Path) -> None:
    table = HostEmbedding(4, 2, name="table")
    sign(checkpoint.save(tmp_path, table=table), lambda body: body["files"].pop("table.npy"))
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged: table.npy is not in it"):
        checkpoint.resume(tmp_path, table=table)


def test_a_manifest_with_checksums_that_are_none(tmp_path: pathlib.Path) -> None:
    sign(checkpoint.save(tmp_path), lambda body: body["files"]["random.pt"]["crc32"].append(None))
    with pytest.raises(
        CheckpointError, match=r"random.pt is damaged: its checksum is wrong in piece 1 of 1"
    ):
        checkpoint.check(tmp_path)


def test_rows_are_plain_npy_files(tmp_path: pathlib.Path) -> None:
    training = Training().run(1)
    directory = checkpoint.save(tmp_path, **training.parts)
    assert np.array_equal(np.load(directory / "table.npy"), training.result[0])
    assert np.array_equal(np.load(directory / "rows.0.exp_avg.npy"), training.result[1])
    training.table.export(tmp_path / "words.npy")
    assert np.array_equal(np.load(tmp_path / "words.npy"), training.result[0])
    assert torch.equal(training.table.to_embedding().weight, torch.from_numpy(training.result[0]))
    assert not [name for name in os.listdir(tmp_path) if "writing" in name]


@pytest.mark.parametrize(
    "name",
    ["table.npy", "rows.0.max_exp_avg_sq.npy", "rows.pt", "model.pt", "random.pt", "manifest.json"],
)
@pytest.mark.parametrize("damage", ["a bit", "cut", "gone", "longer"])
def test_a_damaged_file_is_named_and_nothing_is_changed(
    tmp_path: pathlib.Path, name: str, damage: str
) -> None:
    training = Training().run(1)
    path = checkpoint.save(tmp_path, **training.parts) / name
    data = path.read_bytes()
    at = len(data) - 9
    changed = {
        "a bit": data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :],
        "cut": data[:-5],
        "longer": data + b"\0",
    }
    path.unlink()
    if damage in changed:
        path.write_bytes(changed[damage])
    other = Training()
    before, generator = other.result, torch.get_rng_state()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        checkpoint.resume(tmp_path, **other.parts)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before, other.result, strict=True))
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_file_is_never_looked_for_outside(tmp_path: pathlib.Path) -> None:
    directory = checkpoint.save(tmp_path, **Training().parts)
    (tmp_path / "elsewhere.npy").write_bytes((directory / "table.npy").read_bytes())
    (directory / "table.npy").unlink()
    (directory / "table.npy").symlink_to(tmp_path / "elsewhere.npy")
    with pytest.raises(CheckpointError, match=r"table\.npy cannot be read"):
        checkpoint.resume(tmp_path, **Training().parts)


def test_other_objects_are_refused(tmp_path: pathlib.Path) -> None:
    training = Training()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        checkpoint.resume(tmp_path / "nowhere", **training.parts)
    assert not checkpoint.exists(tmp_path)
    checkpoint.save(tmp_path, **training.parts)
    assert checkpoint.exists(tmp_path)
    with pytest.raises(
        CheckpointError,
        match="has batches, dense, model, rows, scheduler, table; resume was given table",
    ):
        checkpoint.resume(tmp_path, table=training.table)
    wrong = {**training.parts, "table": HostEmbedding(N, DIM + 1)}
    with pytest.raises(
        CheckpointError, match=r"table\.npy has shape \(40, 6\), float32; expected \(40, 7\)"
    ):
        checkpoint.resume(tmp_path, **wrong)
    with pytest.raises(ArgumentError, match="x: a object cannot be saved"):
        checkpoint.save(tmp_path, x=object())
    with pytest.raises(ArgumentError, match="besides tensors and plain values"):
        checkpoint.save(tmp_path, x=Unsafe())
    assert len(os.listdir(tmp_path)) == 1, "a refused save leaves nothing behind"
    iterator = iter(training.batches)
    next(iterator)
    with pytest.raises(ClosedError, match="a loop over rows of words is running"):
        checkpoint.resume(tmp_path, **training.parts)
    training.batches.close()


class Unsafe:
    def state_dict(self) -> dict[str, Any]:
        return {"a": pathlib.Path("x")}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def test_memory_is_one_piece(tmp_path: pathlib.Path) -> None:
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
        assert peak < 40 << 20, "one piece of 16 MiB for the rows, one for the checksum"


RUNS = """
import os, pathlib, signal, sys
sys.path.insert(0, {tests!r})
from test_checkpoint import Training
from pinfeed import checkpoint

def run(path, killed_after):
    training = Training()
    done = checkpoint.resume(path, **training.parts)["done"] if checkpoint.exists(path) else 0
    signal.setitimer(signal.ITIMER_REAL, killed_after)  # the kernel ends the process, wherever it is; 0 is never
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
    child = os.fork()  # a process of its own for each, that need not import everything again
    if not child:
        run(pathlib.Path(sys.argv[1]), killed_after)
        os._exit(0)
    assert os.waitpid(child, 0)[1] in (0, signal.SIGALRM)
"""


def test_killed_at_any_moment(tmp_path: pathlib.Path) -> None:
    """A run that saves at every step is killed again and again, and ends as one that was not."""
    script = tmp_path / "runs.py"
    script.write_text(RUNS.format(tests=str(pathlib.Path(__file__).parent)))
    # Whatever they hit, the end must be the same.
    moments = np.random.default_rng(5).uniform(0.02, 0.3, 3).astype(str)
    done = subprocess.run(
        [sys.executable, script, tmp_path / "checkpoint", *moments],
        capture_output=True, text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    n_done, result = done.stdout.rpartition("ended ")[2].split(" ", 1)
    assert int(n_done) == 5 * -(-SAMPLES // SIZE)
    assert result.strip() == str([array.tobytes().hex() for array in Training().run(5).result])


def test_the_manifest_names_everything(tmp_path: pathlib.Path) -> None:
    directory = checkpoint.save(tmp_path, **Training().parts)
    body = json.loads(json.loads((directory / "manifest.json").read_text())["body"])
    assert set(body["files"]) | {"manifest.json"} == set(os.listdir(directory))
    assert pinfeed.checkpoint is checkpoint


def test_a_file_is_no_directory(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ArgumentError, match="run' is a file; expected a directory"):
        checkpoint.save(tmp_path / "run", step=1)
    assert (tmp_path / "run").read_text() == "mine"

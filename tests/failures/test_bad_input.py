"""What bad input, and bad luck, gets: an error that says what to do, before anything is changed; and nothing stays behind."""

import logging
import re
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pinfeed import (
    ArrayStore,
    Config,
    Feeder,
    HostEmbedding,
    MiB,
    MmapStore,
    Ranks,
    errors,
    rows,
    train_rows,
    wrap_loader,
    wrap_readers,
)

DEPTHS = [0, 1, 3]


@pytest.fixture
def x() -> np.ndarray:
    return np.arange(100 * 3, dtype=np.float32).reshape(100, 3)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({}, errors.ArgumentError, "neither batch_size nor config"),
        (
            {"batch_size": 0},
            errors.ArgumentError,
            "batch_size=0: expected a whole number, at least 1",
        ),
        ({"batch_size": 2.5}, errors.ArgumentError, "batch_size=2.5: expected a whole number"),
        (
            {"batch_size": 2, "depth": 1.5},
            errors.ArgumentError,
            "depth=1.5: expected a whole number",
        ),
        ({"config": 5}, errors.ArgumentError, "config=5: expected a pinfeed.Config"),
        ({"batch_size": 2, "rows": 5}, errors.ArgumentError, "rows=5: expected an order"),
        ({"batch_size": 3, "config": Config()}, errors.ArgumentError, "both batch_size and config"),
        ({"batch_size": 3, "depth": -1}, errors.ArgumentError, "depth=-1"),
        (
            {"batch_size": 3, "rows": rows.sequential(), "shuffle": True},
            errors.ArgumentError,
            "both rows and shuffle",
        ),
        (
            {"batch_size": 3, "rows": [[1], [2]]},
            errors.ArgumentError,
            "whole batches and batch_size",
        ),
        ({"rows": [1, 2]}, errors.ArgumentError, "give batch_size="),
        (
            {"batch_size": 3, "rows": np.zeros((4, 2))},
            errors.RowIndexError,
            "rows: got ndarray of float64; expected an order of",
        ),
        (
            {"batch_size": 3, "rows": ["1", "2"]},
            errors.RowIndexError,
            "rows: got list of <U1; expected an order of",
        ),
        (
            {"batch_size": 3, "rows": lambda: [1]},
            errors.ArgumentError,
            "row numbers; give what the function returns$",
        ),
        (
            {"batch_size": 3, "rows": rows.shuffled},
            errors.ArgumentError,
            r"call it: rows=pinfeed.rows.shuffled\(\.\.\.\)$",
        ),
        (
            {"batch_size": 3, "rows": rows.block_shuffled},
            errors.ArgumentError,
            r"call it: rows=pinfeed.rows.block_shuffled\(\.\.\.\)$",
        ),
        ({"rows": []}, errors.ArgumentError, "rows is empty"),
        (
            {"rows": [[1, 100]]},
            errors.RowIndexError,
            "batch 0 of rows: row 100 is out of range; expected 0 <= row < 100",
        ),
        ({"rows": [[1], [-1]]}, errors.RowIndexError, "batch 1 of rows: row -1"),
        ({"rows": [[1.5]]}, errors.RowIndexError, "float64"),
        ({"rows": np.ones(100, bool), "batch_size": 3}, errors.RowIndexError, "bool"),
        ({"rows": np.array([5, 200]), "batch_size": 3}, errors.RowIndexError, "row 200"),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value)),
)
def test_arguments_that_cannot_be(
    x: np.ndarray, arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        Feeder(x, **arguments)


def test_sources_of_unequal_length(x: np.ndarray) -> None:
    with pytest.raises(errors.StoreError, match=r"source\['a'\] has 100, source\['b'\] has 99"):
        Feeder({"a": x, "b": x[:99]}, batch_size=3)


def test_sources_that_are_none(x: np.ndarray, tmp_path: Path) -> None:
    for source, message in [
        ((), "no arrays"),
        ({"a": None}, "got NoneType"),
        ((x, 3), r"source\[1\]: got int"),
    ]:
        with pytest.raises(errors.StoreError, match=message):
            Feeder(source, batch_size=3)
    with pytest.raises(FileNotFoundError, match="no such file"):
        Feeder(str(tmp_path / "none.npy"), batch_size=3)


def test_a_store_of_ones_own_that_says_impossible_things() -> None:
    for said, message in [
        ({"n_rows": 0}, "n_rows=0"),
        ({"dtype": np.dtype(">f4")}, "byte order"),
        ({"dtype": np.dtype("U3")}, "no torch"),
    ]:
        store = ArrayStore(np.zeros(3))
        with pytest.raises(errors.StoreError, match=message):
            Feeder(type("Odd", (ArrayStore,), said)(store.array), batch_size=1)


def test_states_that_cannot_be(x: np.ndarray) -> None:
    with Feeder(x, batch_size=10) as feeder:
        state = feeder.state_dict()
        for wrong in ({"batch": 11}, {"batch": -1}, {"epoch": -1}):
            with pytest.raises(errors.ArgumentError, match="an epoch has 10 batches"):
                feeder.load_state_dict(state | wrong)
        with pytest.raises(errors.ArgumentError, match="expected a whole number"):
            feeder.set_epoch("a")  # type: ignore[arg-type]


def test_row_numbers_out_of_range_come_after_the_good_batches(x: np.ndarray) -> None:
    def sampler() -> Iterator[int]:
        yield from [1, 2, 3, 4, 100]

    with Feeder(x, rows=sampler(), batch_size=2) as feeder:
        loop = iter(feeder)
        assert [len(next(loop)), len(next(loop))] == [2, 2]
        with pytest.raises(errors.RowIndexError, match="row 100"):
            next(loop)


# ---- write_back ----------------------------------------------------------------------------------


def first(feeder: Feeder) -> Any:
    return next(iter(feeder.batches()))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(2, 3), r"shape \(2, 3\), expected \(4, 3\)"),
        (
            torch.zeros(4, 3, dtype=torch.float64),
            r"dtype \(convert with \.to\(\)\) float64, expected float32",
        ),
        (torch.zeros(4, 3, device="meta"), "device meta, expected cpu"),
        (
            np.zeros((4, 3), np.float32),
            r"got ndarray; expected .* dtype float32 on cpu; give torch\.as_tensor\(array, device='cpu'\)",
        ),
        (
            torch.eye(4, 3).to_sparse(),
            r"got Tensor of layout torch\.sparse_coo; expected a dense tensor of shape \(4, 3\)",
        ),
        (
            torch.nested.as_nested_tensor([torch.zeros(3)] * 4, layout=torch.jagged),
            "got NestedTensor of layout torch.jagged; expected a dense",
        ),
        (
            5,
            r"write_back of source: got int; expected a dense tensor of shape \(4, 3\) and dtype float32 on cpu",
        ),
        (
            (torch.zeros(4, 3),),
            r"write_back of a tuple; expected a dense tensor of shape \(4, 3\) and dtype float32 on cpu$",
        ),
        (
            {"x": torch.zeros(4, 3)},
            r"write_back of a dict; expected a dense tensor of shape \(4, 3\) and dtype float32 on cpu$",
        ),
        (
            None,
            r"write_back of None; expected a dense tensor of shape \(4, 3\) and dtype float32 on cpu; rows that stay as they are need no",
        ),
    ],
    ids=str,
)
def test_values_that_do_not_fit(x: np.ndarray, values: Any, message: str) -> None:
    kept = x.copy()
    with Feeder(x, batch_size=4, device="cpu") as feeder:
        loop = feeder.batches()
        batch = next(loop)
        with pytest.raises(errors.WriteBackError, match=message):
            batch.write_back(values)
        # Nothing had been written: it still can be.
        batch.write_back(batch.data)
        del loop
    np.testing.assert_array_equal(x, kept)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"x": None},
            r"write_back of a dict without \['y'\]; expected a dense tensor of shape \(4, 3\) .* for source\['x'\] and",
        ),
        (
            {"x": None, "z": None},
            r"a dict without \['y'\] and with \['z'\], which the source does not have; expected",
        ),
        (
            (None, None),
            r"a tuple without \['x'\], \['y'\] and with \[0\], \[1\], which the source does not have; expected",
        ),
        (torch.zeros(4, 3), r"write_back of a Tensor without \['x'\], \['y'\]; expected"),
        (
            None,
            r"write_back of None; expected .*float32 on cpu for source\['x'\] and a dense tensor of shape \(4,\) and dtype int64",
        ),
        (
            {"x": None, "y": torch.zeros(4)},
            r"source\['y'\]: dtype \(convert with \.to\(\)\) float32, expected int64",
        ),
    ],
    ids=str,
)
def test_values_of_another_structure(x: np.ndarray, values: Any, message: str) -> None:
    with Feeder({"x": x, "y": np.zeros(100, np.int64)}, batch_size=4, device="cpu") as feeder:
        batch = next(loop := feeder.batches())
        with pytest.raises(errors.WriteBackError, match=message):
            batch.write_back(values)
        # Nothing had been written: it still can be.
        batch.write_back({"x": batch.data["x"] + 1, "y": None})
        del loop
    assert x[3, 2] == 12


def test_a_list_is_written_in_the_place_of_a_tuple(x: np.ndarray) -> None:
    with Feeder((x, np.zeros(100)), batch_size=50, device="cpu") as feeder:
        for batch in feeder.batches():
            batch.write_back([batch.data[0] + 1, None])
    assert x[99, 2] == 300


def test_write_back_to_a_read_only_store(x: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", x)
    x.flags.writeable = False
    for source in (x, tmp_path / "x.npy", MmapStore(tmp_path / "x.npy")):
        with Feeder(source, batch_size=4) as feeder:
            loop = feeder.batches()
            batch = next(loop)
            with pytest.raises(
                errors.WriteBackError,
                match=r'read-only; open a file with MmapStore\(path, mode="r\+"\)',
            ):
                batch.write_back(batch.data)
            del loop


def test_write_back_of_repeated_rows(x: np.ndarray) -> None:
    kept = x.copy()
    with Feeder(x, rows=[[3, 5, 3]]) as feeder:
        loop = feeder.batches()
        batch = next(loop)
        with pytest.raises(errors.WriteBackError, match="row 3 stands more than once"):
            batch.write_back(batch.data + 1)
        del loop
    np.testing.assert_array_equal(x, kept)


def test_write_back_too_late_or_twice(x: np.ndarray) -> None:
    with Feeder(x, batch_size=4) as feeder:
        loop = feeder.batches()
        one, two = next(loop), next(loop)
        with pytest.raises(errors.WriteBackError, match="after the next batch was taken"):
            one.write_back(one.data)
        two.write_back(two.data)
        with pytest.raises(errors.WriteBackError, match="called for this batch before"):
            two.write_back(two.data)
        del loop
        with pytest.raises(errors.WriteBackError, match="after the loop"):
            two.write_back(two.data)


def test_write_back_to_rows_that_are_given_twice(x: np.ndarray, tmp_path: Path) -> None:
    """A write to one would not be seen in the other, which was prefetched."""
    np.save(tmp_path / "x.npy", x)
    file = MmapStore(tmp_path / "x.npy", mode="r+")
    for source in ((x, x), (x, ArrayStore(x[:, 1:])), (file, MmapStore(tmp_path / "x.npy"))):
        with Feeder(source, batch_size=4) as feeder:
            loop = feeder.batches()
            batch = next(loop)
            with pytest.raises(
                errors.WriteBackError, match=r"source\[0\] and source\[1\] have rows in common"
            ):
                batch.write_back((batch.data[0], None))
            del loop
    with Feeder((x[:, :1], x[:, 1:]), batch_size=4) as feeder:
        # Columns of one array have no memory in common.
        for batch in feeder.batches():
            batch.write_back((batch.data[0] + 1, batch.data[1]))
    file.close()
    with pytest.raises(errors.ArgumentError, match="stands twice"):
        MmapStore([tmp_path / "x.npy"] * 2, mode="r+")


def test_write_back_of_a_dict_in_another_order(x: np.ndarray) -> None:
    y = x * 2
    with Feeder({"x": x, "y": y}, batch_size=50) as feeder:
        for batch in feeder.batches():
            batch.write_back({"y": batch.data["y"] + 1, "x": None})
    np.testing.assert_array_equal(y, x * 2 + 1)


# ---- errors of what the loop depends on ----------------------------------------------------------


class Flaky(ArrayStore):
    """Fails when it is asked for a certain row."""

    def __init__(
        self, array: np.ndarray, error: BaseException, *, gather: int = -1, scatter: int = -1
    ) -> None:
        super().__init__(array)
        self._error = error
        self._bad_gather = gather
        self._bad_scatter = scatter

    def gather(self, rows: np.ndarray, out: np.ndarray) -> None:
        if self._bad_gather in rows:
            self.raise_it()
        super().gather(rows, out)

    def scatter(self, rows: np.ndarray, values: np.ndarray) -> None:
        if self._bad_scatter in rows:
            self.raise_it()
        super().scatter(rows, values)

    def raise_it(self) -> None:
        raise self._error


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_error_of_a_store_comes_after_the_good_batches_with_its_traceback(
    x: np.ndarray, depth: int
) -> None:
    with Feeder(
        Flaky(x, ValueError("disk on fire"), gather=25), batch_size=10, depth=depth
    ) as feeder:
        loop = iter(feeder)
        assert [next(loop)[0, 0].item() for _ in range(2)] == [0, 30]
        with pytest.raises(ValueError, match="disk on fire") as caught:
            next(loop)
        assert "raise_it" in "".join(traceback.format_tb(caught.value.__traceback__))
        assert next(loop, None) is None
        # The feeder itself is whole.
        assert len(next(iter(feeder))) == 10


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "error", [StopIteration("x"), SystemExit(0), GeneratorExit(), StopAsyncIteration()], ids=repr
)
def test_what_would_end_the_loop_in_silence_is_an_error(
    x: np.ndarray, depth: int, error: BaseException
) -> None:
    with Feeder(Flaky(x, error, gather=25), batch_size=10, depth=depth) as feeder:
        loop = iter(feeder)
        assert [len(next(loop)) for _ in range(2)] == [10, 10]
        with pytest.raises(errors.WorkerError, match=r"raise_it .*in silence") as caught:
            next(loop)
        assert isinstance(caught.value.__cause__, type(error))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("error", [StopIteration("x"), SystemExit(0), KeyError("x")], ids=repr)
def test_an_error_of_a_sampler(x: np.ndarray, depth: int, error: BaseException) -> None:
    class Sampler:
        def __iter__(self) -> Iterator[list[int]]:
            yield [1]
            yield [self.number()]

        def number(self) -> int:
            raise error

    with Feeder(x, rows=Sampler(), depth=depth) as feeder:
        loop = iter(feeder)
        assert len(next(loop)) == 1
        with pytest.raises(
            KeyError if isinstance(error, KeyError) else errors.WorkerError
        ) as caught:
            next(loop)
        assert caught.value is error or caught.value.__cause__ is error


def test_a_sampler_that_ends_early(x: np.ndarray) -> None:
    class Sampler:
        def __len__(self) -> int:
            return 10

        def __iter__(self) -> Iterator[int]:
            return iter([1, 2, 3])

    with Feeder(x, rows=Sampler(), batch_size=1) as feeder:
        loop = iter(feeder)
        assert [len(next(loop)) for _ in range(3)] == [1, 1, 1]
        with pytest.raises(errors.WorkerError, match="promised 10 batches"):
            next(loop)


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_error_of_a_write_back_reaches_the_loop_and_no_later_write_overtakes_it(
    depth: int,
) -> None:
    table = np.zeros((100, 2))
    with Feeder(
        Flaky(table, OSError(28, "No space left"), scatter=25), batch_size=10, depth=depth
    ) as feeder:
        with pytest.raises(OSError, match="No space left") as caught:
            for batch in feeder.batches():
                batch.write_back(batch.data + 1)
        assert "raise_it" in "".join(traceback.format_tb(caught.value.__traceback__))
        assert table[:20].all()
        assert not table[20:].any()
        # The error was raised: once is enough.
        feeder.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_an_error_of_the_last_write_back_is_raised_when_the_loop_was_left(depth: int) -> None:
    table = np.zeros((100, 2))
    feeder = Feeder(
        Flaky(table, OSError(28, "No space left"), scatter=5), batch_size=10, depth=depth
    )
    for batch in feeder.batches():
        batch.write_back(batch.data + 1)
        break
    with pytest.raises(OSError, match="No space left"):
        feeder.close()
    feeder.close()


def test_a_file_that_shrinks_while_it_is_streamed(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.ones((10_000, 100)))
    with Feeder(path, batch_size=100) as feeder, pytest.raises(errors.ReadError, match="shrunk"):
        for i, batch in enumerate(feeder):
            assert batch.all()
            if i == 3:
                with path.open("r+b") as file:
                    file.truncate(100_000)


# ---- Ctrl-C --------------------------------------------------------------------------------------

PROGRAM = """
    import sys, time, numpy as np, threading, pinfeed
    from pinfeed import ArrayStore

    class Slow(ArrayStore):
        calls = 0

        def gather(self, rows, out):
            self.calls += 1
            if {slow} and self.calls > 1:
                if self.calls == 3:
                    print("ready", flush=True)
                time.sleep(0.5)
            super().gather(rows, out)

    table = np.zeros((2, 256 << 20), np.uint8) if {slow} else np.zeros((1000, 2))
    store = Slow(table.reshape(-1, 4096) if {slow} else table)
    feeder = pinfeed.Feeder(store, batch_size={batch_size}, depth={depth})
    try:
        while True:
            for batch in feeder:
                if not {slow}:
                    print("ready", flush=True)
                time.sleep(0.01)
    except KeyboardInterrupt:
        feeder.close()
        left = [t.name for t in threading.enumerate() if t.name.startswith("pinfeed")]
        print("interrupted", left, "#", store.calls, flush=True)
"""


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("slow", [False, True], ids=["in the body", "in a large batch"])
def test_ctrl_c_ends_a_loop_at_once(depth: int, slow: bool) -> None:
    """A batch of 256 MiB is gathered in sixteen steps, half a second each here; the loop does not wait for the last one."""
    program = textwrap.dedent(
        PROGRAM.format(depth=depth, slow=slow, batch_size=1 << 16 if slow else 10)
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    left, n_steps = out.rpartition("interrupted ")[2].split("#")
    assert left == "[] "
    assert not slow or int(n_steps) < 16, "the steps before the signal, and the one that it came in"
    assert process.returncode == 0


def test_the_interpreter_can_end_with_a_live_feeder() -> None:
    program = "import numpy as np, pinfeed; f = pinfeed.Feeder(np.zeros((1000, 2)), batch_size=2); i = iter(f); next(i); print('end')"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_import_is_quick_and_loads_no_framework() -> None:
    program = "import sys, pinfeed; print([m for m in ('torch', 'cupy', 'tqdm', 'matplotlib') if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
        ).stdout
        == "[]\n"
    )


def test_public_names_are_sorted_and_there() -> None:
    import pinfeed

    assert sorted(pinfeed.__all__) == pinfeed.__all__
    assert all(hasattr(pinfeed, name) for name in pinfeed.__all__)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows": "shuffled"}, "rows='shuffled': expected an order"),
        ({"rows": rows.block_shuffled}, r"call it: rows=pinfeed\.rows\.block_shuffled\("),
        ({"shuffle": "False"}, "shuffle='False': expected True or False"),
        ({"device": "gpu"}, "device='gpu' is not a device; expected 'auto', 'cpu'"),
    ],
)
def test_words_in_the_place_of_objects(options: dict[str, Any], words: str) -> None:
    with pytest.raises((errors.ArgumentError, errors.DeviceError), match=words):
        Feeder(np.zeros((8, 2)), batch_size=4, **options)


def test_paths_of_shards_are_no_parallel_sources(tmp_path: Path) -> None:
    for i in (1, 2):
        np.save(tmp_path / f"{i}.npy", np.zeros((i, 2)))
    with pytest.raises(
        errors.StoreError, match=r"unequal numbers of rows: .*; shards of one source are a pattern"
    ):
        Feeder([str(tmp_path / "1.npy"), str(tmp_path / "2.npy")], batch_size=1)


def test_a_list_of_files_that_are_alike_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = [str(tmp_path / f"part-{i}.npy") for i in range(4)]
    for file in files:
        np.save(file, np.zeros((5, 2)))
    for source in (files[:2], files[:2], {"x": (files, np.zeros(5))}):
        with Feeder(source, batch_size=5, device="cpu") as feeder:
            list(feeder)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2
    assert said[0] == (
        f"source=[{files[0]!r}, {files[1]!r}] is a list of 2 files with equally many rows of one shape and dtype, and each batch is a list "
        "of 2 tensors, one of each file; if the files are shards of one source, give MmapStore([...]) or a pattern; if they belong side by "
        "side, give a tuple, of which there is no warning"
    )
    assert said[1].startswith(f"source=[{files[0]!r}, {files[1]!r}, ...] is a list of 4 files")


def test_sources_side_by_side_are_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, dtype in (("a-0", "f4"), ("a-1", "f4"), ("b-0", "f4"), ("b-1", "f4"), ("c-0", "i4")):
        np.save(tmp_path / f"{name}.npy", np.zeros((5, 2), dtype))
    at = {path.stem: str(path) for path in tmp_path.iterdir()}
    with MmapStore(at["a-0"]) as one, MmapStore(at["a-1"]) as other:
        for source in (
            (at["a-0"], at["a-1"]),
            [at["a-0"], at["c-0"]],
            [at["a-0"], np.zeros((5, 2), "f4")],
            [str(tmp_path / "a-*.npy"), str(tmp_path / "b-*.npy")],
            {"x": at["a-0"], "y": at["a-1"]},
            [one, other],
        ):
            with Feeder(source, batch_size=5, device="cpu") as feeder:
                list(feeder)
    assert not [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_path_is_no_loader() -> None:
    with pytest.raises(errors.ArgumentError, match=r"a file is streamed by pinfeed\.Feeder\(path"):
        wrap_loader("x.npy")


def test_sizes_are_numbers() -> None:
    with pytest.raises(errors.ArgumentError, match=r"MiB\('64'\): expected a number"):
        MiB("64")  # type: ignore[arg-type]


def test_an_epoch_of_nothing_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with Feeder(np.zeros((8, 2)), batch_size=9, drop_last=True) as feeder:
        assert list(feeder) == []
    assert "drop_last=True leaves no batch: 8 rows, batches of 9" in caplog.text


NO_BATCH: list[Any] = [
    (
        {"ranks": Ranks("drop", rank=0, world_size=1000)},
        "rank 0 of 1000 has no batch: 0 of 8 {}, batches of 2; lower world_size",
    ),
    (
        {"ranks": Ranks("join", rank=9, world_size=10)},
        "rank 9 of 10 has no batch: 0 of 8 {}, batches of 2; lower world_size",
    ),
    (
        {"ranks": Ranks("drop", rank=1, world_size=8), "drop_last": True},
        "rank 1 of 8 has no batch: 1 of 8 {}, batches of 2, drop_last=True; lower world_size",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), NO_BATCH)
def test_ranks_that_have_nothing_are_told_of(
    arguments: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Feeder(np.zeros((8, 2)), batch_size=2, **arguments) as feeder:
        assert list(feeder) == []
    functions: dict[str, Any] = {"read_input": lambda i: [i], "get_output": lambda i: [i]}
    with wrap_readers(range(8), range(8), batch_size=2, **functions, **arguments) as reader:
        assert list(reader) == []
    wanted = [message.format("rows"), message.format("identities")]
    assert [said[: len(one)] for said, one in zip(caplog.messages, wanted, strict=True)] == wanted


def test_ranks_that_have_a_batch_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with Feeder(
        np.zeros((8, 2)), batch_size=2, ranks=Ranks("join", rank=7, world_size=8)
    ) as feeder:
        assert [len(batch) for batch in feeder] == [1]
    assert caplog.messages == []


@pytest.mark.parametrize(
    "arguments",
    [{}, {"shuffle": True, "depth": 0}, {"ranks": Ranks(rank=0, world_size=2)}],
    ids=str,
)
def test_no_identities_are_told_of(
    arguments: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with wrap_readers(
        [], [], read_input=lambda i: [i], get_output=lambda i: [i], batch_size=2, **arguments
    ) as reader:
        assert list(reader) == []
    assert caplog.messages == [
        "there are no identities, so that epochs have no batch; give at least one"
    ]


# ---- loaders that give no batches ----------------------------------------------------------------


class _Items(Dataset[Any]):
    def __getitem__(self, i: int) -> Any:
        return torch.zeros(2)


NO_LOADERS: list[Any] = [
    (
        {"x": torch.zeros(2, 3)},
        "loader is a dict, and iterating it gives its keys or columns; expected a DataLoader",
    ),
    (
        pyarrow.table({"x": [1, 2]}),
        "loader is a Table, and iterating it gives its keys or columns; expected a DataLoader",
    ),
    (
        torch.zeros(2, 3),
        "loader is a Tensor, and iterating it gives single samples; expected a DataLoader",
    ),
    (
        np.zeros((2, 3)),
        r"single samples; expected a DataLoader .*; give DataLoader\(dataset, batch_size=\.\.\.\), or let pinfeed.Feeder",
    ),
    (
        TensorDataset(torch.zeros(2, 3)),
        "loader is a TensorDataset, a Dataset, which gives single samples; expected a DataLoader",
    ),
    (
        _Items(),
        r"loader is a _Items, a Dataset, .*; give DataLoader\(dataset, batch_size=\.\.\.\), or batch_size=None where each",
    ),
]


@pytest.mark.parametrize(("loader", "message"), NO_LOADERS, ids=lambda value: type(value).__name__)
def test_what_gives_no_batches_is_no_loader(loader: Any, message: str) -> None:
    with pytest.raises(errors.ArgumentError, match=message):
        wrap_loader(loader, device="cpu")
    with pytest.raises(errors.ArgumentError, match=message):
        train_rows(loader, {HostEmbedding(4, 2): lambda batch: batch}, device="cpu")


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.ones(2)


class _Own(_Items):
    shape = (1, 2)

    def __iter__(self) -> Iterator[Any]:
        yield torch.ones(2)


@pytest.mark.parametrize(
    "make",
    [lambda: [torch.ones(2)], lambda: iter([torch.ones(2)]), _Stream, _Own],
    ids=["list", "iterator", "stream", "its own iteration"],
)
def test_other_iterables_are_loaders(make: Any) -> None:
    with wrap_loader(make(), device="cpu") as loader:
        assert [batch.tolist() for batch in loader] == [[1, 1]]


# ---- write_back in worker processes --------------------------------------------------------------


class _Writing(IterableDataset[Any]):
    """Adds 1 to all rows of a source, and writes down what pinfeed logs."""

    def __init__(self, log: Path, source: Any) -> None:
        self._log = log
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        logging.getLogger("pinfeed").addHandler(logging.FileHandler(self._log))
        with Feeder(self._source, batch_size=2, device="cpu") as feeder:
            for batch in feeder.batches():
                batch.write_back(batch.data + 1)
                yield len(batch.rows)


@pytest.mark.parametrize(
    ("kind", "is_changed"),
    [("array", False), ("tensor", False), ("shared", True), ("memmap", True)],
)
def test_write_back_to_the_copy_of_a_worker_process_is_warned_of(
    kind: str, is_changed: bool, tmp_path: Path
) -> None:
    source: Any = np.zeros((4, 2)) if kind == "array" else torch.zeros(4, 2)
    if kind == "shared":
        source.share_memory_()
    elif kind == "memmap":
        source = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", shape=(4, 2))
    loader = DataLoader(
        _Writing(tmp_path / "log", source),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="fork",
    )
    assert list(loader) == [2, 2]
    assert bool((source == 1).all()) == is_changed
    said = (tmp_path / "log").read_text().splitlines()
    assert len(said) == (not is_changed)
    assert all(
        "changes that process's copy of an array, and the array of the main process stays as it is"
        in line
        for line in said
    )

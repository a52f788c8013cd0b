"""Advice in errors of reader functions, transforms, write-backs and statistics is right."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.advice import Case, Cases, equal, follow, joined, read
from torch.utils.data import DataLoader

import pinfeed
from pinfeed import Feeder, wrap_loader, wrap_readers

advised = Cases()
X = np.arange(24, dtype="float32").reshape(8, 3)


# ---- readers, transforms and write-backs ---------------------------------------------------------


def made(**options: Any) -> Any:
    def samples(i: int) -> Any:
        return X[2 * i : 2 * i + 2]

    given: Any = {
        "read_input": samples,
        "get_output": samples,
        "one_read_count": 2,
        "batch_size": 4,
        "device": "cpu",
    }
    identities = range(4)
    with wrap_readers(identities, identities, **{**given, **options}) as feeder:
        return joined(feeder)


@advised("is not a multiple of one_read_count=2.*give batch_size=2 or 4")
def batches_of_parts_of_reads(path: Path) -> Iterator[Any]:
    yield lambda: made(batch_size=3)
    yield equal(made(batch_size=2), [X, X]) and equal(made(batch_size=4), [X, X])


@advised("expected a list; give column.tolist\\(\\)")
def table_of_inputs(path: Path) -> Iterator[Any]:
    def read(i: Any) -> Any:
        return X[[i]]

    def both(inputs: Any) -> Any:
        options: Any = {"read_input": read, "get_output": read, "batch_size": 4, "device": "cpu"}
        with wrap_readers(inputs, list(range(8)), **options) as feeder:
            return joined(feeder)

    table = pytest.importorskip("pandas").DataFrame({"i": range(8)})
    yield lambda: both(table)
    yield equal(both(table["i"].tolist()), [X, X])


@advised("for samples of several shapes, give apply_on_input_batch, for example to pad them")
def samples_of_several_shapes(path: Path) -> Iterator[Any]:
    def read(i: int) -> Any:
        return [X[i][: 1 + i % 3]] * 2

    def pad(samples: Any) -> Any:
        tensors = [torch.from_numpy(sample) for sample in samples]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)

    yield lambda: made(read_input=read)
    found = made(read_input=read, apply_on_input_batch=pad, batch_size=8)[0]
    yield equal(found[::2], [[*X[i][: 1 + i % 3], *[0] * (2 - i % 3)] for i in range(4)])


@advised("as for the first sample of the batch; give input_dtype to convert them")
def samples_of_several_dtypes(path: Path) -> Iterator[Any]:
    def read(i: int) -> Any:
        return [X[2 * i], X[2 * i + 1].astype("int64")]

    yield lambda: made(read_input=read)
    yield equal(made(read_input=read, input_dtype="float32"), [X, X])


@advised("both apply_on_input_batch and input_dtype were given.*leave out input_dtype")
def dtype_of_a_made_batch(path: Path) -> Iterator[Any]:
    def stack(samples: Any) -> Any:
        return np.stack(list(samples))

    yield lambda: made(apply_on_input_batch=stack, input_dtype="float32")
    yield equal(made(apply_on_input_batch=stack), [X, X])


@advised("was given without host_transform.*give host_transform, or leave out transform_threads")
def transform_threads_alone(path: Path) -> Iterator[Any]:
    yield lambda: read(X, transform_threads=2)
    yield equal(read(X, transform_threads=2, host_transform=lambda x: x + 1), X + 1)
    yield equal(read(X), X)


@advised("is a generator function.*replace yield by return")
def generator_as_a_transform(path: Path) -> Iterator[Any]:
    def yields(batch: Any) -> Any:
        yield batch + 1

    def returns(batch: Any) -> Any:
        return batch + 1

    yield lambda: read(X, host_transform=yields)
    yield equal(read(X, host_transform=returns), X + 1)


@advised("expected a host_transform or device_transform that has it.*manual_seed\\(seed\\)")
def seed_of_a_loader(path: Path) -> Iterator[Any]:
    def loader(**options: Any) -> Any:
        return DataLoader(X, batch_size=3, **options)  # type: ignore[arg-type]

    def loaded(loader: Any, **options: Any) -> Any:
        with wrap_loader(loader, device="cpu", **options) as feeder:
            return joined(feeder)

    def noise(batch: Any, generator: torch.Generator) -> Any:
        return batch + torch.rand(batch.shape, generator=generator)

    yield lambda: loaded(loader(), seed=3)
    yield equal(*(loaded(loader(), seed=3, host_transform=noise) for _ in range(2)))
    orders = [
        loaded(loader(shuffle=True, generator=torch.Generator().manual_seed(3))) for _ in range(2)
    ]
    yield equal(*orders) and not equal(orders[0], X)


@advised("write_back was called twice for this batch; give all values in one call, with None for")
def two_write_backs(path: Path) -> Iterator[Any]:
    def write(*calls: Any) -> bool:
        one, two = X.copy(), X.copy()
        with Feeder((one, two), batch_size=4, device="cpu") as feeder:
            for batch in feeder.batches():
                for first, second in calls:
                    batch.write_back((first(batch.data[0]), second(batch.data[1])))
        return equal(one, X + 1) and equal(two, X)

    def more(part: Any) -> Any:
        return part + 1

    def nothing(part: Any) -> None:
        return None

    yield lambda: write((more, nothing), (nothing, more))
    yield write((more, nothing))


@advised("after the loop requested the next batch or ended; call it in the training step of its")
def late_write_back(path: Path) -> Iterator[Any]:
    found = X.copy()

    def write(is_late: bool) -> None:
        with Feeder(found, batch_size=4, device="cpu") as feeder:
            for batch in feeder.batches():
                if not is_late:
                    batch.write_back(batch.data + 1)
            if is_late:
                batch.write_back(batch.data)

    yield lambda: write(True)
    write(False)
    yield equal(found, X + 1)


@advised("row 1 appears more than once.*give unique rows to the feeder, or sum the changes of each")
def repeated_rows_in_a_write_back(path: Path) -> Iterator[Any]:
    def write(indices: Any, values: Any) -> Any:
        found = X.copy()
        with Feeder(found, batch_size=4, rows=indices, device="cpu") as feeder:
            for batch in feeder.batches():
                batch.write_back(values(batch.data))
        return found

    yield lambda: write([1, 2, 1], lambda data: data + 1)
    expected = X.copy()
    expected[[1, 2]] += 1
    yield equal(write([1, 2], lambda data: data + 1), expected)


@advised("write_back to .*, which has ragged, read-only rows; give None instead of its values")
def write_back_to_ragged_rows(path: Path) -> Iterator[Any]:
    ragged = pinfeed.RaggedStore(np.arange(24.0), np.arange(0, 25, 3))

    def write(does_give: bool) -> Any:
        found = X.copy()
        with Feeder((found, ragged), batch_size=4, device="cpu") as feeder:
            for batch in feeder.batches():
                values = batch.data[1] if does_give else None
                batch.write_back((batch.data[0] + 1, values))
        return found

    yield lambda: write(True)
    yield equal(write(False), X + 1)


@advised("change the batch in the training step instead")
def write_back_of_a_transformed_batch(path: Path) -> Iterator[Any]:
    found = X.copy()

    def write(transform: Any) -> None:
        with Feeder(found, batch_size=4, device_transform=transform, device="cpu") as feeder:
            for batch in feeder.batches():
                batch.write_back(batch.data + (0 if transform else 1))

    yield lambda: write(lambda batch: batch + 1)
    write(None)
    yield equal(found, X + 1)


@advised("which the transforms change; leave out verify or the transforms")
def verified_transforms(path: Path) -> Iterator[Any]:
    transform: Any = lambda batch: batch + 1  # noqa: E731
    yield lambda: read(X, verify=True, host_transform=transform)
    yield equal(read(X, host_transform=transform), X + 1)
    yield equal(read(X, verify=True), X)


@advised("change rows by write_back only, or give depth=0")
def rows_changed_behind_a_loop(path: Path) -> Iterator[Any]:
    class Watched(pinfeed.ArrayStore):
        def gather(self, rows: Any, out: Any) -> None:
            super().gather(rows, out)
            if 2 in rows:
                prefetched.set()

    def change(is_direct: bool, depth: int) -> Any:
        found = X.copy()
        prefetched.clear()
        options: Any = {"batch_size": 2, "verify": True, "device": "cpu", "depth": depth}
        with Feeder(Watched(found), **options) as feeder:
            for batch in feeder.batches():
                if depth:
                    prefetched.wait()
                if is_direct:
                    found[:] += 1
                else:
                    batch.write_back(batch.data + 1)
        return found

    prefetched = threading.Event()
    yield lambda: change(True, 1)
    yield equal(change(False, 1), X + 1)
    yield equal(change(True, 0), X + 4)


# ---- statistics ----------------------------------------------------------------------------------


@advised("give the values of the RaggedStore, an array or a store with one item per row")
def mean_of_ragged_rows(path: Path) -> Iterator[Any]:
    values = np.arange(6.0)
    yield lambda: pinfeed.mean_and_std(pinfeed.RaggedStore(values, [0, 2, 6]))
    yield pinfeed.mean_and_std(values).mean.item() == 2.5


@advised("give their real and imaginary parts")
def mean_of_complex_numbers(path: Path) -> Iterator[Any]:
    values = np.array([1 + 2j, 3 + 6j])
    yield lambda: pinfeed.mean_and_std(values)
    found = pinfeed.mean_and_std((values.real, values.imag))
    yield [one.mean.item() for one in found] == [2.0, 4.0]


@advised.each
def test_advice_is_right(says: str, case: Case, tmp_path: Path) -> None:
    follow(says, case, tmp_path)

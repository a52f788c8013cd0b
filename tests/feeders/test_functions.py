"""What a user of wrap_readers sees: what functions read, on the device, batch by batch."""

import collections
import gc
import json
import re
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.schedules import SLOTS, STREAMS, randomly

from pinfeed import errors, rows, wrap_readers
from pinfeed.devices.cpu import HostDevice
from pinfeed.testing import SimDevice, favour, lazy

DEPTHS = [0, 1, 2, 5]
PACES = [(0, 1), (1, 1), (2, 1), (2, 3)]
"""Depth, and number of readers."""


class StagingDevice(HostDevice):
    """The host, doing what a GPU does: all is copied from staging."""

    unified = False

    def adopt(self, part: Any, stream: Any) -> Any:
        return None

    def reaches(self, source: Any) -> bool:
        return False


DEVICES: dict[str, Callable[[], Any]] = {"cpu": lambda: "cpu", "staged": StagingDevice}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Any:
    return DEVICES[request.param]()


def image(i: int) -> Iterator[np.ndarray]:
    yield np.full((2, 3), i, np.float32)


def label(i: int) -> Iterator[int]:
    yield i


def several(count: int) -> dict[str, Any]:
    """Functions that give so many samples of each identity."""
    return {
        "read_input": lambda i: (np.full((2, 3), 100 * i + k, np.float32) for k in range(count)),
        "get_output": lambda i: (100 * i + k for k in range(count)),
        "one_read_count": count,
    }


def wrapped(n: int = 6, **arguments: Any) -> Any:
    values = arguments.pop("inputs", range(n)), arguments.pop("outputs", range(n))
    defaults = {"read_input": image, "get_output": label, "batch_size": 2, "device": "cpu"}
    return wrap_readers(*values, **{**defaults, **arguments})


def labels(batches: Any) -> list[list[int]]:
    return [y.tolist() for _, y in batches]


# ---- the same batches ----------------------------------------------------------------------------


def synchronous(
    n: int, count: int, batches_per_slot: int, order: Any, epoch: int, drop_last: bool
) -> list[list[int]]:
    """The samples of each batch, as a plain loop would read them."""
    identities = order.bind(n, epoch)(np.arange(n)).tolist()
    cut = [identities[i : i + batches_per_slot] for i in range(0, n, batches_per_slot)]
    if drop_last and cut and len(cut[-1]) < batches_per_slot:
        cut.pop()
    return [[100 * i + k for i in batch for k in range(count)] for batch in cut]


def stack(samples: Iterator[Any]) -> np.ndarray:
    return np.stack(list(samples))


@settings(deadline=None, max_examples=150)
@given(
    n=st.integers(0, 11),
    count=st.integers(1, 3),
    batches_per_slot=st.integers(1, 5),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
    drop_last=st.booleans(),
    schedule=st.sampled_from(PACES),
    staged=st.booleans(),
    applied=st.booleans(),
    resume=st.integers(0, 4),
)
def test_the_batches_of_the_synchronous_loop(
    n: int,
    count: int,
    batches_per_slot: int,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    schedule: tuple[int, int],
    staged: bool,
    applied: bool,
    resume: int,
) -> None:
    order = rows.shuffled(seed) if shuffle else rows.sequential()
    arguments: dict[str, Any] = {
        **several(count),
        "batch_size": batches_per_slot * count,
        "shuffle": shuffle,
        "seed": seed,
        "drop_last": drop_last,
        "depth": schedule[0],
        "n_readers": schedule[1],
        "device": StagingDevice() if staged else "cpu",
    }
    if applied:
        arguments |= {"apply_on_input_batch": stack, "apply_on_output_batch": stack}
    with wrapped(n, **arguments) as feeder:
        state = None
        for epoch in range(2):
            wanted = synchronous(n, count, batches_per_slot, order, epoch, drop_last)
            assert len(feeder) == len(wanted)
            got = []
            for x, y in feeder:
                assert x.shape == (len(y), 2, 3)
                assert torch.equal(x[:, 1, 2], y.float())
                assert len(y) > 0
                got.append(y.tolist())
                if epoch == 1 and len(got) == resume:
                    state = json.loads(json.dumps(feeder.state_dict()))
            assert got == wanted
    if state is not None:
        with wrapped(n, **arguments) as feeder:
            feeder.load_state_dict(state)
            wanted = wanted[resume:] or synchronous(n, count, batches_per_slot, order, 2, drop_last)
            assert labels(feeder) == wanted


SCHEDULES = [
    lazy,
    favour(*STREAMS),
    favour(*SLOTS),
    favour("read", "pinfeed-read"),
    favour("compute"),
    *(randomly(i) for i in range(8)),
]


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize(("depth", "n_readers"), [*PACES, (4, 2)])
@pytest.mark.parametrize("choose", SCHEDULES, ids=range(len(SCHEDULES)))
def test_any_schedule_of_a_device(choose: Any, depth: int, n_readers: int, applied: bool) -> None:
    device = SimDevice(choose)
    seen: dict[int, Any] = {}
    arguments: dict[str, Any] = {"apply_on_input_batch": stack} if applied else {}
    with wrapped(
        11,
        **several(2),
        batch_size=6,
        depth=depth,
        n_readers=n_readers,
        device=device,
        shuffle=True,
        **arguments,
    ) as feeder:
        for epoch in range(2):
            for i, (x, y) in enumerate(feeder):
                device.launch(
                    lambda x, y, key=(epoch, i): seen.__setitem__(key, (x.copy(), y.copy())), x, y
                )
                for array in (x, y):
                    # The user's own
                    device.launch(lambda a: a.fill(-1), array)
                del x, y, array
    device.drain()
    for epoch in range(2):
        for i, wanted in enumerate(synchronous(11, 2, 3, rows.shuffled(0), epoch, False)):
            x, y = seen[epoch, i]
            assert y.tolist() == wanted
            assert (x == y[:, None, None]).all()
    assert len(seen) == 8


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_epoch_is_read_anew(depth: int) -> None:
    reads: collections.Counter[int] = collections.Counter()

    def noisy(i: int) -> Iterator[int]:
        reads[i] += 1
        yield 10 * i + reads[i]

    with wrapped(4, get_output=noisy, depth=depth) as feeder:
        assert [labels(feeder) for _ in range(3)] == [
            [[e, 10 + e], [20 + e, 30 + e]] for e in (1, 2, 3)
        ]


def test_the_remainder() -> None:
    assert labels(wrapped(5)) == [[0, 1], [2, 3], [4]]
    assert labels(wrapped(5, drop_last=True)) == [[0, 1], [2, 3]]
    assert labels(wrapped(1, drop_last=True)) == []


def test_set_epoch() -> None:
    with wrapped(50, shuffle=True, seed=3) as feeder:
        epochs = [labels(feeder) for _ in range(3)]
        assert epochs[0] != epochs[1] != epochs[2]
        feeder.set_epoch(1)
        assert feeder.epoch == 1
        assert labels(feeder) == epochs[1]
    assert labels(wrapped(50, shuffle=True, seed=4)) != epochs[0]


# ---- samples and batches -------------------------------------------------------------------------

SAMPLES: dict[str, tuple[Any, torch.dtype, tuple[int, ...]]] = {
    "array": (np.arange(6, dtype=np.int16).reshape(2, 3), torch.int16, (2, 3)),
    "read-only": (np.broadcast_to(np.float32(2), (2, 3)), torch.float32, (2, 3)),
    "strided": (np.arange(12.0).reshape(3, 4).T[::-1], torch.float64, (4, 3)),
    "big-endian": (np.arange(3, dtype=">f4"), torch.float32, (3,)),
    "bfloat16": (np.arange(3).astype(ml_dtypes.bfloat16), torch.bfloat16, (3,)),
    "tensor": (torch.arange(4, dtype=torch.uint8), torch.uint8, (4,)),
    "tensor of bfloat16": (torch.arange(4, dtype=torch.bfloat16), torch.bfloat16, (4,)),
    "tensor with a gradient": (torch.ones(2, requires_grad=True), torch.float32, (2,)),
    "conjugated": (torch.ones(2, dtype=torch.complex64).conj(), torch.complex64, (2,)),
    "number": (2.5, torch.float64, ()),
    "numpy number": (np.float32(2.5), torch.float32, ()),
    "bool": (True, torch.bool, ()),
    "list": ([1, 2], torch.int64, (2,)),
    "empty": (np.empty((0, 3), np.float32), torch.float32, (0, 3)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_what_a_sample_may_be(name: str, device: Any) -> None:
    sample, dtype, shape = SAMPLES[name]
    wanted = torch.as_tensor(
        np.ascontiguousarray(sample).astype(sample.dtype.newbyteorder("="))
        if name == "big-endian"
        else 0
    )
    for x, _ in wrapped(3, read_input=lambda i: [sample], device=device):
        assert (x.dtype, x.shape[1:]) == (dtype, shape)
        assert not x.requires_grad
        for row in x:
            if isinstance(sample, torch.Tensor):
                assert torch.equal(row, sample.detach())
            elif name not in ("big-endian", "bfloat16"):
                np.testing.assert_array_equal(row.numpy(), sample)
            else:
                assert row.tolist() == (wanted.tolist() if name == "big-endian" else [0, 1, 2])


@pytest.mark.parametrize(
    "dtype", ["float16", np.float32, torch.int32, "bfloat16", torch.bfloat16, np.uint8]
)
def test_samples_are_converted(dtype: Any, device: Any) -> None:
    def mixed(i: int) -> Iterator[Any]:
        yield np.array([1, 2]) if i % 2 else np.array([1.0, 2.5])

    wanted = (
        getattr(torch, dtype)
        if isinstance(dtype, str)
        else dtype
        if isinstance(dtype, torch.dtype)
        else getattr(torch, dtype.__name__)
    )
    for x, y in wrapped(read_input=mixed, input_dtype=dtype, output_dtype=dtype, device=device):
        assert x.dtype == y.dtype == wanted
        assert x.tolist() == torch.tensor([[1, 2.5], [1, 2]]).to(wanted).tolist()


@pytest.mark.parametrize(("depth", "n_readers"), PACES)
def test_a_function_may_fill_one_array_again(depth: int, n_readers: int) -> None:
    def reading(i: int) -> Iterator[np.ndarray]:
        buffer = np.empty(2)
        for k in range(3):
            buffer[:] = 10 * i + k
            yield buffer

    batches = wrapped(
        4,
        read_input=reading,
        get_output=lambda i: range(3),
        one_read_count=3,
        batch_size=6,
        depth=depth,
        n_readers=n_readers,
    )
    assert [x[:, 0].tolist() for x, _ in batches] == [
        [0, 1, 2, 10, 11, 12],
        [20, 21, 22, 30, 31, 32],
    ]


@pytest.mark.parametrize(("depth", "n_readers"), PACES)
def test_apply_may_fill_one_array_again(device: Any, depth: int, n_readers: int) -> None:
    buffer = np.empty((2, 2, 3), np.float32)

    def fill(samples: Iterator[np.ndarray]) -> np.ndarray:
        for place, sample in zip(buffer, samples, strict=True):
            place[:] = sample
        return buffer

    kept = list(wrapped(apply_on_input_batch=fill, depth=depth, n_readers=n_readers, device=device))
    assert [x[:, 0, 0].tolist() for x, _ in kept] == [[0, 1], [2, 3], [4, 5]]
    # The user's own
    kept[0][0].fill_(7)
    assert buffer.max() == 5


class Bag:
    """An object that moves itself."""

    def to(self, device: Any) -> "Bag":
        return self


@pytest.mark.parametrize(("depth", "n_readers"), PACES)
def test_apply_gives_any_structure(depth: int, n_readers: int) -> None:
    def apply(samples: Iterator[np.ndarray]) -> Any:
        given = list(samples)
        x = np.stack(given)
        x.flags.writeable = False
        return {
            "x": x,
            "names": [f"{int(a[0, 0])}" for a in given],
            "pair": (torch.ones(1).expand(3), 2.5),
            "bag": Bag(),
            "none": None,
        }

    def total(samples: Iterator[int]) -> int:
        return sum(samples)

    seen = list(
        wrapped(
            apply_on_input_batch=apply,
            apply_on_output_batch=total,
            depth=depth,
            n_readers=n_readers,
        )
    )
    assert [(x["names"], y) for x, y in seen] == [(["0", "1"], 1), (["2", "3"], 5), (["4", "5"], 9)]
    for x, _ in seen:
        assert list(x) == ["x", "names", "pair", "bag", "none"]
        assert x["x"].shape == (2, 2, 3)
        assert x["pair"][0].tolist() == [1, 1, 1]
        assert isinstance(x["bag"], Bag)


def test_apply_takes_samples_of_several_shapes() -> None:
    def padded(samples: Iterator[Any]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(
            [torch.as_tensor(sample) for sample in samples], batch_first=True
        )

    batches = wrapped(4, read_input=lambda i: [np.ones(i + 1)], apply_on_input_batch=padded)
    assert [x.tolist() for x, _ in batches] == [[[1, 0], [1, 1]], [[1, 1, 1, 0], [1, 1, 1, 1]]]


def test_kept_batches_stay_valid(device: Any) -> None:
    kept = list(wrapped(200, depth=1, device=device))
    assert torch.equal(torch.cat([x for x, _ in kept])[:, 0, 0], torch.arange(200.0))


# ---- memory --------------------------------------------------------------------------------------


class Sample(np.ndarray):
    """An array that can be watched."""


class Watch:
    """Counts the samples that are alive, whenever one is made."""

    def __init__(self, n_identities: int) -> None:
        self.n_identities = n_identities
        self.alive = 0
        self.most = []
        self.made = 0
        self._lock = threading.Lock()

    def __call__(self, i: int) -> Iterator[Sample]:
        for _ in range(2):
            yield self.sample()

    def sample(self) -> Sample:
        made = np.zeros((4, 4)).view(Sample)
        weakref.finalize(made, self.gone)
        with self._lock:
            self.alive = self.alive + 1
            self.made = self.made + 1
            if self.made % (2 * self.n_identities) == 1:
                self.most.append(0)
            self.most[-1] = max(self.most[-1], self.alive)
        return made

    def gone(self) -> None:
        with self._lock:
            self.alive -= 1


@pytest.mark.parametrize(
    ("depth", "n_readers", "limit"), [(0, 1, 1), (2, 1, 1), (5, 1, 1), (2, 3, 3)]
)
def test_samples_do_not_pile_up(depth: int, n_readers: int, limit: int) -> None:
    """In 3 epochs of 50 batches no more samples are alive than are being read: each is written to its batch at once."""
    watch = Watch(200)
    gc.disable()
    try:
        with wrapped(
            200,
            read_input=watch,
            get_output=lambda i: [0, 0],
            one_read_count=2,
            batch_size=8,
            depth=depth,
            n_readers=n_readers,
        ) as f:
            for _ in range(3):
                assert len(list(f)) == 50
        assert watch.made == 3 * 400
        assert watch.alive == 0
        assert len(watch.most) == 3
        assert max(watch.most) <= limit
    finally:
        gc.enable()


@pytest.mark.parametrize(("depth", "n_readers"), PACES)
def test_samples_that_apply_collects_do_not_pile_up(depth: int, n_readers: int) -> None:
    watch, arguments = (
        Watch(200),
        {"depth": depth, "n_readers": n_readers, "one_read_count": 2, "batch_size": 8},
    )
    gc.disable()
    try:
        with wrapped(
            200,
            read_input=watch,
            get_output=lambda i: [0, 0],
            apply_on_input_batch=list,
            **arguments,
        ) as feeder:
            for _ in range(3):
                for x, _ in feeder:
                    assert len(x) == 8
        # Of one batch, while the one before it is let go of.
        assert max(watch.most) <= 2 * 8
        assert watch.alive == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("depth", DEPTHS)
def test_batches_on_the_device_do_not_pile_up(depth: int) -> None:
    device, peaks = SimDevice(favour(*STREAMS, *SLOTS)), []
    with wrapped(100, depth=depth, device=device) as feeder:
        for _ in range(3):
            for x, y in feeder:
                del x, y
            peaks.append(device.peak_bytes)
    assert peaks[0] == peaks[2] <= (depth + 2) * 2 * (24 + 8)


def test_what_is_done_is_forgotten() -> None:
    """Not only when the epoch is."""

    def n_generators() -> int:
        return sum(
            type(thing) is GeneratorType and thing.__name__ == "samples"
            for thing in gc.get_objects()
        )

    with wrapped(100) as feeder:
        for k, _ in enumerate(feeder):
            if k == 45:
                # Of 50: each batch has begun four of them.
                assert n_generators() < 10


# ---- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "n_readers", "names"),
    [
        (0, 1, "MainThread"),
        (0, 4, "MainThread"),
        (2, 1, "pinfeed-read_0"),
        (2, 2, r"pinfeed-identity_[01]"),
    ],
)
def test_who_reads(depth: int, n_readers: int, names: str) -> None:
    seen = set()

    def reading(i: int) -> Iterator[int]:
        if i % 2:
            # The first one of a batch is begun by the reader itself.
            seen.add(threading.current_thread().name)
        yield i

    list(wrapped(20, read_input=reading, depth=depth, n_readers=n_readers))
    assert seen
    assert all(re.fullmatch(names, name) for name in seen)


@pytest.mark.parametrize("applied", [False, True])
def test_identities_are_read_at_the_same_time_and_come_in_order(applied: bool) -> None:
    together = threading.Barrier(4, timeout=30)

    def reading(i: int) -> Iterator[int]:
        yield i
        # Until all of them are here.
        together.wait()

    arguments: dict[str, Any] = {"apply_on_input_batch": stack} if applied else {}
    assert [
        x.tolist()
        for x, _ in wrapped(4, read_input=reading, batch_size=4, n_readers=4, **arguments)
    ] == [[0, 1, 2, 3]]


def test_batches_are_read_ahead() -> None:
    read = threading.Event()

    def reading(i: int) -> Iterator[int]:
        if i == 5:
            read.set()
        yield i

    for _ in wrapped(10, get_output=reading, depth=2):
        assert read.wait(10)
        break


# ---- errors --------------------------------------------------------------------------------------


def until_error(batches: Any, kind: type[BaseException]) -> tuple[list[list[int]], BaseException]:
    """The labels that came, and then the error.

    (pytest.raises would make a cycle of it and the loop's frames.)
    """
    got: list[list[int]] = []
    try:
        got.extend(y.tolist() for _, y in batches)
    except kind as error:
        return got, error
    pytest.fail(f"a silent end after {got}")


def frames(error: BaseException | None) -> list[str]:
    assert error is not None
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def broken(i: int) -> Iterator[int]:
    yield i if i != 5 else {}["five"]


def broken_at_once(i: int) -> list[int]:
    return [i if i != 5 else {}["five"]]


PATHS = [f"images/{i}.png" for i in range(8)]


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize(("depth", "n_readers"), PACES)
@pytest.mark.parametrize("function", [broken, broken_at_once])
@pytest.mark.parametrize("kind", ["input", "output"])
def test_errors_come_after_the_good_batches_with_traceback_and_identity(
    kind: str, function: Any, depth: int, n_readers: int, applied: bool
) -> None:
    name = {"input": "read_input", "output": "get_output"}[kind]
    arguments: dict[str, Any] = {name: lambda path: function(PATHS.index(path)), f"{kind}s": PATHS}
    if applied:
        arguments[f"apply_on_{kind}_batch"] = stack
    with wrapped(8, depth=depth, n_readers=n_readers, **arguments) as feeder:
        for _ in range(2):
            # An error ends its loop, not the feeder.
            got, error = until_error(feeder, KeyError)
            assert got == [[0, 1], [2, 3]]
            assert error.args == ("five",)
            assert frames(error)[-1] == function.__name__
            if sys.version_info >= (3, 11):
                assert f"in {name}({kind}s[5]), {kind}s[5] = 'images/5.png'" in notes(error)
                assert (f"in apply_on_{kind}_batch of identities [4, 5]" in notes(error)) == applied


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize(("depth", "n_readers"), PACES)
@pytest.mark.parametrize(
    ("count", "wanted"),
    [(0, "got 0 samples"), (1, "got 1 samples"), (3, "got more than 2 samples")],
)
@pytest.mark.parametrize("identity", [2, 3])
def test_a_count_that_does_not_match(
    identity: int, count: int, wanted: str, depth: int, n_readers: int, applied: bool
) -> None:
    def reading(i: int) -> Iterator[int]:
        yield from range(count if i == identity else 2)

    arguments: dict[str, Any] = {"apply_on_output_batch": stack} if applied else {}
    with wrapped(
        6,
        **{**several(2), "get_output": reading},
        batch_size=4,
        depth=depth,
        n_readers=n_readers,
        **arguments,
    ) as feeder:
        got, error = until_error(feeder, errors.ArgumentError)
    assert got == [[0, 1, 0, 1]]
    call = rf"get_output\(outputs\[{identity}\]\), outputs\[{identity}\] = {identity}"
    assert re.match(f"{call}: {wanted}; expected one_read_count=2 from every identity", str(error))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing yielded": (
        {"read_input": lambda i: None},
        r"read_input\(inputs\[0\]\), inputs\[0\] = 0: got NoneType; expected an iterable",
    ),
    "not yielded": (
        {"read_input": lambda i: np.ones((3, 2))},
        "got more than 1 samples.*not yielded but returned",
    ),
    "shapes": (
        {"read_input": lambda i: [np.ones(i + 1)]},
        r"inputs\[1\] = 1: got a sample of shape \(2,\); expected \(1,\).*apply_on_input",
    ),
    "dtypes": (
        {"get_output": lambda i: [i / 2 if i else 0]},
        r"outputs\[1\] = 1: got a sample of float64; expected int64.*output_dtype",
    ),
    "apply": (
        {"apply_on_input_batch": lambda samples: next(samples)},
        r"apply_on_input_batch took 1 samples of identities \[0, 1\]; expected .* 2",
    ),
    "lazy": ({"apply_on_input_batch": lambda samples: samples}, "took 0 samples"),
}


@pytest.mark.parametrize("n_readers", [1, 2])
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("name", BAD)
def test_bad_samples(name: str, depth: int, n_readers: int) -> None:
    arguments, message = BAD[name]
    with (
        wrapped(6, depth=depth, n_readers=n_readers, **arguments) as feeder,
        pytest.raises(errors.ArgumentError, match=message),
    ):
        list(feeder)


@pytest.mark.parametrize(
    "sample",
    [{"a": 1}, np.array(["a"]), torch.eye(2).to_sparse(), np.datetime64("2020-01-01")],
    ids=str,
)
def test_samples_that_torch_does_not_have(sample: Any) -> None:
    with pytest.raises(
        errors.StoreError, match=r"read_input\(inputs\[0\]\), inputs\[0\] = 0: a sample"
    ):
        list(wrapped(read_input=lambda i: [sample]))


def test_a_batch_that_torch_does_not_have() -> None:
    with pytest.raises(errors.StoreError, match=r"apply_on_input_batch\['names'\]: dtype <U1"):
        list(
            wrapped(
                apply_on_input_batch=lambda samples: {"names": np.array(["x" for _ in samples])}
            )
        )


def stopping(i: int) -> list[int]:
    return [i if i != 5 else next(iter([]))]


def exiting(i: int) -> Iterator[int]:
    yield i if i != 5 else sys.exit(3)


def stopped(i: int) -> Iterator[int]:
    yield i if i != 5 else next(iter([]))


@pytest.mark.parametrize(("depth", "n_readers"), PACES)
@pytest.mark.parametrize("function", [stopping, exiting, stopped])
def test_what_would_end_the_loop_in_silence_is_an_error(
    function: Any, depth: int, n_readers: int
) -> None:
    got, error = until_error(
        wrapped(8, get_output=function, depth=depth, n_readers=n_readers), errors.WorkerError
    )
    assert got == [[0, 1], [2, 3]]
    assert re.match(
        rf"{function.__name__} .*raised (StopIteration\(\)|SystemExit\(3\)), which would end the loop in silence",
        str(error),
    )
    if sys.version_info >= (3, 11):
        assert "outputs[5] = 5" in notes(error)


@pytest.mark.parametrize(("depth", "n_readers"), PACES)
def test_an_interrupt_is_one(depth: int, n_readers: int) -> None:
    def interrupted(i: int) -> Iterator[int]:
        if i == 5:
            raise KeyboardInterrupt
        yield i

    got, _ = until_error(
        wrapped(8, get_output=interrupted, depth=depth, n_readers=n_readers), KeyboardInterrupt
    )
    assert got == [[0, 1], [2, 3]]


@pytest.mark.parametrize("depth", [0, 2])
def test_apply_that_asks_for_too_many_samples(depth: int) -> None:
    got, error = until_error(
        wrapped(
            5, apply_on_input_batch=lambda samples: [next(samples), next(samples)], depth=depth
        ),
        errors.WorkerError,
    )
    assert got == [[0, 1], [2, 3]]
    if sys.version_info >= (3, 11):
        assert notes(error) == "in apply_on_input_batch of identities [4]"


def test_a_value_that_cannot_be_shown() -> None:
    class Short(list[int]):
        def __getitem__(self, i: Any) -> Any:
            return super().__getitem__(i if i < 3 else 100)

    got, error = until_error(wrapped(inputs=Short(range(6))), IndexError)
    assert got == [[0, 1]]
    if sys.version_info >= (3, 11):
        assert "inputs[3] = unknown (IndexError)" in notes(error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": range(5)}, "got 5 inputs and 6 outputs; expected one of each"),
        ({"inputs": iter(range(6))}, "inputs: got range_iterator; expected a list"),
        ({"outputs": "labels"}, "outputs: got str; expected a list"),
        ({"outputs": {0: 1}}, "outputs: got dict; expected a list"),
        ({"batch_size": 0}, "batch_size=0: expected a whole number, at least 1"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"one_read_count": 0}, "one_read_count=0"),
        ({"n_readers": True}, "n_readers=True"),
        ({"depth": -1}, "depth=-1"),
        (
            {"batch_size": 16, "one_read_count": 3},
            r"batch_size=16 is no multiple of one_read_count=3.*give batch_size=15 or 18",
        ),
        ({"batch_size": 2, "one_read_count": 3}, r"give batch_size=3$"),
        ({"read_input": 5}, "read_input=5: expected a function"),
        ({"get_output": None}, "get_output=None: expected a function"),
        ({"apply_on_output_batch": "stack"}, "apply_on_output_batch='stack': expected a function"),
        (
            {"apply_on_input_batch": stack, "input_dtype": "f4"},
            "both apply_on_input_batch and input_dtype",
        ),
        ({"input_dtype": "float33"}, "input_dtype='float33' is no dtype"),
        ({"output_dtype": object}, "output_dtype=<class 'object'> is no dtype"),
        ({"output_dtype": torch.quint8}, "output_dtype=torch.quint8 is no dtype"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ArgumentError, match=message):
        wrapped(**arguments)


def test_a_column_of_a_table_is_refused() -> None:
    class Series(list[int]):
        iloc = None

    with pytest.raises(errors.ArgumentError, match=r"inputs: got Series.*\.tolist"):
        wrapped(inputs=Series(range(6)))


# ---- the end -------------------------------------------------------------------------------------


class Opened:
    """A function whose generators can be seen to end."""

    def __init__(self, breaks_at: int = -1) -> None:
        self.open: set[int] = set()
        self.breaks_at = breaks_at

    def __call__(self, i: int) -> Iterator[int]:
        self.open.add(i)
        try:
            for k in range(2):
                if k and i == self.breaks_at:
                    raise KeyError(i)
                yield i
        finally:
            self.open.remove(i)


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize(("depth", "n_readers"), PACES)
@pytest.mark.parametrize("ending", ["break", "raise", "error", "count"])
def test_nothing_stays_open(ending: str, depth: int, n_readers: int, applied: bool) -> None:
    inputs, outputs = Opened(6 if ending == "error" else -1), Opened()
    arguments: dict[str, Any] = {"apply_on_output_batch": stack} if applied else {}
    arguments |= {
        "depth": depth,
        "n_readers": n_readers,
        "one_read_count": 2 if ending != "count" else 1,
    }
    feeder = wrapped(20, read_input=inputs, get_output=outputs, batch_size=8, **arguments)

    def loop() -> None:
        for _ in feeder:
            if ending == "break":
                break
            if ending == "raise":
                raise KeyError

    gc.disable()
    try:
        if ending == "break":
            loop()
        else:
            with pytest.raises((KeyError, errors.ArgumentError)) as caught:
                loop()
            # It is still there, and holds no identity open.
            assert caught.value.__traceback__ is not None
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("pinfeed")]
        assert not inputs.open | outputs.open
    finally:
        gc.enable()


def test_closing() -> None:
    feeder = wrapped()
    loop = iter(feeder)
    with pytest.raises(errors.ClosedError, match="running"):
        iter(feeder)
    next(loop)
    feeder.close()
    feeder.close()
    assert next(loop, None) is None
    with pytest.raises(errors.ClosedError):
        iter(feeder)


@pytest.mark.parametrize("n_readers", [1, 3])
def test_close_while_another_thread_waits_for_a_batch(n_readers: int) -> None:
    asked = threading.Event()
    go_on = threading.Event()
    reads = []
    caught = []

    def reading(i: int) -> Iterator[int]:
        reads.append(i)
        if i == 9:
            asked.set()
            assert go_on.wait(10)
        yield i

    feeder = wrapped(100, get_output=reading, batch_size=100, n_readers=n_readers)

    def run() -> None:
        try:
            list(feeder)
        except errors.ClosedError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert asked.wait(10)
    feeder.close()
    go_on.set()
    thread.join()
    assert "closed while its loop was waiting" in str(caught[0])
    # The rest of the batch is not read.
    assert len(reads) < 20


@pytest.mark.parametrize("n_readers", [1, 2])
def test_a_loop_that_the_garbage_collector_ends_in_its_own_reader(n_readers: int) -> None:
    dropped = threading.Event()

    def reading(i: int) -> Iterator[int]:
        if i == 9:
            dropped.wait(10)
            gc.collect()
        yield i

    class Cycle:
        def __init__(self) -> None:
            self.me = self
            self.loop = iter(wrapped(40, get_output=reading, depth=3, n_readers=n_readers))

    gc.disable()
    try:
        cycle = Cycle()
        next(cycle.loop)
        next(cycle.loop)
        del cycle
        dropped.set()
        while left := [
            thread for thread in threading.enumerate() if thread.name.startswith("pinfeed")
        ]:
            left[0].join(10)
            assert not left[0].is_alive(), "a thread waits for itself"
    finally:
        gc.enable()


# ---- resuming, numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "n_readers"), PACES)
def test_a_resumed_epoch_reads_what_is_left(depth: int, n_readers: int) -> None:
    arguments: dict[str, Any] = {"shuffle": True, "seed": 1, "depth": depth, "n_readers": n_readers}
    with wrapped(20, **arguments) as feeder:
        list(feeder)
        loop = iter(feeder)
        done = [next(loop)[1].tolist() for _ in range(3)]
        state = feeder.state_dict()
        rest = labels(loop)
    reads: list[int] = []
    with wrapped(20, get_output=lambda i: [reads.append(i) or i], **arguments) as feeder:
        feeder.load_state_dict(state)
        assert feeder.epoch == 1
        assert labels(feeder) == rest
        assert not set(reads) & {i for batch in done for i in batch}
        assert len(reads) == 14


def test_a_state_of_something_else() -> None:
    state = wrapped(20, shuffle=True).state_dict()
    for arguments, message in (
        ({"n": 19, "shuffle": True}, "identities was 20, is 19"),
        ({"n": 20}, "order was"),
        ({"n": 20, "shuffle": True, "batch_size": 4}, "batch_size was 2, is 4"),
        ({"n": 20, "shuffle": True, "one_read_count": 2}, "one_read_count was 1, is 2"),
        ({"n": 20, "shuffle": True, "drop_last": True}, "drop_last was False, is True"),
    ):
        with pytest.raises(errors.ArgumentError, match=message):
            wrapped(**arguments).load_state_dict(state)


@pytest.mark.parametrize("depth", [0, 2])
def test_stats_and_timeline(device: Any, depth: int) -> None:
    feeder = wrapped(5, **several(2), batch_size=4, depth=depth, device=device, timeline=True)
    assert feeder.device == "cpu"
    list(feeder)
    assert (feeder.stats.batches, feeder.stats.rows, feeder.stats.bytes) == (3, 10, 10 * (24 + 8))
    lanes = collections.Counter(span.lane for span in feeder.timeline.spans)
    assert lanes["read"] == lanes["compute"] == 3


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    list(wrapped(progress=True))
    assert "3/3" in capsys.readouterr().err

"""wrap_readers: batches of samples that functions read, their order and their state."""

import collections
import json
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reader_functions import (
    DEPTHS,
    DEPTHS_AND_READERS,
    DEVICES,
    StagingDevice,
    several,
    stack,
    wrapped,
)
from support.schedules import SLOTS, STREAMS, randomly

from pinfeed import errors, rows
from pinfeed.testing import SimDevice, favour, lazy


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Any:
    return DEVICES[request.param]()


def labels(batches: Any) -> list[list[int]]:
    return [y.tolist() for _, y in batches]


def synchronous(
    n: int, count: int, n_identities: int, order: Any, epoch: int, drop_last: bool
) -> list[list[int]]:
    """Return the samples of each batch, as a plain loop would read them."""
    identities = order.bind(n, epoch)(np.arange(n)).tolist()
    cut = [identities[i : i + n_identities] for i in range(0, n, n_identities)]
    if drop_last and cut and len(cut[-1]) < n_identities:
        cut.pop()
    return [[100 * i + k for i in batch for k in range(count)] for batch in cut]


# ---- the same batches ----------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    n=st.integers(0, 11),
    count=st.integers(1, 3),
    n_identities=st.integers(1, 5),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
    drop_last=st.booleans(),
    depth_and_readers=st.sampled_from(DEPTHS_AND_READERS),
    staged=st.booleans(),
    applied=st.booleans(),
    resume=st.integers(0, 4),
)
def test_the_batches_of_the_synchronous_loop(
    n: int,
    count: int,
    n_identities: int,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    depth_and_readers: tuple[int, int],
    staged: bool,
    applied: bool,
    resume: int,
) -> None:
    order = rows.shuffled(seed) if shuffle else rows.sequential()
    arguments: dict[str, Any] = {
        **several(count),
        "batch_size": n_identities * count,
        "shuffle": shuffle,
        "seed": seed,
        "drop_last": drop_last,
        "depth": depth_and_readers[0],
        "n_readers": depth_and_readers[1],
        "device": StagingDevice() if staged else "cpu",
    }
    if applied:
        arguments |= {"apply_on_input_batch": stack, "apply_on_output_batch": stack}
    with wrapped(n, **arguments) as feeder:
        state = None
        for epoch in range(2):
            wanted = synchronous(n, count, n_identities, order, epoch, drop_last)
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
            wanted = wanted[resume:] or synchronous(n, count, n_identities, order, 2, drop_last)
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
@pytest.mark.parametrize(("depth", "n_readers"), [*DEPTHS_AND_READERS, (4, 2)])
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
                    # The batch belongs to the user, who may change it.
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


# ---- samples and batches -------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_kinds_of_samples(name: str, device: Any) -> None:
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


@pytest.mark.parametrize(("depth", "n_readers"), DEPTHS_AND_READERS)
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


@pytest.mark.parametrize(("depth", "n_readers"), DEPTHS_AND_READERS)
def test_apply_may_fill_one_array_again(device: Any, depth: int, n_readers: int) -> None:
    buffer = np.empty((2, 2, 3), np.float32)

    def fill(samples: Iterator[np.ndarray]) -> np.ndarray:
        for place, sample in zip(buffer, samples, strict=True):
            place[:] = sample
        return buffer

    kept = list(wrapped(apply_on_input_batch=fill, depth=depth, n_readers=n_readers, device=device))
    assert [x[:, 0, 0].tolist() for x, _ in kept] == [[0, 1], [2, 3], [4, 5]]
    # A batch belongs to the user: changing it changes no buffer.
    kept[0][0].fill_(7)
    assert buffer.max() == 5


class Bag:
    """An object with a method ``to``."""

    def to(self, device: Any) -> "Bag":
        return self


@pytest.mark.parametrize(("depth", "n_readers"), DEPTHS_AND_READERS)
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


# ---- resuming, numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "n_readers"), DEPTHS_AND_READERS)
def test_a_resumed_epoch_reads_only_the_rest(depth: int, n_readers: int) -> None:
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

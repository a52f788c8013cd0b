"""wrap_dataset: batches equal those of a slow loop, for any number of threads, and when resumed."""

import collections
import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from pinfeed import Ranks, rows, wrap_dataset
from pinfeed.tensors.transform_calls import seeded_generator
from pinfeed.testing import SimDevice, favour

Pair = collections.namedtuple("Pair", ["x", "y"])
THREADS = [1, 2, 4, 8]


class Marked(torch.Tensor):
    """A subclass of tensors."""


def same(a: Any, b: Any) -> bool:
    """Return whether two batches have the same structure, and are equal bit for bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        a, b = a.resolve_conj().contiguous(), b.resolve_conj().contiguous()
        is_like = a.dtype == b.dtype and a.shape == b.shape
        return is_like and bytes(a.flatten().view(torch.uint8).tolist()) == bytes(
            b.flatten().view(torch.uint8).tolist()
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def augment(i: int, generator: torch.Generator, rng: np.random.Generator) -> Any:
    return i, torch.rand(2, generator=generator), rng.random(3), torch.randint(100, (2,))


def slow(n: int, size: int, order: Any, seed: int, epoch: int, drop_last: bool) -> list[Any]:
    """Return the batches of an epoch, from the definition."""
    indices = order.bind(n, epoch)(np.arange(n)).tolist()
    samples = []
    for i in indices:
        generator = seeded_generator("cpu", (seed, epoch, i, 2))
        rng = np.random.default_rng((seed, epoch, i, 2))
        x = torch.rand(2, generator=generator)
        y = torch.randint(100, (2,), generator=generator)
        samples.append((i, x, rng.random(3), y))
    cut = [samples[i : i + size] for i in range(0, n, size)]
    if drop_last and cut and len(cut[-1]) < size:
        cut.pop()
    return [default_collate(samples) for samples in cut]


@settings(max_examples=60)
@given(
    n=st.integers(1, 11),
    size=st.integers(1, 5),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
    drop_last=st.booleans(),
    threads=st.sampled_from(THREADS),
    depth=st.integers(0, 3),
    resume=st.integers(0, 11),
)
def test_batches_are_those_of_the_definition(
    n: int,
    size: int,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    threads: int,
    depth: int,
    resume: int,
) -> None:
    size = min(n, size)
    order = rows.shuffled(seed) if shuffle else rows.sequential()
    arguments: dict[str, Any] = {
        "batch_size": size,
        "rows": order,
        "seed": seed,
        "drop_last": drop_last,
        "threads": threads,
        "depth": depth,
        "device": "cpu",
    }
    state = None
    with wrap_dataset(range(n), augment, **arguments) as feeder:
        for epoch in range(2):
            wanted = slow(n, size, order, seed, epoch, drop_last)
            got = []
            for batch in feeder:
                got.append(batch)
                if epoch == 1 and len(got) == resume:
                    state = json.loads(json.dumps(feeder.state_dict()))
            assert same(got, wanted)
    if state is not None:
        with wrap_dataset(range(n), augment, **arguments) as feeder:
            feeder.load_state_dict(state)
            rest = wanted[resume:] or slow(n, size, order, seed, 2, drop_last)
            assert same(list(feeder), rest)


LEAVES: dict[str, Any] = {
    **{
        str(dtype): lambda i, dtype=dtype: torch.full((2,), i % 2).to(dtype)
        for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64)
    },
    "float8": lambda i: torch.full((2,), i).to(torch.float8_e5m2),
    "empty tensor": lambda i: torch.empty(0, 3),
    "scalar tensor": lambda i: torch.tensor(i),
    "strided": lambda i: (torch.arange(12.0) + i).reshape(3, 4).t()[::2],
    "expanded": lambda i: torch.full((1,), i).expand(4),
    "conj": lambda i: torch.full((2,), 1j * i).conj(),
    "large conj": lambda i: torch.full((9000,), 1j * i).conj(),
    "large": lambda i: torch.full((200, 100), float(i)).t(),
    "nan": lambda i: torch.tensor([float("nan"), -0.0, float(i)]),
    "subclass": lambda i: torch.full((2,), i).as_subclass(Marked),
    "array": lambda i: np.full((2, 3), i, np.float32),
    "scalar array": lambda i: np.array(i, np.int16),
    "reversed array": lambda i: np.arange(i, i + 6)[::-1],
    "numpy number": lambda i: np.float32(i),
    "numpy bool": lambda i: np.bool_(i % 2),
    "numpy string": lambda i: np.str_(i),
    "bool": lambda i: i % 2 == 0,
    "int": lambda i: i,
    "float": lambda i: i / 3,
    "str": str,
    "bytes": lambda i: str(i).encode(),
    "big-endian": lambda i: np.full(2, i, ">f4"),
    "bfloat16 of numpy": lambda i: np.full(2, i, ml_dtypes.bfloat16),
    "none": lambda i: None,
    "object": lambda i: object(),
    "datetime": lambda i: np.datetime64("2020-01-01"),
    "no elements": lambda i: (),
}
STRUCTURES: dict[str, Any] = {
    "leaf": lambda a, b: a,
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"x": a, 3: b},
    "named tuple": Pair,
    "one in a tuple": lambda a, b: (a,),
    "nested": lambda a, b: (a, (b,)),
    "nested dict": lambda a, b: [{"x": (a, [b])}, b],
    "default dict": lambda a, b: collections.defaultdict(list, x=a, y=b),
    "with empty ones": lambda a, b: ([], a, {}, b),
}


def outcome(make: Any) -> Any:
    try:
        return make()
    except Exception as error:
        return type(error)


@settings(max_examples=150)
@given(
    structure=st.sampled_from(list(STRUCTURES)),
    first=st.sampled_from(list(LEAVES)),
    second=st.sampled_from(list(LEAVES)),
    threads=st.sampled_from(THREADS),
    depth=st.sampled_from([0, 2]),
)
def test_any_structure_is_that_of_default_collate(
    structure: str, first: str, second: str, threads: int, depth: int
) -> None:
    def sample(i: int) -> Any:
        return STRUCTURES[structure](LEAVES[first](i), LEAVES[second](i + 7))

    def loop() -> Any:
        feeder = wrap_dataset(
            range(7), sample, batch_size=3, threads=threads, depth=depth, device="cpu"
        )
        return list(feeder)

    cut = [range(3), range(3, 6), range(6, 7)]
    wanted = outcome(lambda: [default_collate([sample(i) for i in part]) for part in cut])
    got = outcome(loop)
    assert got is wanted if isinstance(wanted, type) else same(got, wanted)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("names", [(), ("pinfeed-sample", "read"), ("pinfeed-read", "compute")])
def test_a_simulated_device(names: tuple[str, ...], depth: int, threads: int) -> None:
    device = SimDevice(favour(*names))
    seen: list[Any] = []
    with wrap_dataset(
        range(10), augment, batch_size=3, threads=threads, depth=depth, device=device
    ) as feeder:
        for _, x, *_ in feeder:
            device.launch(lambda x: seen.append(torch.from_numpy(x.copy())), x)
            del x
    device.drain()
    assert same(seen, [b[1] for b in slow(10, 3, rows.sequential(), 0, 0, False)])


def by_index(batches: Any) -> dict[int, Any]:
    return {i: x for ids, x, *_ in batches for i, x in zip(ids.tolist(), x.tolist(), strict=True)}


def test_the_batch_size_does_not_change_a_sample() -> None:
    found = [
        by_index(wrap_dataset(range(12), augment, batch_size=size, shuffle=True, device="cpu"))
        for size in (1, 5, 12)
    ]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 12


def test_other_numbers_of_ranks_continue_an_epoch() -> None:
    def feeders(world: int) -> list[Any]:
        return [
            wrap_dataset(
                range(36),
                augment,
                batch_size=6,
                shuffle=True,
                ranks=Ranks("pad", split_batches=True, rank=rank, world_size=world),
                device="cpu",
            )
            for rank in range(world)
        ]

    whole = by_index(wrap_dataset(range(36), augment, batch_size=6, shuffle=True, device="cpu"))
    found: dict[int, Any] = {}
    state = None
    for world, steps in ((1, 2), (3, 2), (2, 2)):
        for feeder in feeders(world):
            if state is not None:
                feeder.load_state_dict(state)
            loop = iter(feeder)
            got = by_index([next(loop) for _ in range(steps)])
            assert not found.keys() & got.keys()
            found |= got
            after = feeder.state_dict()
            feeder.close()
        state = after
    assert found == whole


def test_an_empty_dataset_has_no_batches() -> None:
    feeder = wrap_dataset([], batch_size=2, device="cpu")
    assert list(feeder) == []


@pytest.mark.parametrize("threads", THREADS)
def test_numbers_of_collate_do_not_depend_on_threads(threads: int) -> None:
    def mix(samples: list[Any]) -> Any:
        return torch.tensor(samples) + torch.rand(1)

    torch.manual_seed(threads)
    feeder = wrap_dataset(range(9), collate_fn=mix, batch_size=2, threads=threads, device="cpu")
    wanted = [
        torch.tensor([*range(i, min(i + 2, 9))])
        + torch.rand(1, generator=seeded_generator("cpu", (0, 0, i, 3)))
        for i in range(0, 9, 2)
    ]
    assert same(list(feeder), wanted)


@pytest.mark.parametrize("depth", [0, 2])
def test_modes_of_the_loop_do_not_reach_samples(depth: int) -> None:
    def sample(i: int) -> Any:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_num_threads()

    with torch.no_grad(), torch.autocast("cpu"):
        before = torch.get_num_threads()
        [batch] = wrap_dataset(range(1), sample, batch_size=1, depth=depth, device="cpu")
        assert torch.get_num_threads() == before
    assert [x.item() for x in batch] == [True, False, 1]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("reproducible", [False, True])
def test_batches_are_collated_outside_of_the_modes(depth: int, reproducible: bool) -> None:
    def collate(samples: list[int]) -> tuple[list[int], bool]:
        return samples, torch.is_grad_enabled()

    given: dict[str, Any] = {"depth": depth, "reproducible": reproducible}
    with torch.no_grad(), wrap_dataset(range(4), batch_size=2, collate_fn=collate, **given) as made:
        assert list(made) == [([0, 1], True), ([2, 3], True)]

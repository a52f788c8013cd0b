"""ReplayBuffer: its batches equal those of a plain buffer that draws equally early."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.replay import PlainReplay, batches_drawn_ahead, steps_of

import pinfeed
from pinfeed.errors import ArgumentError, StoreError
from pinfeed.tensors.numpy_torch import bytes_by_row, memory_of
from pinfeed.testing.sim import SimDevice

FLAT = {
    "obs": ((3,), "float32"),
    "action": ((), "int64"),
    "reward": ((), "float32"),
    "done": ((), "bool"),
    "truncated": ((), "bool"),
    "next_obs": ((3,), "float32"),
}
STACK = FLAT | {"obs": ((3, 2, 4), "uint8"), "next_obs": ((3, 2, 4), "uint8")}
NEXT = {"next_of": {"next_obs": "obs"}}


def buffer_of(plain: PlainReplay, parts: Any, **options: Any) -> pinfeed.ReplayBuffer:
    return pinfeed.ReplayBuffer(
        plain.n_steps * plain.n_envs,
        parts,
        n_envs=plain.n_envs,
        n_steps=plain.window,
        gamma=plain.gamma,
        generator=np.random.RandomState(plain.random.get_state()[1][0]),
        **options,
    )


def require_equal(batch: dict[str, torch.Tensor], expected: dict[str, Any]) -> None:
    assert {name for name in batch if name not in ("row", "weight")} == expected.keys()
    for name, value in expected.items():
        found = memory_of(batch[name])
        assert found.dtype == value.dtype, name
        assert (bytes_by_row(found) == bytes_by_row(value)).all(), name


def compare(
    plain: PlainReplay, buffer: pinfeed.ReplayBuffer, steps: Any, n: int = 12, **options: Any
) -> None:
    """Draw batches while steps are added, from a plain buffer as well."""
    depth = options.get("depth", 0)
    expected = batches_drawn_ahead(plain, 7, depth)
    for batch in buffer.batches(7, n=n, device="cpu", **options):
        require_equal(batch, next(expected))
        for step in itertools.islice(steps, 2):
            plain.add(**step)
            buffer.add(**step)


@settings(max_examples=60)
@given(
    n_steps=st.integers(1, 12),
    n_envs=st.integers(1, 3),
    n_before=st.integers(1, 30),
    depth=st.integers(0, 3),
    window=st.integers(1, 4),
    kind=st.sampled_from(["apart", "flat", "frames", "short"]),
    seed=st.integers(0, 99),
)
def test_batches_equal_a_plain_buffers(
    n_steps: int, n_envs: int, n_before: int, depth: int, window: int, kind: str, seed: int
) -> None:
    parts = STACK if kind == "frames" else FLAT
    if kind == "short":
        parts = {name: part for name, part in FLAT.items() if name != "truncated"}
    options: dict[str, Any] = {} if kind == "apart" else dict(NEXT)
    if kind == "frames":
        options["stacked"] = "obs"
    plain = PlainReplay(n_steps, n_envs, seed, window)
    buffer = buffer_of(plain, parts, **options)
    steps = steps_of(np.random.default_rng(seed), parts, n_envs, stacked=kind == "frames")
    for step in itertools.islice(steps, n_before):
        plain.add(**step)
        buffer.add(**step)
    assert len(buffer) == min(n_before, n_steps) * n_envs
    compare(plain, buffer, steps, depth=depth)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float16", "bfloat16", "float64", "bool"])
def test_observations_have_any_dtype(dtype: str) -> None:
    parts = FLAT | {"obs": ((5,), dtype), "next_obs": ((5,), dtype)}
    buffer = pinfeed.ReplayBuffer(9, parts, **NEXT)
    values = torch.arange(5).to(getattr(torch, dtype))
    for reward in range(20):
        step = {"action": 1, "reward": reward, "done": False, "truncated": False}
        array = memory_of(values)
        buffer.add(obs=array, next_obs=array, **step)
    (batch,) = buffer.batches(4, n=1, device="cpu")
    assert torch.equal(batch["next_obs"], values.expand(4, 5))


def test_steps_are_numbers_and_tensors_of_any_dtype() -> None:
    numbers: dict[str, list[Any]] = {
        "bool": [True, np.bool_(False)],
        "uint8": [200, np.int64(7), True, torch.tensor(9)],
        "int64": [-(2**63), 2**63 - 1, np.int16(8), np.int8(-3)],
        "float32": [0.1, 3, np.float64(0.3), -np.inf, 3.4e38, torch.tensor(0.5).bfloat16()],
        "float16": [torch.tensor(0.5, requires_grad=True)],
        "bfloat16": [0.1, 3, np.inf, np.float32(2.5), torch.tensor(0.1)],
        "complex64": [0.1, 1j],
    }
    for dtype, values in numbers.items():
        for shape in ((), (2,)):
            buffer = pinfeed.ReplayBuffer(len(values), {"x": (shape, dtype)})
            expected = torch.zeros(len(values), *shape, dtype=getattr(torch, dtype))
            for i, value in enumerate(values):
                number = torch.as_tensor(value)
                expected[i] = number
                buffer.add(x=value if shape == () else number.expand(shape))
            found = buffer.state_dict()["parts"]["x"]
            assert torch.equal(found, expected), dtype


def test_shared_frames_take_their_own_memory_only() -> None:
    stored = {
        stacked: pinfeed.ReplayBuffer(1000, STACK, **NEXT, stacked=stacked).nbytes
        for stacked in ("obs", ())
    }
    apart = pinfeed.ReplayBuffer(1000, STACK).nbytes
    frame = 8
    numbers = 16
    assert stored["obs"] < apart - 1000 * (5 * frame - 3 * numbers) + 100 * frame
    assert stored[()] < apart - 1000 * (3 * frame - numbers) + 100 * 3 * frame


def test_frames_that_never_repeat_are_kept() -> None:
    plain = PlainReplay(40, 1, 0)
    buffer = buffer_of(plain, STACK, **NEXT, stacked="obs")
    before = buffer.nbytes
    steps = steps_of(np.random.default_rng(0), STACK, 1, p_end=1.0)
    for step in itertools.islice(steps, 150):
        plain.add(**step)
        buffer.add(**step)
    assert buffer.nbytes > before
    compare(plain, buffer, steps, depth=2)


def test_a_loop_ahead_of_a_tiny_buffer_never_waits_forever() -> None:
    plain = PlainReplay(1, 1, 0)
    buffer = buffer_of(plain, FLAT)
    steps = steps_of(np.random.default_rng(0), FLAT, 1)
    step = next(steps)
    plain.add(**step)
    buffer.add(**step)
    compare(plain, buffer, steps, n=200, depth=3)


@pytest.mark.parametrize("depth", [0, 2])
def test_an_actor_in_another_thread_tears_no_transition(depth: int) -> None:
    parts = {"obs": ((64,), "int64"), "action": ((), "int64"), "next_obs": ((64,), "int64")}
    buffer = pinfeed.ReplayBuffer(8, parts, **NEXT)
    buffer.add(obs=np.full(64, 0), action=0, next_obs=np.full(64, 1))
    has_ended = threading.Event()

    def act() -> None:
        for i in itertools.count(1):
            if has_ended.is_set():
                return
            buffer.add(obs=np.full(64, i), action=i, next_obs=np.full(64, i + 1))

    actor = threading.Thread(target=act)
    actor.start()
    try:
        for batch in buffer.batches(128, n=100, depth=depth, device="cpu"):
            assert (batch["obs"] == batch["action"][:, None]).all()
            assert (batch["next_obs"] == batch["action"][:, None] + 1).all()
    finally:
        has_ended.set()
        actor.join()


def test_a_left_loop_does_not_hold_up_the_actor() -> None:
    buffer = pinfeed.ReplayBuffer(2, {"x": ((), "int64")})
    buffer.add(x=0)
    feeder = buffer.batches(4, depth=3, device="cpu")
    older = iter(feeder)
    next(older)
    newer = iter(feeder)
    next(newer)
    feeder.close()
    for x in range(10):
        buffer.add(x=x)
    (batch,) = buffer.batches(4, n=1, device="cpu")
    assert set(batch["x"].tolist()) <= {8, 9}


def test_an_error_of_a_transform_does_not_hold_up_the_actor() -> None:
    def fail(batch: Any) -> Any:
        raise ZeroDivisionError

    buffer = pinfeed.ReplayBuffer(1, {"x": ((), "int64")})
    buffer.add(x=0)
    with pytest.raises(ZeroDivisionError):
        next(iter(buffer.batches(4, depth=2, device="cpu", device_transform=fail)))
    buffer.add(x=1)


def test_a_simulated_device_gets_the_same_batches() -> None:
    plain = PlainReplay(50, 2, 3, window=2)
    buffer = buffer_of(plain, STACK, **NEXT, stacked="obs")
    steps = steps_of(np.random.default_rng(0), STACK, 2, stacked=True)
    for step in itertools.islice(steps, 60):
        plain.add(**step)
        buffer.add(**step)
    device = SimDevice()
    found: list[list[Any]] = []
    expected = batches_drawn_ahead(plain, 5, 2)

    def keep(*values: Any) -> None:
        found.append([value.copy() for value in values])

    with buffer.batches(5, n=6, depth=2, device=device) as feeder:
        for batch in feeder:
            names = list(batch)
            device.launch(keep, *batch.values())
        assert feeder.plan.device_bytes > 0
    device.drain()
    for values in found:
        batch = dict(zip(names, values, strict=True))
        for name, value in next(expected).items():
            assert np.array_equal(batch[name], value), name
    assert len(found) == 6


def test_a_device_transform_changes_the_batches() -> None:
    buffer = pinfeed.ReplayBuffer(10, {"x": ((2,), "uint8")})
    buffer.add(x=np.full(2, 255, "uint8"))
    halved = buffer.batches(3, n=2, device="cpu", device_transform=lambda b: b["x"] / 255)
    assert [batch.tolist() for batch in halved] == [[[1.0, 1.0]] * 3] * 2


@pytest.mark.parametrize("alpha", [None, 0.6])
def test_a_resumed_run_has_the_same_batches(alpha: float | None, tmp_path: Any) -> None:
    def make() -> pinfeed.ReplayBuffer:
        options: dict[str, Any] = {"stacked": "obs", "n_steps": 3, "alpha": alpha, **NEXT}
        return pinfeed.ReplayBuffer(30, STACK, n_envs=2, **options)

    def train(buffer: pinfeed.ReplayBuffer, steps: list[Any]) -> list[Any]:
        found = []
        for batch, step in zip(buffer.batches(6, n=len(steps), device="cpu"), steps, strict=True):
            found.append({name: memory_of(value).copy() for name, value in batch.items()})
            buffer.add(**step)
            if alpha is not None:
                buffer.update_priorities(batch["row"], batch["reward"])
        return found

    made = steps_of(np.random.default_rng(1), STACK, 2, stacked=True)
    steps = list(itertools.islice(made, 60))
    buffer = make()
    buffer.add(**steps[0])
    train(buffer, steps[1:40])
    pinfeed.checkpoint.save(tmp_path / "checkpoint", buffer=buffer)
    expected = train(buffer, steps[40:])
    resumed = make()
    resumed.add(**steps[5])
    pinfeed.checkpoint.resume(tmp_path / "checkpoint", buffer=resumed)
    assert len(resumed) == len(buffer)
    for batch, other in zip(train(resumed, steps[40:]), expected, strict=True):
        assert batch.keys() == other.keys()
        assert all(np.array_equal(batch[name], other[name]) for name in batch)


def test_a_buffer_in_files_has_the_same_batches(tmp_path: Any) -> None:
    plain = PlainReplay(40, 1, 5)
    buffer = buffer_of(plain, STACK, **NEXT, stacked="obs", path=tmp_path / "replay")
    # Episodes of one step need more frames than the first file holds.
    steps = steps_of(np.random.default_rng(0), STACK, 1, p_end=1.0)
    for step in itertools.islice(steps, 150):
        plain.add(**step)
        buffer.add(**step)
    compare(plain, buffer, steps, depth=2)
    names = {path.name for path in (tmp_path / "replay").iterdir()}
    assert names == {"obs.npy", "action.npy", "reward.npy", "done.npy", "truncated.npy"}
    with buffer.batches(7) as feeder:
        assert feeder.plan.page_cache_bytes == buffer.nbytes
    with pytest.raises(StoreError, match="new or empty folder"):
        pinfeed.ReplayBuffer(40, STACK, path=tmp_path / "replay")


@pytest.mark.parametrize("after", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("done", [True, False])
def test_a_reward_after_a_window_does_not_change_its_return(after: float, done: bool) -> None:
    parts: dict[str, Any] = {"reward": ((), "float32"), "done": ((), "bool")}
    buffer = pinfeed.ReplayBuffer(2, parts, n_steps=3, gamma=0.5)
    # The window of the reward 2 ends with its episode, or with the latest step, after which the
    # oldest step follows in the ring.
    for reward in (2.0, after) if done else (after, 2.0):
        buffer.add(reward=reward, done=done)
    (batch,) = buffer.batches(50, n=1, device="cpu")
    returns = batch["reward"].numpy()
    np.testing.assert_array_equal(np.unique(returns[np.isfinite(returns)]), [2.0])
    assert not np.isfinite(returns).all()


def test_the_plan_counts_the_transitions() -> None:
    buffer = pinfeed.ReplayBuffer(100, FLAT, alpha=0.5)
    with buffer.batches(7, depth=2, device="cpu") as feeder:
        by_use = {item.what: item.total for item in feeder.plan.items}
        assert by_use["transitions"] == buffer.nbytes
        assert feeder.plan.batch_size == 7
        with pytest.raises(TypeError, match="no len"):
            len(feeder)
    assert len(buffer.batches(7, n=5, device="cpu")) == 5


STEP = {
    "obs": np.zeros(3, "float32"),
    "action": 1,
    "reward": 0.5,
    "done": False,
    "truncated": False,
    "next_obs": np.zeros(3, "float32"),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"obs": np.zeros(4)}, r"add\(obs=...\): got shape \(4,\); expected \(1, 3\) or \(3,\)"),
        ({"action": 0.5}, "got float64; expected int64"),
        ({"action": [[1], [2, 3]]}, "numpy cannot read a list"),
        ({"more": 1}, r"expected obs, action"),
        ({"action": 2**70}, "got object; expected int64"),
        ({"reward": 1e300}, "got 1e\\+300; expected the numbers of float32.* give a wider one"),
        ({"obs": np.array([0, -np.inf, 1e39])}, "got 1e\\+39; expected the numbers of float32"),
        ({"done": 1}, r"got int64; expected bool.* convert it with .astype\('bool'\)"),
        ({"obs": torch.zeros(3, device="meta")}, r"give tensor.cpu\(\) for a tensor on a GPU"),
        ({"action": np.array(2**63, "uint64")}, "got 9223372036854775808; expected .* of int64"),
        ({"next_obs": "right"}, r"add\(next_obs=...\): got shape \(\); expected \(1, 3\)"),
    ],
)
def test_a_wrong_step_adds_nothing(change: Any, message: str) -> None:
    buffer = pinfeed.ReplayBuffer(10, FLAT)
    with pytest.raises(ArgumentError, match=message):
        buffer.add(**{**STEP, **change})
    assert len(buffer) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity=0"),
        ({"parts": {}}, "the shape and the dtype of each part"),
        ({"parts": {"row": ((), "int64")}}, "none of discount, weight, row"),
        ({"parts": {"x": ((0,), "int64")}}, "expected a shape and a dtype"),
        ({"next_of": {"next_obs": "action"}}, "two parts of one shape and dtype"),
        ({"next_of": {"after": "before"}}, "two parts of one shape and dtype"),
        ({"stacked": "action"}, "whose first axis has the frames"),
        ({"n_steps": 3, "parts": {"x": ((), "int64")}}, "'reward', of float32, and 'done'"),
        ({"alpha": "high"}, "alpha='high': expected a number"),
        ({"generator": 3}, "expected a generator of numpy"),
        ({"beta": 0.6}, "beta=0.6 .*without alpha.* give alpha=0.6, or leave them out"),
        ({"epsilon": 0.1}, "epsilon=0.1 without alpha"),
        ({"generator": np.random.default_rng(0), "seed": 3}, "seed=3 with .* leave seed out"),
        ({"gamma": 1.5}, "gamma=1.5: expected a number, at least 0 and at most 1"),
        ({"gamma": -0.5}, "gamma=-0.5: expected a number, at least 0"),
        ({"next_of": {"obs": "next_obs"}}, "swapped; .* give next_of={'next_obs': 'obs'}"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"capacity": 10, "parts": FLAT, **options}
    with pytest.raises(ArgumentError, match=message):
        pinfeed.ReplayBuffer(**arguments)


def test_an_empty_buffer_has_nothing_to_draw() -> None:
    buffer = pinfeed.ReplayBuffer(10, FLAT)
    with pytest.raises(ArgumentError, match=r"call add\(\) first"):
        next(iter(buffer.batches(4, device="cpu")))
    with pytest.raises(ArgumentError, match="give alpha"):
        buffer.update_priorities([0], [1.0])


def test_a_state_of_another_buffer_changes_nothing() -> None:
    buffer = pinfeed.ReplayBuffer(10, FLAT)
    buffer.add(**STEP)
    for other in (
        pinfeed.ReplayBuffer(11, FLAT),
        pinfeed.ReplayBuffer(10, FLAT, alpha=0.5),
        pinfeed.ReplayBuffer(10, FLAT, generator=np.random.RandomState(0)),
    ):
        with pytest.raises(ArgumentError, match="earlier run"):
            buffer.load_state_dict(other.state_dict())
    assert len(buffer) == 1


def test_a_damaged_state_changes_nothing() -> None:
    buffers = [pinfeed.ReplayBuffer(10, FLAT) for _ in range(2)]
    for buffer in buffers:
        for _ in range(5):
            buffer.add(**STEP)
    state = {**buffers[1].state_dict(), "n_added": 3}
    for _ in buffers[1].batches(4, n=3, device="cpu"):
        pass
    state["generator"] = buffers[1].state_dict()["generator"]
    state["parts"] = dict.fromkeys(state["parts"], "no tensor")
    with pytest.raises(AttributeError):
        buffers[0].load_state_dict(state)
    same = pinfeed.ReplayBuffer(10, FLAT).state_dict()["generator"]
    assert buffers[0].state_dict()["generator"] == same
    assert len(buffers[0]) == 5


def test_a_state_does_not_change_while_an_actor_adds() -> None:
    for n_next in ({}, {"next_of": {"next_obs": "obs"}}):
        parts: dict[str, Any] = {"obs": ((9,), "int64"), "next_obs": ((9,), "int64")}
        buffer = pinfeed.ReplayBuffer(50, parts, **n_next)  # type: ignore[arg-type]

        def add(k: int, buffer: pinfeed.ReplayBuffer = buffer) -> None:
            buffer.add(obs=np.full(9, k), next_obs=np.full(9, k + 1))

        for k in range(70):
            add(k)
        state = buffer.state_dict()
        for k in range(70, 140):
            add(k)
        other = pinfeed.ReplayBuffer(50, parts, **n_next)  # type: ignore[arg-type]
        other.load_state_dict(state)
        (batch,) = other.batches(500, n=1, device="cpu")
        assert set(batch["obs"].unique().tolist()) <= set(range(20, 70))
        assert (batch["obs"] == batch["obs"][:, :1]).all()
        assert (batch["next_obs"] == batch["obs"] + 1).all()


@pytest.mark.parametrize("change", [{"n_steps": 1}, {"gamma": 0.5}, {"alpha": 0.9}])
def test_a_state_of_other_windows_or_priorities_is_refused(change: dict[str, Any]) -> None:
    parts: dict[str, Any] = {"obs": ((), "int64"), "reward": ((), "float32"), "done": ((), "bool")}
    given: dict[str, Any] = {"n_steps": 3, "gamma": 0.9, "alpha": 0.6}
    buffer = pinfeed.ReplayBuffer(20, parts, **given)
    buffer.add(obs=1, reward=1.0, done=False)
    state = buffer.state_dict()
    pinfeed.ReplayBuffer(20, parts, **given).load_state_dict(state)
    with pytest.raises(ArgumentError, match="make the buffer with the"):
        pinfeed.ReplayBuffer(20, parts, **{**given, **change}).load_state_dict(state)

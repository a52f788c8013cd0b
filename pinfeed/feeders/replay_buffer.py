"""ReplayBuffer: transitions of an agent that learns from random ones while it adds others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from pinfeed.devices import DeviceLike
from pinfeed.errors import ArgumentError, StoreError
from pinfeed.feeders.base_feeder import LoopOptions
from pinfeed.feeders.replay_draws import Generator, PrioritizedDraws, UniformDraws
from pinfeed.feeders.replay_feeder import ReplayFeeder, ReplaySource
from pinfeed.memory.limits import check_depth
from pinfeed.stores.ring_layout import RingLayout, checked_parts
from pinfeed.stores.transition_ring import Draw, TransitionRing
from pinfeed.tensors.argument_types import BatchFunction, DTypeLike, Numbers, State
from pinfeed.validation.arguments import (
    check_path,
    check_seed,
    explain_arguments,
    real_number,
    whole_number,
)


class ReplayBuffer:
    """The latest transitions of an agent, which learns from random ones while it adds others.

    One thread may add transitions while others draw batches. A batch never contains a part of one
    transition and a part of another: a call of ``add`` that would overwrite a transition of a batch
    waits until the batch has been gathered, which takes as long as a copy.

    Observations of parts in ``next_of`` are stored once, because the next observation of one step
    is usually the observation of the next step. ``add`` compares their bytes, so observations at
    the end of an episode, which differ, are kept as well. With ``stacked``, the same holds for
    each frame of an observation.

    Examples:
        >>> parts = {
        ...     "obs": ((4,), "float32"),
        ...     "action": ((), "int64"),
        ...     "reward": ((), "float32"),
        ...     "done": ((), "bool"),
        ...     "next_obs": ((4,), "float32"),
        ... }
        >>> buffer = pinfeed.ReplayBuffer(1000, parts, next_of={"next_obs": "obs"})
        >>> obs = np.zeros(4, "float32")
        >>> for step in range(50):
        ...     buffer.add(obs=obs, action=0, reward=1.0, done=False, next_obs=obs)
        >>> for batch in buffer.batches(32, n=3):
        ...     loss = batch["next_obs"].mean()
        >>> batch["obs"].shape
        torch.Size([32, 4])

    Args:
        capacity: Number of transitions, of all environments together. Each environment has
            ``capacity // n_envs`` of them.
        parts: Shape and dtype of each part of a transition, such as
            ``{"obs": ((4, 84, 84), "uint8"), "action": ((), "int64")}``.
        n_envs: Number of environments that are stepped together.
        next_of: Parts that are the observation after a step, and the parts they follow, such as
            ``{"next_obs": "obs"}``. Both must have the same shape and dtype. None stores all parts
            separately.
        stacked: Names of observations in ``next_of`` whose first axis is a stack of frames.
        n_steps: Number of steps of a window that a batch joins to one transition. The ``reward`` is
            then the discounted sum of the rewards. Parts named ``done``, ``truncated`` or
            ``next_...``, and those of ``next_of``, are those of the last step, and the other parts
            are those of the first one. A window ends with the first step that is ``done`` or
            ``truncated``, and with the latest step. Batches have a part ``discount``: ``gamma`` to
            the power of the number of steps.
        gamma: Discount of the rewards of a window, from 0 to 1.
        alpha: Exponent of the priorities of prioritized draws. None draws uniformly.
        beta: Exponent of the importance weights of prioritized draws. The attribute ``beta`` may
            change during the training. Give it only with ``alpha``.
        epsilon: Added to the absolute value of each priority. Give it only with ``alpha``.
        path: New or empty folder for memory-mapped files of the transitions, whose disk space is
            reserved at once. None keeps them in memory.
        seed: Seed of the draws.
        generator: Random generator of numpy, in place of a seed. The draws of a
            ``np.random.RandomState`` are those of Stable-Baselines3 after ``np.random.seed``.

    Raises:
        ArgumentError: If an argument is invalid, or arguments conflict.
        UnknownArgument: If an argument does not exist. The message names the one to use.
        StoreError: If a dtype does not exist, or ``path`` has files already or too little space.
    """

    @explain_arguments({})
    def __init__(
        self,
        capacity: int,
        parts: Mapping[str, tuple[tuple[int, ...], DTypeLike]],
        *,
        n_envs: int = 1,
        next_of: Mapping[str, str] | None = None,
        stacked: str | tuple[str, ...] = (),
        n_steps: int = 1,
        gamma: float = 0.99,
        alpha: float | None = None,
        beta: float = 0.4,
        epsilon: float = 1e-6,
        path: str | os.PathLike[str] | None = None,
        seed: int = 0,
        generator: Generator | None = None,
    ) -> None:
        capacity = whole_number(capacity, "capacity")
        n_envs = whole_number(n_envs, "n_envs")
        layout = RingLayout(
            n_steps=max(1, capacity // n_envs),
            n_envs=n_envs,
            parts=checked_parts(parts),
            next_of=dict(next_of or {}),
            stacked=frozenset((stacked,) if isinstance(stacked, str) else stacked),
            window=whole_number(n_steps, "n_steps"),
            gamma=real_number(gamma, "gamma", least=0, most=1),
        )
        if generator is None:
            generator = np.random.default_rng(check_seed(seed))
        elif not isinstance(generator, (np.random.Generator, np.random.RandomState)):
            raise ArgumentError(
                f"generator={generator!r}: expected a generator of numpy; give "
                "np.random.default_rng(seed), or np.random.RandomState(seed)"
            )
        elif seed != 0:
            raise ArgumentError(
                f"seed={seed!r} with a generator; expected one of them, because a generator has a "
                "seed of its own; leave seed out"
            )
        self._draws: UniformDraws | PrioritizedDraws = UniformDraws(generator, n_envs)
        if alpha is not None:
            numbers = (
                real_number(value, name, least=0)
                for value, name in ((alpha, "alpha"), (beta, "beta"), (epsilon, "epsilon"))
            )
            self._draws = PrioritizedDraws(generator, layout.n_steps * n_envs, n_envs, *numbers)
        elif (beta, epsilon) != (0.4, 1e-6):
            raise ArgumentError(
                f"beta={beta!r} and epsilon={epsilon!r} without alpha, which draws uniformly; "
                "expected them only with prioritized draws; give alpha=0.6, or leave them out"
            )
        self._in_files = path is not None
        self._ring = TransitionRing(layout, None if path is None else _empty_folder(path))

    def __repr__(self) -> str:
        kind = "prioritized" if isinstance(self._draws, PrioritizedDraws) else "uniform"
        return f"<ReplayBuffer: {len(self):,} of {self.capacity:,} transitions, {kind} draws>"

    def __len__(self) -> int:
        """Return the number of transitions, of all environments together."""
        return self._ring.n_kept * self._ring.layout.n_envs

    @property
    def capacity(self) -> int:
        """Most transitions, of all environments together."""
        return self._ring.layout.n_steps * self._ring.layout.n_envs

    @property
    def nbytes(self) -> int:
        """Bytes of all transitions and priorities, whether they have been added or not."""
        draws = self._draws
        tree = draws.tree.nbytes if isinstance(draws, PrioritizedDraws) else 0
        return self._ring.nbytes + tree

    @property
    def beta(self) -> float:
        """Exponent of the importance weights of the next draws.

        Raises:
            ArgumentError: If the draws are uniform.
        """
        return self._prioritized("beta").beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._prioritized("beta").beta = real_number(value, "beta", least=0)

    def add(self, **values: Numbers) -> None:
        """Add a transition of each environment, in place of the oldest ones.

        The call copies the values. Any thread may make it.

        Args:
            values: The parts by name: arrays or CPU tensors of shape (n_envs, *shape). With one
                environment, the shape may also be that of the part.

        Raises:
            ArgumentError: If a part is missing or unknown, has another shape or dtype, or a number
                that its dtype does not have. Nothing has been added then.
            StoreError: If files need more space for frames than the disk has. Nothing has been
                added then.
        """
        checked = self._ring.layout.checked(values)
        with self._ring.lock:
            self._draws.add(self._ring.add(checked))

    def batches(
        self,
        batch_size: int,
        *,
        n: int | None = None,
        depth: int = 0,
        device: DeviceLike = "auto",
        device_transform: BatchFunction | None = None,
        progress: bool = False,
        timeline: bool = False,
    ) -> ReplayFeeder:
        """Return a loop over random batches.

        Each batch is a dict of tensors. With ``depth=0``, a batch is drawn from all transitions
        that were added before the loop requests it. With another depth, it is drawn ``depth``
        requests earlier, and is gathered and copied to the device in the meantime. It then lacks
        the transitions and priorities of these last ``depth`` steps of the loop. At any depth, the
        batches depend only on the sequence of calls, not on the speed of threads.

        Args:
            batch_size: Transitions per batch. They are drawn with replacement.
            n: Number of batches of a loop. None is a loop without end.
            depth: Number of batches to draw and to prefetch; 0 is the synchronous loop.
            device: Target device, as for ``Feeder``.
            device_transform: Function that takes each batch on the device, as for ``Feeder``.
            progress: Whether to show a progress bar.
            timeline: Whether to record how long each stage of each batch takes.

        Raises:
            ArgumentError: If an argument is invalid.
            DeviceError: If the device does not exist.
        """
        batch_size = whole_number(batch_size, "batch_size")
        n = None if n is None else whole_number(n, "n")
        options = LoopOptions(
            progress, timeline, device_transform=device_transform, seed=0, device=device
        )
        has_weights = isinstance(self._draws, PrioritizedDraws)

        def draw() -> Draw:
            return self._draw(batch_size)

        source = ReplaySource(self._ring, draw, check_depth(depth), n, has_weights)
        return ReplayFeeder(
            source, batch_size, options, nbytes=self.nbytes, in_files=self._in_files
        )

    def update_priorities(self, rows: Numbers, priorities: Numbers) -> None:
        """Set the priorities of transitions.

        Transitions that have been overwritten since they were drawn keep no priority.

        Args:
            rows: Part ``row`` of a batch: numbers of transitions, shape (n,).
            priorities: Priorities, such as absolute errors, shape (n,). Of several for one
                transition, the last counts.

        Raises:
            ArgumentError: If the draws are uniform, the shapes differ, a priority is not a finite
                number, or a row was never added.
        """
        draws = self._prioritized("update_priorities()")
        numbers = _on_host(rows, "rows")
        values = _on_host(priorities, "priorities")
        is_alike = numbers.ndim == 1 and values.shape == numbers.shape
        if not is_alike or numbers.dtype.kind not in "iu" or values.dtype.kind not in "biuf":
            raise ArgumentError(
                f"update_priorities() got rows of shape {numbers.shape}, {numbers.dtype}, and "
                f"priorities of shape {values.shape}, {values.dtype}; expected the part 'row' of a "
                "batch, and as many priorities, each of shape (n,)"
            )
        values = values.astype(np.float64)
        if not np.isfinite(values).all():
            raise ArgumentError(
                "update_priorities() got a priority that is NaN or infinite; expected finite "
                "numbers; check the loss for overflow"
            )
        ring = self._ring
        with ring.changed:
            n = ring.n_added * ring.layout.n_envs
            if len(numbers) and not 0 <= numbers.min() <= numbers.max() < n:
                raise ArgumentError(
                    f"update_priorities() got rows from {numbers.min()} to {numbers.max()}, but "
                    f"{n:,} transitions were added; expected the part 'row' of a batch"
                )
            is_kept = ring.is_kept(numbers)
            draws.update(ring.rows_of(numbers[is_kept].astype(np.int64)), values[is_kept])

    def state_dict(self) -> State:
        """Return a copy of all transitions, priorities and the state of the generator.

        No other thread can add a transition until they are copied. Batches that were drawn ahead
        are not a part of the state: a resumed loop draws others in their place. With ``depth=0``, a
        resumed loop has the batches that the loop would have had.
        """
        from pinfeed.tensors import rng_state
        from pinfeed.tensors.numpy_torch import to_torch

        ring = self._ring
        with ring.changed:
            arrays, rings = ring.state()
            state: dict[str, Any] = {
                "layout": self._fingerprint,
                "n_added": ring.n_added,
                "parts": {name: to_torch(array.copy()) for name, array in arrays.items()},
                "frames": {
                    name: (to_torch(numbers.copy()), to_torch(frames), first)
                    for name, (numbers, frames, first) in rings.items()
                },
                "generator": rng_state.state_of(self._draws.generator),
            }
            if isinstance(self._draws, PrioritizedDraws):
                found = self._draws.state()
                state["draws"] = {**found, "priorities": to_torch(found["priorities"].copy())}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all transitions, priorities and the state of the generator.

        Args:
            state: Return value of ``state_dict`` of a buffer with the same arguments.

        Raises:
            ArgumentError: If ``state`` belongs to a buffer with other parts, another capacity, or
                other draws. Nothing has changed then.
        """
        from pinfeed.tensors import rng_state
        from pinfeed.tensors.numpy_torch import memory_of

        ring = self._ring
        theirs, ours = state.get("layout"), self._fingerprint
        if theirs != ours:
            raise ArgumentError(
                f"the state belongs to a buffer with {theirs}; expected {ours}; make the buffer "
                "with the arguments of the earlier run"
            )
        # A damaged state raises an error here, before anything changes.
        n_added = int(state["n_added"])
        parts = {name: memory_of(tensor) for name, tensor in state["parts"].items()}
        frames = {
            name: (memory_of(numbers), memory_of(of_ring), int(first))
            for name, (numbers, of_ring, first) in state["frames"].items()
        }
        with ring.changed:
            rng_state.set_state(self._draws.generator, state["generator"])
            ring.load(n_added, parts, frames)
            if isinstance(self._draws, PrioritizedDraws):
                draws = state["draws"]
                self._draws.load({**draws, "priorities": memory_of(draws["priorities"])})

    @property
    def _fingerprint(self) -> dict[str, Any]:
        """Plain values that must be equal, or a saved state would mean other draws."""
        draws = self._draws
        alpha = draws.alpha if isinstance(draws, PrioritizedDraws) else None
        return {**self._ring.layout.fingerprint, "alpha": alpha}

    def _draw(self, batch_size: int) -> Draw:
        """Draw a batch, and protect its transitions.

        Raises:
            ArgumentError: If the buffer has no transitions.
        """
        ring = self._ring
        with ring.changed:
            if not ring.n_added:
                raise ArgumentError(
                    f"{self!r} has nothing to draw; expected transitions before the first batch; "
                    "call add() first"
                )
            rows, weights = self._draws.draw(ring.n_kept, batch_size)
            has_window = ring.layout.window > 1
            numbers = ring.numbers_of(rows) if has_window or weights is not None else None
            draw = Draw(rows, numbers, ring.n_added, weights)
            ring.protect(draw, len(ring.layout.parts) + has_window)
        return draw

    def _prioritized(self, what: str) -> PrioritizedDraws:
        if isinstance(self._draws, PrioritizedDraws):
            return self._draws
        raise ArgumentError(
            f"{what} of {self!r}; expected a buffer with prioritized draws; give alpha=0.6"
        )


def _on_host(values: Any, name: str) -> Any:
    """Return numbers as an array; a tensor may be on a GPU, or have a gradient or any dtype.

    Raises:
        ArgumentError: If numpy cannot read them.
    """
    try:
        if hasattr(values, "detach"):
            values = values.detach().cpu()
            # numpy has no bfloat16.
            values = values.double() if values.is_floating_point() else values
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"update_priorities(): numpy cannot read the {name}, a {type(values).__name__} "
            f"({error}); expected an array or a tensor of shape (n,)"
        ) from None


def _empty_folder(path: Any) -> str:
    """Make a folder for the files of a buffer.

    Raises:
        StoreError: If the folder cannot be made, or is not empty.
    """
    folder = check_path(path)
    try:
        os.makedirs(folder, exist_ok=True)
        found = os.listdir(folder)
    except OSError as error:
        raise StoreError(
            f"path={folder!r} cannot be made ({error}); expected a new or empty folder; give "
            "another path"
        ) from error
    if found:
        raise StoreError(
            f"path={folder!r} has {len(found)} files; expected a new or empty folder, because a "
            "buffer begins without transitions; remove the folder, or give another path; to "
            "continue a run, use load_state_dict()"
        )
    return folder

"""RingLayout: the parts of transitions, how a ring keeps them, and checks of both."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from pinfeed.errors import ArgumentError
from pinfeed.stores.store import Array
from pinfeed.tensors.dtypes import dtype_of
from pinfeed.validation.arguments import whole_number

_ADDED = {
    "discount": "the discount of the next value of n-step windows",
    "weight": "the importance weights of prioritized draws",
    "row": "the numbers of prioritized transitions",
}
"""Parts that batches have in addition."""


@dataclass(frozen=True)
class RingLayout:
    """Parts of transitions, and how a ring keeps them.

    Attributes:
        n_steps: Number of steps that the ring holds.
        n_envs: Number of environments, each of which adds one transition per step.
        parts: Shape and dtype of each part of a transition.
        next_of: Parts that are the observation of the next step, and the parts they are next to.
        stacked: Parts of ``next_of`` whose first axis is a stack of frames.
        window: Number of steps of a window that a batch joins to one transition.
        gamma: Discount of the rewards in a window.

    Raises:
        ArgumentError: If ``next_of``, ``stacked`` or ``window`` do not fit the parts.
    """

    n_steps: int
    n_envs: int
    parts: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    next_of: Mapping[str, str]
    stacked: frozenset[str]
    window: int
    gamma: float

    def __post_init__(self) -> None:
        _check_observations(self)
        _check_window(self)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Plain values that are equal exactly if a ring can load the state of another."""
        return {
            "steps_per_env": self.n_steps,
            "n_envs": self.n_envs,
            "n_steps": self.window,
            "gamma": self.gamma,
            "parts": [
                [name, list(shape), dtype.name] for name, (shape, dtype) in self.parts.items()
            ],
            "next_of": dict(self.next_of),
            "stacked": sorted(self.stacked),
        }

    def is_of_last_step(self, name: str) -> bool:
        """Return whether a part of a window is that of its last step, not of its first one."""
        return name in ("done", "truncated") or name.startswith("next_") or name in self.next_of

    @functools.cached_property
    def _checks(self) -> dict[str, tuple[Any, ...]]:
        """Shapes, dtype, type and limits of each part, so that a check takes little time."""
        checks = {}
        for name, (shape, dtype) in self.parts.items():
            kept = self.kept_shape(shape)
            checks[name] = (kept, dtype, *((None, {}) if kept else (dtype.type, _limits(dtype))))
        return checks

    def kept_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a part of a step, without an axis for a single environment."""
        return shape if self.n_envs == 1 else (self.n_envs, *shape)

    def checked(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the parts of a step: numbers, or arrays in the dtype and kept shape of the part.

        Args:
            values: The parts by name. The dict may change.

        Raises:
            ArgumentError: If a part is missing or unknown, or has another shape or dtype.
        """
        checks = self._checks
        if values.keys() != checks.keys():
            raise ArgumentError(
                f"add() got {', '.join(values) or 'nothing'}; expected {', '.join(checks)}, one "
                "value for each part of the buffer"
            )
        for name, (kept, dtype, scalar, limits) in checks.items():
            value = values[name]
            kind = type(value)
            if kind is np.ndarray:
                if value.dtype is dtype and value.shape == kept:
                    continue
            elif kind is scalar or (kind in limits and limits[kind][0] <= value <= limits[kind][1]):
                continue
            values[name] = self._checked(name, value).reshape(kept)
        return values

    def _checked(self, name: str, value: Any) -> Array:
        """Return a part of a step as an array of its dtype."""
        shape, dtype = self.parts[name]
        expected, kept = (self.n_envs, *shape), self.kept_shape(shape)
        array = _as_array(name, value)
        if array.shape not in (expected, kept):
            other = "" if kept == expected else f" or {kept}"
            raise ArgumentError(
                f"add({name}=...): got shape {array.shape}; expected {expected}{other}, one value "
                "for each environment"
            )
        are_integers = array.dtype.kind in "iu" and dtype.kind in "iu"
        if not are_integers and not np.can_cast(array.dtype, dtype, "same_kind"):
            raise ArgumentError(
                f"add({name}=...): got {array.dtype}; expected {dtype}, the dtype of this part; "
                f"convert it with .astype({dtype.name!r})"
            )
        with np.errstate(over="ignore"):
            made = array.astype(dtype, copy=False)
        changed = made != array if are_integers else np.isinf(made) & ~np.isinf(array)
        if changed.any():
            raise ArgumentError(
                f"add({name}=...): got {array[changed][0]}; expected the numbers of "
                f"{dtype}, the dtype of this part; give a wider one in parts"
            )
        return made


def _limits(dtype: np.dtype[Any]) -> dict[type, tuple[float, float]]:
    """Return the kinds of numbers that become a dtype by assignment, and the range of each."""
    if dtype.kind == "b":
        return {bool: (False, True)}
    if dtype.kind in "iu":
        whole = np.iinfo(dtype)
        return dict.fromkeys((int, np.int64), (int(whole.min), int(whole.max)))
    if dtype.kind == "c":
        return {}
    most = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return dict.fromkeys((int, float, np.int64, np.float64), (-most, most))


def _as_array(name: str, value: Any) -> Array:
    """Return a value as an array; a tensor may have a dtype that numpy lacks.

    Raises:
        ArgumentError: If it cannot be read.
    """
    try:
        if hasattr(value, "detach"):
            from pinfeed.tensors.numpy_torch import memory_of

            return memory_of(value.detach())
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"add({name}=...): numpy cannot read a {type(value).__name__} ({error}); expected "
            "an array or a dense CPU tensor; give tensor.cpu() for a tensor on a GPU, or "
            "tensor.to_dense() for a sparse one"
        ) from None


def checked_parts(parts: Any) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Return the shape and the dtype of each part.

    Raises:
        ArgumentError: If ``parts`` is no dict of shapes and dtypes, or a part has no bytes.
        StoreError: If a dtype does not exist.
    """
    if not isinstance(parts, Mapping) or not parts:
        raise ArgumentError(
            f"parts={parts!r}: expected a dict such as {{'obs': ((4,), 'float32')}}, with the "
            "shape and the dtype of each part"
        )
    checked = {}
    for name, part in parts.items():
        if not isinstance(name, str) or not name.isidentifier() or name in _ADDED:
            more = f" ({_ADDED[name]})" if name in _ADDED else ""
            raise ArgumentError(
                f"parts has the name {name!r}{more}; expected names that Python accepts for "
                f"arguments of add(), and none of {', '.join(_ADDED)}, which batches add; rename it"
            )
        try:
            shape, dtype = part
            shape = tuple(whole_number(n, name) for n in shape)
        except (TypeError, ValueError, ArgumentError):
            raise ArgumentError(
                f"parts[{name!r}]={part!r}: expected a shape and a dtype, such as "
                "((4, 84, 84), 'uint8'), or ((), 'float32') for one number"
            ) from None
        checked[name] = (shape, dtype_of(dtype, f"parts[{name!r}]"))
    return checked


def _check_observations(layout: RingLayout) -> None:
    """Raise ArgumentError if ``next_of`` or ``stacked`` do not fit the parts."""
    parts = layout.parts
    for after, now in layout.next_of.items():
        is_chain = now in layout.next_of or after in layout.next_of.values()
        if parts.get(after) != parts.get(now, ()) or after == now or is_chain:
            raise ArgumentError(
                f"next_of={dict(layout.next_of)!r}: {after!r} is {parts.get(after)} and {now!r} is "
                f"{parts.get(now)}; expected two parts of one shape and dtype, such as "
                "next_of={'next_obs': 'obs'}; add both to parts"
            )
        if now.startswith("next_") and not after.startswith("next_"):
            raise ArgumentError(
                f"next_of={dict(layout.next_of)!r} is swapped; expected the observation after a "
                f"step, and then the one before it; give next_of={{{now!r}: {after!r}}}"
            )
    if len(set(layout.next_of.values())) < len(layout.next_of):
        raise ArgumentError(
            f"next_of={dict(layout.next_of)!r} has two parts after one; expected one for each"
        )
    for name in layout.stacked:
        if name not in layout.next_of.values() or not parts[name][0]:
            raise ArgumentError(
                f"stacked={name!r}: expected the name of an observation in next_of whose first "
                f"axis has the frames; give next_of={{'next_{name}': {name!r}}}"
            )


def _check_window(layout: RingLayout) -> None:
    """Raise ArgumentError if windows of several steps cannot be joined."""
    if layout.window == 1:
        return
    reward = layout.parts.get("reward")
    if reward is None or reward[1].kind != "f" or "done" not in layout.parts:
        raise ArgumentError(
            f"n_steps={layout.window} joins rewards until a step is done, but parts has "
            f"{', '.join(layout.parts)}; expected parts named 'reward', of float32, and 'done', "
            "and 'truncated' if episodes have a time limit"
        )
    for name in ("done", "truncated"):
        if int(np.prod(layout.parts.get(name, ((),))[0])) != 1:
            raise ArgumentError(
                f"n_steps={layout.window} with parts[{name!r}] of shape {layout.parts[name][0]}; "
                "expected one number per transition; give the shape ()"
            )

"""How a table begins, drawn piece by piece: the numbers that an initialiser would draw for the whole table at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pinfeed.errors import ArgumentError, described

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A function of torch's, its arguments by position and by name."""

_PIECE_BYTES = 16 << 20
# torch draws normal numbers on the CPU in sixteens, and the last ones, where they are fewer, with
# those before them.
_AT_A_TIME = 16
_DRAWS = {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default}
_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}
_EXPECTED = (
    "a rank has its own rows alone; expected a function that draws each number once, by itself (normal, uniform, xavier_*, kaiming_*, "
    "ones, zeros), or a store= of this rank's rows"
)


class _Recording(TorchDispatchMode):
    """What is done to a tensor that has no data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def drawn(
    fill: Callable[[torch.Tensor], Any], shape: tuple[int, int], dtype: torch.dtype
) -> Iterator[tuple[int, torch.Tensor]]:
    """The rows of a table as ``fill`` makes them, piece by piece, each with its first row; torch's generator is used as by the whole.

    Args:
        fill: Fills a tensor; it sees one of the whole shape, without data.
        shape: Of the table.
        dtype: Of the table.

    Raises:
        ArgumentError: It does something that needs the whole table at once.
    """
    calls = _recorded(fill, shape, dtype)
    step = max(1, _PIECE_BYTES // (_AT_A_TIME * shape[1] * dtype.itemsize)) * _AT_A_TIME
    # The last piece is at least as long as the others.
    starts = range(0, shape[0], step)[: max(1, shape[0] // step)]
    for start in starts:
        stop = shape[0] if start == starts[-1] else start + step
        piece = torch.empty((stop - start, shape[1]), dtype=dtype, device="cpu")
        with torch.no_grad():
            for func, args, kwargs in calls:
                func(piece, *args[1:], **kwargs)
        yield start, piece


def _recorded(
    fill: Callable[[torch.Tensor], Any], shape: tuple[int, int], dtype: torch.dtype
) -> list[Call]:
    whole = torch.empty(shape, dtype=dtype, device="meta")
    try:
        with torch.no_grad(), _Recording() as recording:
            fill(whole)
    except Exception as error:
        raise ArgumentError(
            f"init failed on a tensor without data ({described(error)}); {_EXPECTED}"
        ) from error
    calls: list[Call] = recording.calls
    if wrong := [
        func for func, args, kwargs in calls if not _is_by_number(func, args, kwargs, whole)
    ]:
        raise ArgumentError(
            f"init calls {wrong[0]}, which needs the whole table at once; {_EXPECTED}"
        )
    if not calls:
        raise ArgumentError(
            f"init does nothing to a tensor without data (orthogonal and trunc_normal do not); {_EXPECTED}"
        )
    n_draws = sum(func in _DRAWS for func, _, _ in calls)
    if n_draws > 1:
        raise ArgumentError(f"init draws {n_draws} times for the same numbers; {_EXPECTED}")
    return calls


def _is_by_number(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: torch.Tensor
) -> bool:
    """Whether a call changes every number of the table in place, without looking at others."""
    in_place = (
        func in _DRAWS
        or func in _FILLS
        or (torch.Tag.pointwise in func.tags and func._schema.name.endswith("_"))
    )
    others = [*args[1:], *(value for name, value in kwargs.items() if name != "generator")]
    return bool(
        in_place
        and args
        and args[0] is whole
        and not any(isinstance(value, torch.Tensor) for value in others)
    )

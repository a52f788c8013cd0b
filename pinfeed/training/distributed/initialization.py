"""Initial rows of a sharded table, drawn in chunks, equal to those of one draw for all rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pinfeed.errors import ArgumentError, described
from pinfeed.training.embeddings.table_arguments import Fill
from pinfeed.training.row_file import CHUNK_BYTES

OperatorCall = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A torch operator, its positional arguments and its keyword arguments."""

# torch draws normal numbers on the CPU in groups of sixteen. If the last group is smaller, torch
# draws it together with the numbers before it.
_DRAWN_TOGETHER = 16
_DRAWS = {torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default}
_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}
_EXPECTED = (
    "a rank has only its own rows; expected a function that draws each number once and separately "
    "(normal, uniform, xavier_*, kaiming_*, ones, zeros), or store= with this rank's rows"
)


class _OperatorRecorder(TorchDispatchMode):
    """Records the operators that are called on a tensor without data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[OperatorCall] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def draw_chunks(
    fill: Fill, shape: tuple[int, int], dtype: torch.dtype
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the initial rows of a table in chunks.

    The numbers and the final state of torch's generator equal those of one call for all rows.

    Args:
        fill: Initializer. It is called with a tensor of the whole shape, without data.
        shape: Shape of the whole table.
        dtype: Dtype of the table.

    Yields:
        The index of the first row of a chunk, and the rows of the chunk.

    Raises:
        ArgumentError: If the initializer needs the whole table at once.
    """
    calls = _recorded_calls(fill, shape, dtype)
    length = max(1, CHUNK_BYTES // (_DRAWN_TOGETHER * shape[1] * dtype.itemsize)) * _DRAWN_TOGETHER
    # The last chunk is at least as long as the others.
    starts = range(0, shape[0], length)[: max(1, shape[0] // length)]
    for start in starts:
        stop = shape[0] if start == starts[-1] else start + length
        chunk = torch.empty((stop - start, shape[1]), dtype=dtype, device="cpu")
        with torch.no_grad():
            for func, args, kwargs in calls:
                func(chunk, *args[1:], **kwargs)
        yield start, chunk


def _recorded_calls(fill: Fill, shape: tuple[int, int], dtype: torch.dtype) -> list[OperatorCall]:
    """Return the operators that an initializer calls on a table.

    Raises:
        ArgumentError: If they cannot be called chunk by chunk.
    """
    whole = torch.empty(shape, dtype=dtype, device="meta")
    try:
        with torch.no_grad(), _OperatorRecorder() as recorder:
            fill(whole)
    except Exception as error:
        raise ArgumentError(
            f"init failed on a tensor without data ({described(error)}); {_EXPECTED}"
        ) from error
    calls: list[OperatorCall] = recorder.calls
    for call in calls:
        if not _is_elementwise(call, whole):
            raise ArgumentError(
                f"init calls {call[0]}, which needs the whole table at once; {_EXPECTED}"
            )
    if not calls:
        raise ArgumentError(
            "init has no effect on a tensor without data (like orthogonal and trunc_normal); "
            f"{_EXPECTED}"
        )
    n_draws = sum(func in _DRAWS for func, _, _ in calls)
    if n_draws > 1:
        raise ArgumentError(f"init draws the same numbers {n_draws} times; {_EXPECTED}")
    return calls


def _is_elementwise(call: OperatorCall, whole: torch.Tensor) -> bool:
    """Return whether a call changes each number of the table in place and independently."""
    func, args, kwargs = call
    is_pointwise = torch.Tag.pointwise in func.tags and func._schema.name.endswith("_")
    is_in_place = func in _DRAWS or func in _FILLS or is_pointwise
    others = [*args[1:], *(value for name, value in kwargs.items() if name != "generator")]
    has_tensors = any(isinstance(value, torch.Tensor) for value in others)
    return bool(is_in_place and args and args[0] is whole and not has_tensors)

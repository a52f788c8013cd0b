"""BatchAxisOperations: finds operations of a forward pass that combine the rows of a batch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pinfeed.training.large_batch.equivalence.fixed_random import arguments_of
from pinfeed.training.large_batch.equivalence.model_state import (
    perturbed_parameters,
    state_on_copies,
)
from pinfeed.training.large_batch.strategies.step_spec import StepSpec
from pinfeed.training.memory_model.models import call_model

_NORMALIZATIONS = ("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm")


class BatchAxisOperations(TorchDispatchMode):
    """Context that records which of torch's operations combine rows: reduce, sort or mix them.

    Error messages name these operations as possible causes. A named operation may be harmless, and
    the context does not know all operations.

    Args:
        n: Samples in the batch. A tensor with ``n`` rows counts as one row per sample.

    Attributes:
        names: Names of the operations, each once, in the order of their first call.
    """

    def __init__(self, n: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._n = n
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name not in self.names and self._combines_rows(func, name, args, kwargs):
            self.names.append(name)
        return func(*args, **kwargs)

    def _combines_rows(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or not first.ndim or len(first) != self._n:
            return False
        given = arguments_of(func, args, kwargs)
        if name in _NORMALIZATIONS:
            return bool(given.get("training", given.get("train", True)))
        if name == "mm":
            # The product of a batch and its transpose has a number for each pair of samples.
            return bool(args[1].shape[1] == self._n)
        if not given.keys() & {"dim", "dims"} or func.is_view:
            return False
        dims = given.get("dim", given.get("dims"))
        dims = dims if isinstance(dims, (list, tuple)) else [dims]
        return any(dim is None or dim in (0, -first.ndim) for dim in dims) or not dims


def operations_over_batch(spec: StepSpec, inputs: Any, n: int) -> list[str]:
    """Return the names of operations of the model that combine the ``n`` samples of a batch."""
    found = BatchAxisOperations(n)
    with (
        contextlib.suppress(Exception),
        torch.no_grad(),
        state_on_copies(spec.modules),
        perturbed_parameters(spec.modules),
        found,
    ):
        call_model(spec.model, inputs)
    return found.names

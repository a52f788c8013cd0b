"""OptimizerTrial: runs an optimizer on small parameters to learn its rule and its state.

``require_one_rule`` refuses optimizers whose rule depends on whether gradients are sparse. It runs
an optimizer with dense and with sparse gradients on a small table. The gradients are equal, and
contain every row. If the rule is the same, the results differ only by rounding. DLRM's RWSAdagrad,
for example, keeps one number for each row if gradients are sparse, and one number for each weight
if they are dense.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from pinfeed.errors import ArgumentError, described
from pinfeed.tensors import rng_state

GradientKind = Literal["dense", "sparse"]
"""Kind of the gradients that an optimizer gets."""

# Some optimizers make a state tensor only at a later step.
_STEPS = 8
PLAIN = (int, float, bool, str, type(None))
"""Types of state and attributes that are no tensors."""


@dataclass(frozen=True)
class TrialState:
    """State that a run of an optimizer made for one parameter."""

    initial: Mapping[str, Any]
    """First value of each key."""
    created_in_init: frozenset[str]
    attributes: frozenset[str]
    """Names of scalar attributes of the optimizer that ``step()`` changed."""


@dataclass(frozen=True)
class OptimizerTrial:
    """An optimizer that can be run on small parameters.

    A run neither changes the random generators of the program nor shows warnings.
    """

    optimizer_class: Any
    options: Mapping[str, Any]
    group: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Name of the optimizer in errors."""
        name: str = getattr(self.optimizer_class, "__name__", str(self.optimizer_class))
        return name

    def run(self, values: torch.Tensor, sparse: bool) -> TrialState:
        """Run some steps with zero gradients on a copy of ``values``."""
        with _isolated():
            weight, optimizer = self._make(values)
            for group in optimizer.param_groups:
                # Weight decay would be a gradient other than zero.
                if "weight_decay" in group:
                    group["weight_decay"] = 0
            created = dict(optimizer.state.get(weight, {}))
            state = _RecordingState(created)
            optimizer.state[weight] = state
            before = _plain_attributes(optimizer)
            _step(weight, optimizer, [torch.zeros_like(values)] * _STEPS, sparse)
            after = _plain_attributes(optimizer)
        changed = {name for name, value in after.items() if before.get(name, before) != value}
        return TrialState(state.initial, frozenset(created), frozenset(changed))

    def run_first(
        self, values: torch.Tensor, gradients: GradientKind | None
    ) -> tuple[TrialState, bool]:
        """Run some steps, as ``run`` does, with the kind of gradients that the optimizer accepts.

        Args:
            values: Values of the parameter.
            gradients: The kind that the user chose. None is dense, or sparse if dense gradients
                fail.

        Returns:
            The state, and whether the gradients were sparse.

        Raises:
            ArgumentError: If the steps fail.
            MemoryError: If the system does not have the memory for the trial.
        """
        if gradients == "sparse":
            return self._run_sparse(values), True
        try:
            return self.run(values, sparse=False), False
        except MemoryError as error:
            raise MemoryError(
                f"the system does not have enough memory to run {self.name} on a small table "
                f"({described(error)}); free memory, or raise the limit of the process"
            ) from error
        except Exception as dense_error:
            try:
                if gradients is None:
                    return self.run(values, sparse=True), True
            except Exception:
                pass
            raise ArgumentError(
                f"{self.name} cannot train rows: a step on a small table failed "
                f"({described(dense_error)}); expected an optimizer whose step() needs only "
                "gradients, and options that it accepts"
            ) from dense_error

    def train(
        self, values: torch.Tensor, gradients: Sequence[torch.Tensor], *, sparse: bool
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Run a step with each gradient, and return the final weights and state.

        Sparse state is returned as dense tensors.
        """
        with _isolated():
            weight, optimizer = self._make(values)
            _step(weight, optimizer, gradients, sparse)
        state = optimizer.state.get(weight, {})
        return weight.detach(), {key: _dense(value) for key, value in state.items()}

    def _run_sparse(self, values: torch.Tensor) -> TrialState:
        try:
            # An optimizer may refuse options such as weight decay only with sparse gradients.
            self.train(values, [torch.ones_like(values)], sparse=True)
            return self.run(values, sparse=True)
        except Exception as error:
            raise ArgumentError(
                f"{self.name} with gradients='sparse': a step with sparse gradients on a small "
                f"table failed ({described(error)}); expected an optimizer and options that accept "
                "sparse gradients, or no argument gradients="
            ) from error

    def _make(self, values: torch.Tensor) -> tuple[nn.Parameter, Any]:
        """Make the optimizer for a copy of ``values``."""
        weight = nn.Parameter(values.clone())
        optimizer = self.optimizer_class([{**self.group, "params": [weight]}], **self.options)
        for group in optimizer.param_groups:
            # The trial runs on the CPU, where capturable optimizers raise an error.
            if "capturable" in group:
                group["capturable"] = False
        return weight, optimizer


class _RecordingState(dict[str, Any]):
    """A parameter's state that records the first value of each key."""

    def __init__(self, created: Mapping[str, Any]) -> None:
        super().__init__()
        self.initial: dict[str, Any] = {}
        self.update(created)

    def __setitem__(self, key: str, value: Any) -> None:
        if value is not None:
            first = value.detach().clone() if isinstance(value, torch.Tensor) else value
            self.initial.setdefault(key, first)
        super().__setitem__(key, value)

    # The methods of dict do not call __setitem__.
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update


def sparse_rows(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a sparse tensor of all its rows."""
    rows = torch.arange(len(gradient), device=gradient.device)
    return torch.sparse_coo_tensor(
        rows[None], gradient, gradient.shape, is_coalesced=True, check_invariants=False
    )


def _step(
    weight: nn.Parameter, optimizer: Any, gradients: Sequence[torch.Tensor], sparse: bool
) -> None:
    for gradient in gradients:
        # A copy, because some optimizers keep or change the gradient.
        weight.grad = sparse_rows(gradient.clone()) if sparse else gradient.clone()
        optimizer.step()


def _dense(value: Any) -> Any:
    is_sparse = isinstance(value, torch.Tensor) and value.layout is not torch.strided
    return value.to_dense() if is_sparse else value


def _plain_attributes(optimizer: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, PLAIN)}


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """Restore the random generators after a trial, and hide its warnings."""
    with rng_state.replayed(rng_state.capture()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(0)
        yield


Trained = tuple[torch.Tensor, dict[str, Any]]
"""Weights and state after a run."""

_N_ROWS = 3
# Each step rounds a few times. All optimizers of torch stay below 1.
_ROUNDINGS = 2 * _STEPS


def require_one_rule(trial: OptimizerTrial, dim: int, dtype: torch.dtype) -> None:
    """Check that an optimizer has the same result with dense and with sparse gradients.

    An optimizer that takes only one kind of gradients passes, because there is no choice.

    Args:
        trial: The optimizer.
        dim: Numbers in a row.
        dtype: Dtype of the table.

    Raises:
        ArgumentError: If the results differ.
        MemoryError: If the system does not have the memory for the trial.
    """
    # With more precise weights, a different rule is easier to tell from rounding. An optimizer may
    # support one dtype only, so several are tried.
    for precision in dict.fromkeys((torch.float64, torch.float32, dtype)):
        try:
            difference = _difference(trial, dim, precision)
        except MemoryError:
            # This error does not concern the optimizer.
            raise
        except Exception:
            continue
        if difference:
            raise ArgumentError(
                f"{trial.name} has different rules for dense and for sparse gradients: "
                f"{difference} on a small table differs; expected a choice between them; give "
                "gradients='sparse' for the rule of nn.Embedding(sparse=True), or "
                "gradients='dense' for the rule of nn.Embedding(sparse=False)"
            )
        return


def _difference(trial: OptimizerTrial, dim: int, dtype: torch.dtype) -> str:
    """Return the name of a result that dense and sparse gradients change; empty if none differs.

    A result that differs between two runs with dense gradients does not count. The optimizer may
    draw random numbers from its own generator, or store a time.
    """
    numbers = np.random.default_rng(0)
    values = torch.from_numpy(numbers.uniform(1, 2, (_N_ROWS, dim))).to(dtype)
    drawn = numbers.standard_normal((_STEPS, _N_ROWS, dim))
    gradients = [torch.from_numpy(gradient).to(dtype) for gradient in drawn]
    dense = trial.train(values, gradients, sparse=False)
    found = _differences(values, dense, trial.train(values, gradients, sparse=True))
    if found:
        again = _differences(values, dense, trial.train(values, gradients, sparse=False))
        found = [name for name in found if name not in again]
    return found[0] if found else ""


def _differences(values: torch.Tensor, one: Trained, other: Trained) -> list[str]:
    """Return the names of the results that differ between two runs from ``values``."""
    weights, state = one
    # Weights are rounded to their dtype. Updates are rounded to the dtype of the state, which may
    # be less precise.
    update = (weights - values).abs().max().double()
    allowed = _eps(weights) * values.abs().max().double()
    allowed += max(map(_eps, (weights, *state.values()))) * update
    agree = _agree(weights, other[0], _ROUNDINGS * float(allowed))
    return ["the result"] * (not agree) + _different_state(state, other[1])


def _different_state(state: Mapping[str, Any], other_state: Mapping[str, Any]) -> list[str]:
    """Return the names of the state that differs."""
    found = []
    for key in sorted({*state, *other_state}, key=str):
        one, other = state.get(key), other_state.get(key)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            largest = float(one.abs().max()) if one.numel() else 0.0
            is_same = _agree(one, other, _ROUNDINGS * _eps(one) * largest)
        else:
            is_same = type(one) is type(other) and one == other
        if not is_same:
            found.append(f"state {key!r}")
    return found


def _agree(one: torch.Tensor, other: torch.Tensor, allowed: float) -> bool:
    """Return whether two tensors are equal, or differ by ``allowed`` at most."""
    if one.shape != other.shape:
        return False
    return torch.allclose(one.double(), other.double(), rtol=0, atol=allowed, equal_nan=True)


def _eps(value: Any) -> float:
    """Return the relative rounding error; 0 for whole numbers, which are not rounded."""
    if isinstance(value, torch.Tensor) and value.dtype.is_floating_point:
        return float(torch.finfo(value.dtype).eps)
    return 0.0

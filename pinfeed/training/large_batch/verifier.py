"""Verifier: checks whether a strategy gives the gradients of the plain step.

The check cannot find an effect that only larger batches show, such as a loss of the 100 hardest
samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from pinfeed.training.large_batch.batches import n_samples, sample_shapes_and_dtypes, select_samples
from pinfeed.training.large_batch.restored_state import (
    gradients_set_aside,
    in_float64,
    restored,
    restored_attribute,
)
from pinfeed.training.large_batch.step_comparison import PLAIN_FAILS, Samples, StepComparison
from pinfeed.training.large_batch.step_spec import StepSpec, batch_norms
from pinfeed.training.large_batch.whole_steps import recomputes
from pinfeed.training.memory_model.real_steps import is_out_of_memory
from pinfeed.training.memory_model.tensor_specs import map_tensors, to_device

_MOST_COMPARED = 3
"""Most samples on which a strategy is compared with the plain step."""
_MAY_BE_ROUNDING = 1e-2
"""A smaller difference may be rounding that the model amplifies; float64 shows whether it is."""


class Verifier:
    """Cache of comparisons: one for each strategy, shape of samples and mode of the model.

    Args:
        is_on: Whether to compare at all; False for ``verify=False``.
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self._problems: dict[Any, str] = {}
        self._drawing_modes: set[tuple[bool, ...]] = set()

    def forget(self) -> None:
        """Discard all results, so that strategies are compared again."""
        self._problems.clear()

    def has_drawn(self, spec: StepSpec) -> bool:
        """Return whether a comparison in these modes of the modules has drawn random numbers."""
        return spec.training_modes in self._drawing_modes

    def problem_of(self, strategy: str, spec: StepSpec, inputs: Any, targets: Any = None) -> str:
        """Return how a strategy differs from the plain step on some samples of a batch.

        Parameters, gradients, buffers, attributes and random generators do not change.

        Args:
            strategy: A strategy. ``"checkpoint_offload"`` is compared as ``"checkpoint"``, because
                offloading changes no value.
            spec: The model and the loss, on their device.
            inputs: A batch.
            targets: Its targets, or None.

        Returns:
            A clause without a full stop; "" if nothing differs.

        Raises:
            RuntimeError: If the samples do not fit on the device at once. The type is that of the
                original error, which may be MemoryError.
        """
        strategy = "checkpoint" if recomputes(strategy) else strategy
        if strategy != "checkpoint" and (norms := batch_norms(spec.model)):
            return f"{norms[0]} normalizes over the batch"
        n = min(_MOST_COMPARED, n_samples(inputs))
        if not self.is_on or n == 1:
            return ""
        key = strategy, sample_shapes_and_dtypes(inputs, targets), spec.training_modes
        if key not in self._problems:
            is_mean = strategy == "accumulate" and spec.reduction == "mean"
            if is_mean and not spec.count_terms(inputs, targets):
                # Every target is ignored, so the comparison waits for another batch.
                return ""
            # A loss may use parameters of the model, whose gradients belong to the user.
            with gradients_set_aside(spec.parameters):
                try:
                    self._problems[key] = self._find_problem(n, strategy, spec, inputs, targets)
                except (RuntimeError, MemoryError) as error:
                    if is_out_of_memory(error):
                        raise type(error)(
                            f"{error}: {n} samples do not fit on the device at once, so "
                            f"strategy={strategy!r} cannot be compared with the plain step; free "
                            "memory, or give verify=False"
                        ) from error
                    raise
        return self._problems[key]

    def _find_problem(
        self, n: int, strategy: str, spec: StepSpec, inputs: Any, targets: Any
    ) -> str:
        if strategy != "checkpoint" and (name := _name_of_hooked_parameter(spec)):
            runs = "would run once for each chunk, not once for the batch"
            return f"the hooks of the parameter {name!r} {runs}"
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in spec.parameters):
            return "the model has uninitialized parameters; run one forward pass before"

        def samples(most: int) -> Samples:
            last = n_samples(inputs) - 1
            rows = torch.linspace(0, last, min(most, last + 1), dtype=torch.float64).round().long()
            found: Samples = to_device(select_samples((inputs, targets), rows), spec.device)
            return found

        kind = spec.device.type
        with spec.context():
            is_in_autocast = torch.is_autocast_enabled(kind)
        without_autocast = torch.autocast(kind, enabled=False)
        with _full_precision(kind), without_autocast, _without_hooks(spec):
            problem, has_drawn = _find_difference(spec, strategy, samples, n, is_in_autocast)
        if has_drawn:
            self._drawing_modes.add(spec.training_modes)
        return problem


def _find_difference(
    spec: StepSpec, strategy: str, samples: Callable[[int], Samples], n: int, is_in_autocast: bool
) -> tuple[str, bool]:
    """Compare in the model's dtype, and again in float64 if rounding may be the reason.

    A model that runs only with autocast has several dtypes. It is compared in float64, too.
    Recomputation does not round in another way, so float64 does not excuse it.

    Returns:
        A clause that says how the strategy differs on ``n`` samples, and whether the forward pass
        draws random numbers.
    """
    own = StepComparison(spec, strategy, samples, n)
    problem = ""
    is_narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in spec.parameters)
    if not (is_narrow and own.is_cut):
        problem, error = own.difference()
        needs_autocast = is_in_autocast and problem.startswith(PLAIN_FAILS)
        may_be_rounding = own.is_cut and error <= _MAY_BE_ROUNDING
        if not problem or not (may_be_rounding or needs_autocast):
            return problem, own.has_drawn
    with contextlib.suppress(Exception), in_float64(spec.modules):
        wide = StepComparison(
            spec, strategy, lambda most: map_tensors(_in_float64, samples(most)), n
        )
        found = wide.difference()[0]
        if not found.startswith(PLAIN_FAILS) and (wide.has_loss or not own.has_loss):
            return found, wide.has_drawn
    # The step fails in float64, so its own dtype decides.
    problem = problem or own.difference()[0]
    hidden = "the model does not run in float64, and the rounding of its dtype may hide differences"
    return problem or hidden, own.has_drawn


def _in_float64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


@contextlib.contextmanager
def _full_precision(device_type: str) -> Iterator[None]:
    """Compute in float32 without TF32, because TF32's rounding depends on the batch size."""
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    with contextlib.ExitStack() as stack:
        # If the program has used newer settings, torch refuses these, and the newer ones stay.
        with contextlib.suppress(RuntimeError):
            for setting in settings if device_type == "cuda" else ():
                stack.enter_context(restored_attribute([setting], "allow_tf32"))
                setting.allow_tf32 = False
        yield


def _hooks_of(p: nn.Parameter) -> list[dict[int, Any]]:
    return [hooks for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks) if hooks]


def _name_of_hooked_parameter(spec: StepSpec) -> str:
    """Return the name of a parameter that has hooks; "" if there is none."""
    named = (pair for module in spec.modules for pair in module.named_parameters())
    return next((name for name, p in named if p.requires_grad and _hooks_of(p)), "")


@contextlib.contextmanager
def _without_hooks(spec: StepSpec) -> Iterator[None]:
    """Run no hooks of parameters, which may be those of an optimizer in the backward pass."""
    every = [hooks for p in spec.parameters for hooks in _hooks_of(p)]
    with restored(every):
        for hooks in every:
            hooks.clear()
        yield

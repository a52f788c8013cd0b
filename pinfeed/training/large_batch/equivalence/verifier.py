"""EquivalenceVerifier: checks whether a strategy gives the gradients of the plain step.

Chunks give the gradients of the whole batch if two things hold. First, the model computes the
outputs of each sample from that sample alone, and its state (buffers, attributes) ends as after
the whole batch. Second, for ``accumulate``, the loss of the batch is the sum or mean of the losses
of its chunks.

This module checks both. It computes the model for a batch of three samples, and for chunks of two
and one of these samples. The backward pass starts from random gradients of the outputs, so this
comparison does not depend on the loss. It computes the loss for many targets. At last, the code
that trains computes a whole step with the user's loss.

The check cannot find an effect that only larger batches show, such as a loss of the 100 hardest
samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError
from pinfeed.tensors import rng_state
from pinfeed.training.large_batch.equivalence.batch_axis import operations_over_batch
from pinfeed.training.large_batch.equivalence.comparison import Comparison
from pinfeed.training.large_batch.equivalence.conditions import (
    MOST_COMPARED,
    ONE_BY_ONE,
    StepSamples,
)
from pinfeed.training.large_batch.equivalence.fixed_random import UnknownRandomness
from pinfeed.training.large_batch.equivalence.precision import (
    full_precision,
    samples_in_float64,
    spec_in_float64,
)
from pinfeed.training.large_batch.equivalence.rounding import DifferenceFound
from pinfeed.training.large_batch.equivalence.sample_selection import representative_samples
from pinfeed.training.large_batch.strategies.accumulation import AccumulationHook
from pinfeed.training.large_batch.strategies.micro_batches import (
    n_samples,
    sample_shapes_and_dtypes,
    select_samples,
)
from pinfeed.training.large_batch.strategies.step_spec import StepSpec
from pinfeed.training.memory_model.out_of_memory import is_out_of_memory, release_cached_memory
from pinfeed.training.memory_model.tensor_specs import to_device

_CHUNK_SIZES = {4: (2, 1, 1), 3: (2, 1), 2: (1, 1)}
"""Sizes of the chunks, by the number of samples that are compared.

Larger numbers are cut into a half, one, a fourth and the rest.
"""
_SAMPLE_COUNTS = (3, 2)
"""Numbers of samples to try, until they fit in memory."""
_MAY_BE_ROUNDING = 1e-2
"""A smaller difference may be rounding that the model amplifies; float64 shows whether it is."""

More = Callable[[int], StepSamples]


class EquivalenceVerifier:
    """Cache of comparisons: one for each strategy, shape of samples and mode of the model.

    Args:
        is_on: Whether to compare at all; False for ``prove=False``.
        autocast: Dtype of autocast; None for no autocast.
    """

    def __init__(self, is_on: bool, autocast: torch.dtype | None = None) -> None:
        self.is_on = is_on
        self._autocast = autocast
        self._problems: dict[Any, str] = {}

    def forget(self) -> None:
        """Discard all results, so that strategies are compared again."""
        self._problems.clear()

    def problem_of(
        self,
        strategy: str,
        spec: StepSpec,
        inputs: Any,
        targets: Any = None,
        most: Callable[[], int] = lambda: MOST_COMPARED,
    ) -> str:
        """Return how a strategy differs from the plain step, as the function ``problem_of`` does.

        ``most`` returns how many samples fit in memory. It is called only if nothing is cached.
        """
        if not self.is_on or n_samples(inputs) < 2:
            return ""
        key = strategy, sample_shapes_and_dtypes(inputs, targets), spec.training_modes
        if key not in self._problems:
            if strategy in ("accumulate", ONE_BY_ONE) and not _has_terms(spec, inputs, targets):
                # Every target is ignored, so the comparison waits for another batch.
                return ""
            self._problems[key] = problem_of(
                spec, strategy, inputs, targets, self._autocast, most()
            )
        return self._problems[key]


def _has_terms(spec: StepSpec, inputs: Any, targets: Any) -> bool:
    """Return whether the mean of the loss has at least one term."""
    return spec.reduction != "mean" or bool(spec.count_terms(inputs, targets))


def problem_of(
    spec: StepSpec,
    strategy: str,
    inputs: Any,
    targets: Any,
    autocast: torch.dtype | None = None,
    most: int = MOST_COMPARED,
) -> str:
    """Return how a strategy differs from the plain step on some samples of a batch.

    Parameters, gradients, buffers, attributes and random generators do not change.

    Args:
        spec: The model and the loss, on their device.
        strategy: ``"accumulate"``, ``ONE_BY_ONE``, ``"two_pass"`` or ``"checkpoint"``.
        inputs: A batch of at least two samples.
        targets: Its targets, or None.
        autocast: The dtype of autocast. The comparison runs without it if the model can.
        most: Most samples to compare.

    Returns:
        A clause without a full stop; "" if nothing differs.

    Raises:
        RuntimeError: If the comparison fails, or if two samples do not fit on the device at once.
            The type is that of the original error, which may be MemoryError.
    """
    counts = [n for n in _SAMPLE_COUNTS if n <= min(most, n_samples(inputs))]
    for n in counts:
        try:
            return _problem_on(spec, strategy, inputs, targets, autocast, n)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if n == counts[-1]:
                raise type(error)(
                    f"{error}: two samples do not fit on the device at once, so "
                    f"strategy={strategy!r} cannot be compared with the plain step; free memory, "
                    "or give prove=False"
                ) from error
        # This is after the except block, because within the block the traceback keeps the
        # tensors of the failed frames alive.
        release_cached_memory()
    return ""


def _problem_on(
    spec: StepSpec, strategy: str, inputs: Any, targets: Any, autocast: torch.dtype | None, n: int
) -> str:
    """Return how a strategy differs from the plain step on ``n`` samples."""
    if strategy != "checkpoint" and (name := _name_of_hooked_parameter(spec)):
        return (
            f"the hooks of the parameter {name!r} would run once for each chunk, not once for the "
            "batch"
        )
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in spec.parameters):
        return "the model has uninitialized parameters; run one forward pass before"
    device = next((p.device for p in spec.parameters), torch.device("cpu"))
    if torch.is_autocast_enabled(device.type):
        autocast = autocast or torch.get_autocast_dtype(device.type)
    samples = _samples(inputs, targets, n, device)

    def more(most: int) -> StepSamples:
        return _samples(inputs, targets, min(most, n_samples(inputs)), device)

    without_autocast = torch.autocast(device.type, enabled=False)
    with rng_state.replayed(rng_state.capture()), full_precision(device), without_autocast:
        difference = _find_difference(spec, strategy, samples, more, autocast)
        return "" if difference is None else f"{difference}{_cause(spec, samples.inputs, n)}"


def _find_difference(
    spec: StepSpec, strategy: str, samples: StepSamples, more: More, autocast: torch.dtype | None
) -> DifferenceFound | None:
    """Compare in the model's dtype, and again in float64 if rounding may be the reason."""
    is_narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in spec.parameters)
    difference = None
    if not is_narrow:
        difference = _compare(spec, strategy, samples, more, autocast)
        if difference is None or difference.error > _MAY_BE_ROUNDING:
            return difference
    try:
        return _compare_in_float64(spec, strategy, samples, more)
    except Exception:
        # A model that cannot be copied, or does not run in float64, is compared in its own dtype.
        return _compare(spec, strategy, samples, more, autocast) if is_narrow else difference


def _compare(
    spec: StepSpec, strategy: str, samples: StepSamples, more: More, autocast: torch.dtype | None
) -> DifferenceFound | None:
    try:
        Comparison(spec, samples, more, autocast).run(strategy)
    except DifferenceFound as difference:
        return difference
    except (UnknownRandomness, ArgumentError) as error:
        return DifferenceFound(str(error))
    return None


def _compare_in_float64(
    spec: StepSpec, strategy: str, samples: StepSamples, more: More
) -> DifferenceFound | None:
    wide = spec_in_float64(spec)

    def more_in_float64(most: int) -> StepSamples:
        return samples_in_float64(more(most))

    try:
        Comparison(wide, samples_in_float64(samples), more_in_float64, None).run(strategy)
    except DifferenceFound as difference:
        return difference
    return None


def _samples(inputs: Any, targets: Any, n: int, device: torch.device) -> StepSamples:
    """Choose ``n`` samples of a batch and copy them to the device."""
    rows = representative_samples(inputs, targets, n)
    x = to_device(select_samples(inputs, rows), device)
    y = None if targets is None else to_device(select_samples(targets, rows), device)
    sizes = _CHUNK_SIZES.get(n, (n // 2, 1, n // 4, n - n // 2 - 1 - n // 4))
    return StepSamples(x, y, list(itertools.pairwise(itertools.accumulate(sizes, initial=0))))


def _cause(spec: StepSpec, inputs: Any, n: int) -> str:
    """Return a clause that names the model's operations over the batch; "" if there are none."""
    names = operations_over_batch(spec, inputs, n)
    if not names:
        return ""
    return f" (the forward pass has operations that may combine samples: {', '.join(names)})"


def _name_of_hooked_parameter(spec: StepSpec) -> str:
    """Return the name of a parameter that has the user's hooks; "" if there is none."""
    for module in spec.modules:
        for name, p in module.named_parameters():
            hooks: list[Any] = []
            for registered in (p._backward_hooks, p._post_accumulate_grad_hooks):
                hooks += registered.values() if registered else ()
            if p.requires_grad and any(not isinstance(hook, AccumulationHook) for hook in hooks):
                return name
    return ""

"""Comparison of a strategy with the plain step on a few samples of the user's own batch.

Chunks give the gradients of the whole batch if two things hold. First, the model computes the
outputs of each sample from that sample alone, and its state (buffers, attributes) ends as after
the whole batch. Second, for ``accumulate``, the loss of the batch is the sum or mean of the losses
of its chunks. Both are computed here: the model for a batch of three samples, and for chunks of two
and one of them, and the loss for all targets. The gradients of the model are those for random
gradients of the outputs, so the first comparison does not depend on the loss. Then a whole step is
computed by the code that trains, with the user's loss.

An effect that only larger batches show is not seen: the loss of the 100 hardest samples, say.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError
from pinfeed.tensors.pytree import flatten
from pinfeed.training import rng_state
from pinfeed.training.large_batch.equivalence.batch_axis import BatchAxisOperations
from pinfeed.training.large_batch.equivalence.comparison import Comparison
from pinfeed.training.large_batch.equivalence.fixed_random import UnknownRandomness
from pinfeed.training.large_batch.equivalence.model_state import (
    perturbed_parameters,
    state_on_copies,
)
from pinfeed.training.large_batch.equivalence.rounding import DifferenceFound
from pinfeed.training.large_batch.equivalence.sample_selection import representative_samples
from pinfeed.training.large_batch.equivalence.step_comparison import ONE_BY_ONE, StepSamples
from pinfeed.training.large_batch.select import MOST_COMPARED
from pinfeed.training.large_batch.strategies.gradients import (
    AccumulationHook,
    StepSpec,
    release_cached_memory,
)
from pinfeed.training.large_batch.strategies.micro_batches import (
    n_samples,
    sample_shapes_and_dtypes,
    select_samples,
)
from pinfeed.training.memory_model.estimate import call_model
from pinfeed.training.memory_model.probe import is_out_of_memory
from pinfeed.training.memory_model.tensor_specs import to_device

_CHUNKS = {4: (2, 1, 1), 3: (2, 1), 2: (1, 1)}
"""Sizes of the chunks, by the number of samples that are compared.

More samples are cut into a half, one, a fourth and the rest.
"""
_SIZES = (3, 2)
"""Numbers of samples that the model is tried with, until they fit."""
_PERHAPS_ROUNDING = 1e-2
"""A smaller difference may be rounding that the model amplifies; float64 tells."""

More = Callable[[int], StepSamples]


class EquivalenceVerifier:
    """Cache of comparisons: one for each strategy, shape of samples and mode of the model.

    Args:
        is_on: False for ``prove=False``: then nothing is compared.
        autocast: The dtype of autocast.
    """

    def __init__(self, is_on: bool, autocast: torch.dtype | None = None) -> None:
        self.is_on = is_on
        self._autocast = autocast
        self._problems: dict[Any, str] = {}

    def forget(self) -> None:
        """Compare anew from now on."""
        self._problems.clear()

    def problem_of(
        self,
        strategy: str,
        spec: StepSpec,
        inputs: Any,
        targets: Any = None,
        most: Callable[[], int] = lambda: MOST_COMPARED,
    ) -> str:
        """Say in what a strategy differs from the plain step; as ``problem_of``.

        ``most`` says how many samples fit.
        """
        if not self.is_on or n_samples(inputs) < 2:
            return ""
        key = strategy, sample_shapes_and_dtypes(inputs, targets), spec.modes
        if key not in self._problems:
            if strategy in ("accumulate", ONE_BY_ONE) and not has_terms(spec, inputs, targets):
                # Every target is ignored, so that another batch has to tell.
                return ""
            self._problems[key] = problem_of(
                spec, strategy, inputs, targets, self._autocast, most()
            )
        return self._problems[key]


def has_terms(spec: StepSpec, inputs: Any, targets: Any) -> bool:
    """Whether the loss has something to take the mean of."""
    return spec.reduction != "mean" or bool(spec.terms(inputs, targets))


def problem_of(
    spec: StepSpec,
    strategy: str,
    inputs: Any,
    targets: Any,
    autocast: torch.dtype | None = None,
    most: int = MOST_COMPARED,
) -> str:
    """Say in what a strategy differs from the plain step on some samples of a batch.

    Parameters, gradients, buffers, attributes and random generators are as before afterwards.

    Args:
        spec: The model and the loss, on their device.
        strategy: ``"accumulate"``, ``ONE_BY_ONE``, ``"two_pass"`` or ``"checkpoint"``.
        inputs: A batch of at least two samples.
        targets: Its targets, or None.
        autocast: The dtype of autocast. The comparison runs without it where the model can.
        most: Samples to compare, at most.

    Returns:
        A clause without a full stop; "" if nothing differs.

    Raises:
        RuntimeError: The plain step itself fails on these samples; as torch.OutOfMemoryError if
            two samples do not fit on the device at once.
    """
    fitting = [n for n in _SIZES if n <= min(most, n_samples(inputs))]
    for n in fitting:
        try:
            return _problem(spec, strategy, inputs, targets, autocast, n)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if n == fitting[-1]:
                raise type(error)(
                    f"{error}: two samples do not fit on the device at once, so that "
                    f"strategy={strategy!r} cannot be compared with the plain step; free memory, "
                    "or give prove=False"
                ) from error
        # The error's traceback is gone here, and with it the tensors of the frames that failed.
        release_cached_memory()
    return ""


def _problem(
    spec: StepSpec, strategy: str, inputs: Any, targets: Any, autocast: torch.dtype | None, n: int
) -> str:
    if strategy != "checkpoint" and (hooked := _hooked_parameters(spec)):
        return f"the hooks of {hooked} would run for each chunk and not once for the batch"
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in spec.parameters):
        return "the first forward pass makes its parameters; call the model once before"
    device = next((p.device for p in spec.parameters), torch.device("cpu"))
    if torch.is_autocast_enabled(device.type):
        autocast = autocast or torch.get_autocast_dtype(device.type)
    samples = _samples(inputs, targets, n, device)

    def more(most: int) -> StepSamples:
        return _samples(inputs, targets, min(most, n_samples(inputs)), device)

    precisely = torch.autocast(device.type, enabled=False)
    with rng_state.replayed(rng_state.capture()), _full_precision(device), precisely:
        difference = _found(spec, strategy, samples, more, autocast)
        return "" if difference is None else f"{difference}{_cause(spec, samples.inputs, n)}"


def _found(
    spec: StepSpec, strategy: str, samples: StepSamples, more: More, autocast: torch.dtype | None
) -> DifferenceFound | None:
    is_narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in spec.parameters)
    difference = None
    if not is_narrow:
        difference = _difference(spec, strategy, samples, more, autocast)
        if difference is None or difference.error > _PERHAPS_ROUNDING:
            return difference
    try:
        return _difference_in_float64(spec, strategy, samples, more)
    except Exception:
        # A model that cannot be copied, or does not run in float64, is compared as it is.
        return _difference(spec, strategy, samples, more, autocast) if is_narrow else difference


def _difference(
    spec: StepSpec, strategy: str, samples: StepSamples, more: More, autocast: torch.dtype | None
) -> DifferenceFound | None:
    try:
        Comparison(spec, samples, more, autocast).run(strategy)
    except DifferenceFound as difference:
        return difference
    except (UnknownRandomness, ArgumentError) as error:
        return DifferenceFound(str(error))
    return None


def _difference_in_float64(
    spec: StepSpec, strategy: str, samples: StepSamples, more: More
) -> DifferenceFound | None:
    modules = [module.double() for module in copy.deepcopy(list(spec.modules))]
    loss = spec.loss
    if isinstance(loss, nn.Module):
        loss = modules[list(spec.modules).index(loss)]
    wide = replace(spec, model=modules[0], modules=modules, loss=loss)
    try:
        Comparison(wide, _doubled(samples), lambda most: _doubled(more(most)), None).run(strategy)
    except DifferenceFound as difference:
        return difference
    return None


def _doubled(samples: StepSamples) -> StepSamples:
    def doubled(batch: Any) -> Any:
        leaves, rebuild = flatten(batch)
        is_float = [
            isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for _, leaf in leaves
        ]
        return rebuild(
            leaf.double() if floating else leaf
            for (_, leaf), floating in zip(leaves, is_float, strict=True)
        )

    targets = None if samples.targets is None else doubled(samples.targets)
    return replace(samples, inputs=doubled(samples.inputs), targets=targets)


def _samples(inputs: Any, targets: Any, n: int, device: torch.device) -> StepSamples:
    rows = representative_samples(inputs, targets, n)
    x = to_device(select_samples(inputs, rows), device)
    y = None if targets is None else to_device(select_samples(targets, rows), device)
    sizes = _CHUNKS.get(n, (n // 2, 1, n // 4, n - n // 2 - 1 - n // 4))
    return StepSamples(x, y, list(itertools.pairwise(itertools.accumulate(sizes, initial=0))))


def _cause(spec: StepSpec, inputs: Any, n: int) -> str:
    """Operations of the model that go over the samples, as a clause."""
    found = BatchAxisOperations(n)
    modules = spec.modules
    with (
        contextlib.suppress(Exception),
        torch.no_grad(),
        state_on_copies(modules),
        perturbed_parameters(modules),
        found,
    ):
        call_model(spec.model, inputs)
    return f" (its forward pass has operations over the samples: {', '.join(found.names)})" * bool(
        found.names
    )


def _hooked_parameters(spec: StepSpec) -> str:
    """The name of a parameter that has hooks, in quotes; "" if none has."""
    for module in spec.modules:
        for name, p in module.named_parameters():
            hooks = [
                hook
                for of in (p._backward_hooks, p._post_accumulate_grad_hooks)
                if of
                for hook in of.values()
            ]
            if p.requires_grad and any(not isinstance(hook, AccumulationHook) for hook in hooks):
                return repr(name)
    return ""


@contextlib.contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Compute in float32 without TF32, whose rounding depends on the size of a batch."""
    if device.type != "cuda":
        yield
        return
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = []
    # torch refuses these settings where the program has made newer ones; those stay as they are.
    with contextlib.suppress(RuntimeError):
        for setting in settings:
            before.append((setting, setting.allow_tf32))
            setting.allow_tf32 = False
    try:
        yield
    finally:
        for setting, allowed in before:
            setting.allow_tf32 = allowed

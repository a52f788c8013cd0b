"""StepComparison: compares the steps of a strategy with plain steps on a few samples.

Chunks give the gradients of the whole batch if two things hold. First, the model computes the
outputs of each sample from that sample alone, and its state (buffers, attributes) ends as after
the whole batch. Second, for ``accumulate``, the loss of the batch is the sum or mean of the losses
of its chunks.

The comparison shows both by whole steps, which the code that trains computes in unequal chunks:

- steps with a random linear loss of all outputs, so that every output counts
- steps with the user's loss of stored outputs and of many targets, because losses are cheap
- steps with the user's model and loss
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from pinfeed.errors import ArgumentError, described
from pinfeed.tensors import rng_state
from pinfeed.tensors.pytree import flatten
from pinfeed.training.large_batch import batches
from pinfeed.training.large_batch.chunked_gradients import GradientAccumulator, backward_two_pass
from pinfeed.training.large_batch.restored_state import perturbed_parameters
from pinfeed.training.large_batch.step_result import (
    ROUNDING,
    StepResult,
    largest_rounding,
    norm_of,
    number_contexts,
    relative_error,
    run_step,
)
from pinfeed.training.large_batch.step_spec import StepSpec
from pinfeed.training.large_batch.whole_steps import recomputed
from pinfeed.training.memory_model.real_steps import is_out_of_memory
from pinfeed.training.memory_model.tensor_specs import map_tensors, tensor_leaves

PLAIN_FAILS = "the plain step fails"
"""Beginning of the message for a problem that the plain step has as well."""
_LOSS_FAILS = "the loss fails on some of the samples"
_CHUNKS_FAIL = "the step fails in chunks of some of the samples"
_NEGLIGIBLE = 1e-3
"""Smallest share of the whole gradient's norm that the error of a parameter is divided by."""
_OUTPUT_BYTES = 16 << 20
"""Bytes of outputs for which losses are compared."""


Samples = tuple[Any, Any]
"""Inputs and targets."""


class _DifferenceFound(Exception):
    """A comparison found a difference, which the message describes as a clause.

    Args:
        message: The clause.
        error: Relative size of the difference.
    """

    def __init__(self, message: str, error: float = math.inf) -> None:
        super().__init__(message)
        self.error = error


class _PlainStepFails(_DifferenceFound):
    """The plain step fails on the samples of a comparison."""


class StepComparison:
    """Compares a strategy with the plain step on some samples.

    Args:
        spec: The model and the loss.
        strategy: ``"accumulate"``, ``"two_pass"`` or ``"checkpoint"``.
        samples: Function that returns inputs and targets, on the device, of at most the given
            number of samples.
        n: Number of samples for the model.

    Attributes:
        is_cut: Whether the strategy computes chunks, which round in another way.
        has_drawn: Whether a step has drawn random numbers from torch.
        has_loss: Whether a step with the user's model and loss has run.
    """

    def __init__(
        self, spec: StepSpec, strategy: str, samples: Callable[[int], Samples], n: int
    ) -> None:
        # The rounding of autocast would hide differences.
        self._spec = replace(spec, context=contextlib.nullcontext, scale=lambda loss: loss)
        self._strategy = strategy
        self.is_cut = strategy != "checkpoint"
        self._samples_of = samples
        self._samples = samples(n)
        self._n = n
        self._random = rng_state.capture()
        self.has_drawn = False
        self.has_loss = False
        self._limit = largest_rounding(spec, ROUNDING)

    def difference(self) -> tuple[str, float]:
        """Return a difference as a clause, and its relative size; "" and 0 if there is none."""
        try:
            self._compare_all()
        except _DifferenceFound as difference:
            return str(difference), difference.error
        return "", 0.0

    def _compare_all(self) -> None:
        is_cut = self.is_cut
        linear = replace(self._spec, loss=_RandomLoss(is_cut), reduction="sum", count=len)
        samples = self._samples[0], torch.arange(self._n)
        fails = f"{PLAIN_FAILS} on {self._n} samples of the batch"
        # This step is first, because the other ones would leave the parameters changed.
        with perturbed_parameters(self._spec.modules) as name_of_written:
            drawn = self._plain_step(linear, samples, fails).drawn
            name = name_of_written()
        if name:
            raise _DifferenceFound(
                f"the forward pass writes to the parameter {name!r}, so chunks would write to it "
                "several times"
            )
        with _failures_are_differences(PLAIN_FAILS):
            contexts = number_contexts(drawn if is_cut else set())
        self.has_drawn = bool(drawn)
        if not is_cut and self._repeats(linear, samples, fails):
            self._limit = 0.0
        for context in contexts:
            spec = replace(self._spec, context=context)
            loss = _RandomLoss(is_cut)
            self._compare(replace(linear, loss=loss, context=context), samples, fails, "")
            if not is_cut:
                return
            if self._strategy == "accumulate":
                self._compare_losses(spec, loss.outputs[0])
            try:
                self._compare(spec, self._samples, _LOSS_FAILS, "the loss of a step differs")
            except _PlainStepFails:
                # The loss needs more samples. Two passes give all outputs to the loss, so the
                # random loss has shown whether the gradients are right.
                if self._strategy == "accumulate":
                    raise

    def _compare_losses(self, spec: StepSpec, outputs: Any) -> None:
        """Compare the loss of many samples, which repeat a few outputs, with those of chunks."""
        nbytes = sum(leaf.nbytes for leaf in tensor_leaves(outputs))
        n_repeats = max(2, _OUTPUT_BYTES // max(1, nbytes))
        inputs, targets = self._samples_of(self._n * n_repeats)
        rows = torch.arange(batches.n_samples(inputs))
        model = _StoredOutputs(batches.select_samples(outputs, rows % self._n))
        spec = replace(spec, model=model, modules=(model, *spec.modules[1:]))
        if spec.parameters:
            problem = "the losses of the chunks do not add up to the loss of the batch"
            self._compare(spec, (rows, targets), _LOSS_FAILS, f"{problem}: the loss differs")

    def _compare(self, spec: StepSpec, samples: Samples, fails: str, loss_differs: str) -> None:
        """Compare the strategy's step with the plain step."""
        with _failures_are_differences(fails, _PlainStepFails):
            if spec.reduction == "mean" and not spec.count_terms(*samples):
                return
        plain = self._plain_step(spec, samples, fails)
        # Both passes of ``two_pass`` get this copy, so a model that changes its inputs changes
        # them twice.
        inputs = _cloned(samples[0])
        backward = functools.partial(_backward, self._strategy, spec, inputs, samples[1])
        with _failures_are_differences(_CHUNKS_FAIL):
            other = run_step(spec, backward, self._random)
        if name := plain.differing_state(other):
            raise _DifferenceFound(
                f"the forward pass changes {name!r} of the model, and chunks leave other values in "
                "it"
            )
        if isinstance(spec.loss, _RandomLoss):
            self._check_outputs(*spec.loss.outputs)
        else:
            self._check(plain.loss, other.loss, loss_differs)
        self._check_gradients(spec, plain, other)

    def _plain_step(self, spec: StepSpec, samples: Samples, fails: str) -> StepResult:
        inputs = _cloned(samples[0])
        with _failures_are_differences(fails, _PlainStepFails):
            result = run_step(spec, lambda: spec.backward_whole(inputs, samples[1]), self._random)
        self.has_loss |= spec.loss is self._spec.loss and spec.model is self._spec.model
        return result

    def _repeats(self, spec: StepSpec, samples: Samples, fails: str) -> bool:
        """Return whether plain steps have equal bits; some kernels of a GPU add in any order."""
        one, other = (self._plain_step(spec, samples, fails).gradients for _ in range(2))
        return not any(map(relative_error, one, other))

    def _check_outputs(self, whole: Any, *parts: Any) -> None:
        with _failures_are_differences(_CHUNKS_FAIL):
            joined = batches.concatenate(list(parts))
        for (_, one), (_, another) in zip(flatten(whole)[0], flatten(joined)[0], strict=True):
            self._check(one, another, "an output of the model differs")

    def _check(self, one: Any, other: Any, what_differs: str) -> None:
        error = relative_error(one, other)
        if error > self._limit:
            raise _DifferenceFound(f"{what_differs} by {error:.2%}", error)

    def _check_gradients(self, spec: StepSpec, plain: StepResult, other: StepResult) -> None:
        names = {id(p): name for one in spec.modules for name, p in one.named_parameters()}
        norms = [norm_of(gradient) for gradient in plain.gradients]
        least = _NEGLIGIBLE * math.hypot(*filter(math.isfinite, norms))
        worst, name = 0.0, ""
        gradients = zip(norms, spec.parameters, plain.gradients, other.gradients, strict=True)
        for norm, p, one, another in gradients:
            error = relative_error(one, another, max(norm, least))
            # A gradient without a finite number shows no difference.
            if not math.isfinite(norm) and one is not None and not one.to_dense().isfinite().any():
                error = math.inf
            worst, name = max((worst, name), (error, names[id(p)]))
        if worst > self._limit:
            raise _DifferenceFound(f"the gradient of {name!r} differs by {worst:.2%}", worst)


def _backward(strategy: str, spec: StepSpec, inputs: Any, targets: Any) -> torch.Tensor:
    """Add the gradients of samples by a strategy, and return their loss."""
    if strategy == "checkpoint":
        with recomputed(spec.model):
            return spec.backward_whole(inputs, targets)
    n = batches.n_samples(inputs)
    # Means of chunks of unequal sizes have unequal weights.
    size = min(n - 1, -(-2 * n // 3))

    def chunks() -> batches.Chunks:
        for samples in batches.split((inputs, targets), size):
            yield spec.chunk(*samples)

    if strategy == "two_pass":
        return backward_two_pass(spec, chunks, targets)
    return GradientAccumulator(spec).run(chunks(), spec.count_terms(inputs, targets))


def _cloned(batch: Any) -> Any:
    """Return a copy of the batch in memory of its own, because a model may change its inputs."""
    return map_tensors(lambda one: one.detach().clone().requires_grad_(one.requires_grad), batch)


class _RandomLoss:
    """Sum of all outputs, times random numbers that a sample has in every chunk.

    Its targets are row indices.

    Attributes:
        outputs: Outputs of each call.
    """

    def __init__(self, is_cut: bool) -> None:
        self._is_cut = is_cut
        self.outputs: list[Any] = []

    def __call__(self, outputs: Any, rows: torch.Tensor) -> torch.Tensor:
        if self._is_cut:
            batches.check_output_rows(outputs, len(rows))
        self.outputs.append(map_tensors(torch.Tensor.detach, outputs))
        # Outputs may need no gradient, but the backward pass of a loss must be possible.
        total = torch.zeros((), dtype=torch.float64, requires_grad=True)
        for i, (_, leaf) in enumerate(flatten(outputs)[0]):
            if batches.is_differentiable(leaf):
                values = torch.view_as_real(leaf) if leaf.is_complex() else leaf
                products = values * _random_rows(i, values, int(rows[0]))
                total = total.to(leaf.device) + products.sum(dtype=torch.float64)
        return total


class _StoredOutputs(nn.Module):
    """Model whose inputs are row indices, and whose outputs are stored."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self._outputs = map_tensors(
            lambda one: nn.Parameter(one) if batches.is_differentiable(one) else one, outputs
        )
        leaves = tensor_leaves(self._outputs)
        self.stored = nn.ParameterList(one for one in leaves if isinstance(one, nn.Parameter))

    def forward(self, rows: torch.Tensor) -> Any:
        return batches.select_samples(self._outputs, rows)


def _random_rows(i: int, leaf: torch.Tensor, start: int) -> torch.Tensor:
    """Return random numbers in the shape of output ``i``, whose first row is row ``start``."""
    if not leaf.ndim:
        return torch.ones_like(leaf)
    # The numbers are numpy's, because those of torch may be fixed. A row has the same ones in
    # every chunk.
    shape = (start + len(leaf), *leaf.shape[1:])
    numbers = np.random.default_rng(i).random(shape, np.float32)[start:]
    return torch.from_numpy(numbers).sub_(0.5).to(leaf)


@contextlib.contextmanager
def _failures_are_differences(
    what_fails: str, kind: type[_DifferenceFound] = _DifferenceFound
) -> Iterator[None]:
    """Raise errors of the user's code as differences; memory errors stay as they are."""
    try:
        yield
    except ArgumentError as error:
        raise kind(str(error)) from None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        first_line = (str(error).strip() or described(error)).splitlines()[0]
        raise kind(f"{what_fails} ({first_line})") from None

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
import itertools
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
from pinfeed.training.large_batch.batches import (
    Chunk,
    Chunks,
    check_output_rows,
    concatenate,
    is_differentiable,
    n_samples,
    select_samples,
    slice_samples,
)
from pinfeed.training.large_batch.chunked_gradients import GradientAccumulator, backward_two_pass
from pinfeed.training.large_batch.recompute import recomputed
from pinfeed.training.large_batch.step_result import (
    FixedRandomness,
    ModelState,
    StepResult,
    has_drawn,
    norm_of,
    perturbed_parameters,
    relative_error,
    run_step,
    state_on_copies,
    values_of,
)
from pinfeed.training.large_batch.step_spec import StepSpec
from pinfeed.training.memory_model.real_steps import is_out_of_memory
from pinfeed.training.memory_model.tensor_specs import map_tensors
from pinfeed.training.memory_model.training_step import call_model

PLAIN_FAILS = "the plain step fails"
"""Beginning of the message for a problem that the plain step has as well."""
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative differences that rounding explains, by dtype.

If a difference is larger, the comparison runs again in float64.
"""
_LOSS_FAILS = "the loss fails on some of the samples"
_CHUNKS_FAIL = "the step fails in chunks of some of the samples"
_NEGLIGIBLE = 1e-3
"""Smallest share of the whole gradient's norm that the error of a parameter is divided by."""
RANGE_ENDS = (0.98, 0.02)
"""Positions of fixed random numbers; one near each end takes both sides of most branches."""
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


class StepComparison:
    """Compares a strategy with the plain step on some samples.

    Args:
        spec: The model and the loss.
        strategy: ``"accumulate"``, ``"two_pass"`` or ``"checkpoint"``.
        samples: Function that returns inputs and targets, on the device, of at most the given
            number of samples.
        n: Number of samples for the model.

    Attributes:
        has_drawn: Whether the forward pass has drawn random numbers from torch.
    """

    def __init__(
        self,
        spec: StepSpec,
        strategy: str,
        samples: Callable[[int], Samples],
        n: int,
    ) -> None:
        # The rounding of autocast would hide differences.
        self._spec = replace(spec, context=contextlib.nullcontext, scale=lambda loss: loss)
        self._strategy = strategy
        self._samples_of = samples
        self._samples = samples(n)
        self._n = n
        self._random = rng_state.capture()
        self.has_drawn = False
        limits = [ROUNDING.get(p.dtype, ROUNDING[torch.float32]) for p in spec.parameters]
        self._limit = max(limits, default=ROUNDING[torch.float32])

    def difference(self) -> tuple[str, float]:
        """Return a difference as a clause, and its relative size; "" and 0 if there is none."""
        try:
            self._compare_all()
        except _DifferenceFound as difference:
            return str(difference), difference.error
        return "", 0.0

    def _compare_all(self) -> None:
        # This check is first, because the other computations would leave the parameters changed.
        self._check_parameters_are_only_read()
        contexts: list[Callable[[], contextlib.AbstractContextManager[Any]]] = [
            contextlib.nullcontext
        ]
        if self.has_drawn and self._strategy != "checkpoint":
            contexts = [functools.partial(FixedRandomness, at) for at in RANGE_ENDS]
        for context in contexts:
            spec = replace(self._spec, context=context)
            outputs = self._compare_outputs(spec)
            if self._strategy == "checkpoint":
                return
            if self._strategy != "two_pass":
                self._compare_losses(spec, outputs)
            self._compare(spec, self._samples, "the loss of a step differs")

    def _check_parameters_are_only_read(self) -> None:
        """Check that a forward pass writes to no parameter, and note whether it draws numbers."""
        modules = self._spec.modules
        rng_state.restore(self._random)
        with state_on_copies(modules), perturbed_parameters(modules) as name_of_written:
            # If the forward pass fails, the plain step fails next in the same way.
            with contextlib.suppress(_DifferenceFound), _failures_are_differences(PLAIN_FAILS):
                call_model(self._spec.model, _cloned(self._samples[0]))
            name = name_of_written()
        if name:
            raise _DifferenceFound(
                f"the forward pass writes to the parameter {name!r}, so chunks would write to it "
                "several times"
            )
        if self._strategy != "checkpoint":
            with _failures_are_differences(PLAIN_FAILS):
                self.has_drawn = has_drawn(self._random)

    def _compare_outputs(self, spec: StepSpec) -> Any:
        """Compare steps with a random loss of all outputs, and return the outputs of the model."""
        loss = _RandomLoss(is_cut=self._strategy != "checkpoint")
        spec = replace(spec, loss=loss, reduction="sum", count=len)
        samples = self._samples[0], torch.arange(self._n)
        plain = self._plain_step(spec, samples, f"{PLAIN_FAILS} on {self._n} samples of the batch")
        other = self._strategy_step(spec, samples)
        whole, *parts = loss.outputs
        with _failures_are_differences(_CHUNKS_FAIL):
            joined = concatenate(parts)
        check_states(plain.state, other.state)
        for (_, one), (_, another) in zip(flatten(whole)[0], flatten(joined)[0], strict=True):
            self._check(one, another, "an output of the model differs")
        self._check_gradients(spec, plain, other)
        return whole

    def _compare_losses(self, spec: StepSpec, outputs: Any) -> None:
        """Compare the loss of many samples, which repeat a few outputs, with those of chunks."""
        nbytes = sum(
            leaf.nbytes for _, leaf in flatten(outputs)[0] if isinstance(leaf, torch.Tensor)
        )
        most = max(2 * self._n, _OUTPUT_BYTES // max(1, nbytes // self._n))
        inputs, targets = self._samples_of(most)
        rows = torch.arange(n_samples(inputs))
        model = _StoredOutputs(select_samples(outputs, rows % self._n))
        spec = replace(spec, model=model, modules=(model, *spec.modules[1:]))
        if spec.parameters:
            problem = "the losses of the chunks do not add up to the loss of the batch"
            self._compare(spec, (rows, targets), f"{problem}: the loss differs")

    def _compare(self, spec: StepSpec, samples: Samples, loss_differs: str) -> None:
        """Compare steps with the user's loss."""
        is_accumulated = self._strategy != "two_pass"
        try:
            with _failures_are_differences(_LOSS_FAILS):
                n_terms = spec.count_terms(*samples)
            if is_accumulated and spec.reduction == "mean" and not n_terms:
                return
            plain = self._plain_step(spec, samples, _LOSS_FAILS)
        except _DifferenceFound:
            if is_accumulated:
                raise
            # The loss needs more samples. Two passes give all outputs to the loss, so the random
            # loss has shown whether the gradients are right.
            return
        other = self._strategy_step(spec, samples)
        check_states(plain.state, other.state)
        self._check(plain.loss, other.loss, loss_differs)
        self._check_gradients(spec, plain, other)

    def _plain_step(self, spec: StepSpec, samples: Samples, fails: str) -> StepResult:
        rng_state.restore(self._random)
        inputs = _cloned(samples[0])
        with _failures_are_differences(fails):
            return run_step(spec, lambda: spec.backward_whole(inputs, samples[1]))

    def _strategy_step(self, spec: StepSpec, samples: Samples) -> StepResult:
        rng_state.restore(self._random)
        with _failures_are_differences(_CHUNKS_FAIL):
            return run_step(spec, functools.partial(self._backward, spec, samples))

    def _backward(self, spec: StepSpec, samples: Samples) -> torch.Tensor:
        """Add the gradients of the samples by the strategy, and return their loss."""
        # Both passes of ``two_pass`` get this copy, so a model that changes its inputs changes
        # them twice.
        inputs = _cloned(samples[0])
        targets = samples[1]
        if self._strategy == "checkpoint":
            with recomputed(spec.model):
                return spec.backward_whole(inputs, targets)

        def chunks() -> Chunks:
            for start, stop in _edges(n_samples(inputs)):
                x, y = slice_samples((inputs, targets), start, stop)
                yield Chunk(x, y, spec.count_terms(x, y))

        if self._strategy == "two_pass":
            return backward_two_pass(spec, chunks, targets)
        return GradientAccumulator(spec).run(chunks(), spec.count_terms(inputs, targets))

    def _check(self, one: Any, other: Any, what_differs: str) -> None:
        error = relative_error(one, other)
        if error > self._limit:
            raise _DifferenceFound(f"{what_differs} by {error:.2%}", error)

    def _check_gradients(self, spec: StepSpec, plain: StepResult, other: StepResult) -> None:
        named = (pair for module in spec.modules for pair in module.named_parameters())
        names = {id(p): name for name, p in named}
        norms = [norm_of(gradient) for gradient in plain.gradients]
        least = _NEGLIGIBLE * math.hypot(*filter(math.isfinite, norms))
        wrong = []
        gradients = zip(norms, spec.parameters, plain.gradients, other.gradients, strict=True)
        for norm, p, one, another in gradients:
            # A gradient without a finite number shows no difference.
            error = relative_error(one, another, max(norm, least))
            if one is not None and not math.isfinite(norm) and not values_of(one).isfinite().any():
                error = math.inf
            if error > self._limit:
                wrong.append((error, names[id(p)]))
        if wrong:
            error, name = max(wrong)
            raise _DifferenceFound(
                f"the gradients of {len(wrong)} of {len(norms)} parameters differ; the gradient "
                f"of {name!r} differs by {error:.2%}",
                error,
            )


def _edges(n: int) -> Iterator[tuple[int, int]]:
    """Return first and last row of unequal chunks: one half, one row, one fourth and the rest."""
    half = n // 2
    sizes = (n - half, min(half, 1), n // 4, half - n // 4 - 1)
    return itertools.pairwise(itertools.accumulate(filter(None, sizes), initial=0))


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
            check_output_rows(outputs, len(rows))
        self.outputs.append(map_tensors(torch.Tensor.detach, outputs))
        # Outputs may need no gradient, but the backward pass of a loss must be possible.
        total = torch.zeros((), dtype=torch.float64, requires_grad=True)
        for i, (_, leaf) in enumerate(flatten(outputs)[0]):
            if is_differentiable(leaf):
                values = torch.view_as_real(leaf) if leaf.is_complex() else leaf
                products = values * _random_rows(i, values, int(rows[0]))
                total = total.to(leaf.device) + products.sum(dtype=torch.float64)
        return total


class _StoredOutputs(nn.Module):
    """Model whose inputs are row indices, and whose outputs are stored."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        leaves, self._rebuild = flatten(outputs)
        self._leaves = [
            nn.Parameter(leaf) if is_differentiable(leaf) else leaf for _, leaf in leaves
        ]
        for i, leaf in enumerate(self._leaves):
            if isinstance(leaf, nn.Parameter):
                self.register_parameter(f"output{i}", leaf)

    def forward(self, rows: torch.Tensor) -> Any:
        return select_samples(self._rebuild(iter(self._leaves)), rows)


def _random_rows(i: int, leaf: torch.Tensor, start: int) -> torch.Tensor:
    """Return random numbers in the shape of output ``i``, whose first row is row ``start``."""
    if not leaf.ndim:
        return torch.ones_like(leaf)
    # The numbers are numpy's, because those of torch may be fixed.
    numbers = np.empty(leaf.shape, np.float32)
    for row in range(len(leaf)):
        generator = np.random.default_rng((i, start + row))
        generator.random(dtype=np.float32, out=numbers[row : row + 1])
    return torch.from_numpy(numbers).sub_(0.5).to(leaf)


@contextlib.contextmanager
def _failures_are_differences(what_fails: str) -> Iterator[None]:
    """Raise errors of the user's code as differences; memory errors stay as they are."""
    try:
        yield
    except ArgumentError as error:
        raise _DifferenceFound(str(error)) from None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        first_line = (str(error).strip() or described(error)).splitlines()[0]
        raise _DifferenceFound(f"{what_fails} ({first_line})") from None


def check_states(plain: ModelState, other: ModelState) -> None:
    """Check that a model ends in the same state, bit for bit.

    The same computation gives the same bits; a state that was updated more often differs.

    Raises:
        _DifferenceFound: If the states differ.
    """
    for name, one, another in plain.pairs(other):
        if relative_error(one, another) > 0:
            raise _DifferenceFound(
                f"the forward pass changes {name!r} of the model, and chunks leave other "
                "values in it"
            )

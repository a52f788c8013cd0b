"""The outputs of a batch that does not fit, as if it did: their backward pass computes them again, chunk by chunk."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError, EstimateError
from pinfeed.memory import limits
from pinfeed.memory.host import free_host_bytes
from pinfeed.tensors.pytree import flatten
from pinfeed.training import rng_state
from pinfeed.training.large_batch.equivalence.verifier import EquivalenceVerifier
from pinfeed.training.large_batch.memory_predictor import memory_predictor_for
from pinfeed.training.large_batch.select import (
    STRATEGIES,
    StrategyChoice,
    choose_strategy,
)
from pinfeed.training.large_batch.strategies.batch_norms import batch_norms
from pinfeed.training.large_batch.strategies.micro_batches import (
    as_tensors,
    check_output_rows,
    concatenate,
    n_samples,
    sample_spec_of,
    shapes_and_dtypes,
    slice_samples,
)
from pinfeed.training.large_batch.strategies.recompute import (
    buffers_of,
    recomputed,
    replayed_buffers,
)
from pinfeed.training.large_batch.strategies.step_spec import StepSpec
from pinfeed.training.memory_model.models import call_model
from pinfeed.training.memory_model.tensor_specs import to_device
from pinfeed.training.offload.offload import Offload
from pinfeed.validation.arguments import whole_number

_POSSIBLE = ("auto", "plain", "two_pass", "checkpoint", "offload")


class Forwards:
    """Computes outputs of batches of any size.

    Args:
        config: Limits.
        chunk_size: Samples at a time, in place of the largest that fits.
        strategy: As for BigBatch, but for ``"accumulate"``, which needs the loss.
        prove: As for BigBatch.

    Raises:
        ArgumentError: What cannot be.
    """

    def __init__(
        self,
        config: limits.MemoryLimits | None,
        chunk_size: int | None,
        strategy: str,
        prove: bool = True,
    ) -> None:
        if strategy not in _POSSIBLE:
            raise ArgumentError(
                f"strategy={strategy!r}: expected {', '.join(map(repr, _POSSIBLE))}"
            )
        if chunk_size is not None:
            whole_number(chunk_size, "chunk_size")
        self._config = config or limits.MemoryLimits()
        self._chunk_size = chunk_size
        self._strategy = strategy
        self._proofs = EquivalenceVerifier(prove)
        self._by_shape: dict[Any, StrategyChoice] = {}
        # By the shape of a sample.
        self._plain: dict[Any, StrategyChoice] = {}
        self._offload: Offload | None = None
        self.chosen: StrategyChoice | None = None
        self.unpredicted: str | None = None

    def forget(self) -> None:
        """The model is elsewhere now: decide anew, and free what was for the old place."""
        self._by_shape.clear()
        self._plain.clear()
        self._proofs.forget()
        if self._offload is not None:
            self._offload.close()
        self._offload = None

    def outputs(
        self,
        model: nn.Module,
        inputs: Any,
        optimizer: Any,
        device: torch.device,
        back: torch.device,
    ) -> Any:
        """The outputs, on the device ``back``.

        Args:
            model: On ``device``.
            inputs: Anywhere.
            optimizer: What will train the model, if that is known.
            device: Of the model.
            back: Where the outputs are wanted.
        """
        inputs = as_tensors(inputs)
        self.chosen = chosen = self._choose(model, inputs, optimizer, device)
        if chosen.strategy == "two_pass":
            return _in_chunks(model, inputs, chosen.chunk_size, device, back)
        context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if chosen.strategy == "checkpoint":
            context = recomputed(model)
        if chosen.strategy == "offload":
            self._offload = self._offload or Offload(
                device, host_limit=self._config.host_limit(free_host_bytes())
            )
            context = self._offload.step(model)
        with context:
            return to_device(call_model(model, to_device(inputs, device)), back)

    def _choose(
        self, model: nn.Module, inputs: Any, optimizer: Any, device: torch.device
    ) -> StrategyChoice:
        n = n_samples(inputs)
        if n == 0:
            raise ArgumentError("the batch is empty; expected at least one sample")
        key = shapes_and_dtypes(inputs), *(module.training for module in model.modules())
        if key not in self._by_shape:
            # What fits of many samples fits of fewer: the last batch of an epoch needs no
            # prediction of its own.
            rest = sample_spec_of(inputs).key, key[1:]
            fits = self._plain.get(rest)
            found = (
                fits
                if fits is not None and fits.chunk_size > n
                else self._decide(model, n, inputs, optimizer, device)
            )
            if found.strategy == "plain" and found.chunk_size >= n:
                self._plain[rest] = found
            self._by_shape[key] = found
        return self._by_shape[key]

    def _decide(
        self, model: nn.Module, n: int, inputs: Any, optimizer: Any, device: torch.device
    ) -> StrategyChoice:
        nothing: dict[str, int | None] = dict.fromkeys(STRATEGIES)
        if self._strategy == "two_pass" and (norms := batch_norms(model)):
            raise ArgumentError(
                f"strategy='two_pass' computes chunks, and {norms[0]} normalizes over the batch; take 'offload' or 'checkpoint'"
            )
        if self._strategy in ("two_pass", "checkpoint") and (
            problem := self._problem_of(model, inputs, self._strategy)
        ):
            warnings.warn(
                f"strategy={self._strategy!r} does not give the gradients of the plain step: {problem}; take strategy='auto', or give "
                "prove=False if the difference does not matter",
                stacklevel=6,
            )
        if self._strategy not in ("auto", "two_pass"):
            return StrategyChoice(self._strategy, n, "it was asked for", nothing)  # type: ignore[arg-type]
        try:
            predictor = None
            if self._chunk_size is None:
                predictor = memory_predictor_for(
                    model, self._config, device, inputs, optimizer=optimizer
                )
            if self._strategy == "auto":
                problem_of = functools.partial(self._problem_of, model, inputs)
                return choose_strategy(model, n, self._chunk_size, False, predictor, problem_of)
            size = min(n, self._chunk_size or predictor.chunk_size(n, in_two_passes=True))  # type: ignore[union-attr]  # there is one or the other
        except EstimateError as error:
            self.unpredicted = str(error)
            return StrategyChoice("plain", n, "what it takes cannot be predicted", nothing)
        return StrategyChoice("two_pass", size, "it was asked for", nothing)

    def _problem_of(self, model: nn.Module, inputs: Any, strategy: str) -> str:
        """In what the outputs of a strategy, or gradients through them, differ from those of the whole batch."""
        outputs_only = StepSpec(
            model,
            lambda outputs, _: outputs,
            (model,),
            "sum",
            lambda _: 1,
            contextlib.nullcontext,
            lambda loss: loss,
        )
        return self._proofs.problem_of(strategy, outputs_only, inputs)


def _in_chunks(
    model: nn.Module, inputs: Any, size: int, device: torch.device, back: torch.device
) -> Any:
    """Outputs of all chunks, without what their backward pass needs; it computes them again."""
    trigger = torch.zeros((), requires_grad=any(p.requires_grad for p in model.parameters()))
    again = _Again(model, inputs, size, device, back)
    leaves = _Recompute.apply(again, trigger)  # type: ignore[no-untyped-call]
    return again.rebuild(iter(leaves))


class _Again:
    """Chunks that are computed twice."""

    def __init__(
        self, model: nn.Module, inputs: Any, size: int, device: torch.device, back: torch.device
    ) -> None:
        self._model = model
        self._device = device
        self._back = back
        self._chunks = [
            slice_samples(inputs, start, start + size)
            for start in range(0, n_samples(inputs), size)
        ]  # views
        self._states: list[dict[str, Any]] = []
        self._buffers = buffers_of([model])
        kind = device.type
        self._autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def first(self) -> list[Any]:
        """Outputs, without gradients."""
        parts = []
        for chunk in self._chunks:
            self._states.append(rng_state.capture())
            outputs = call_model(self._model, to_device(chunk, self._device))
            check_output_rows(outputs, n_samples(chunk))
            parts.append(to_device(outputs, self._back))
        leaves, self.rebuild = flatten(concatenate(parts))
        return [leaf for _, leaf in leaves]

    def second(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Add the gradients of the model's parameters, with those of the outputs."""
        with replayed_buffers(self._buffers):
            self._chunk_by_chunk(gradients)

    def _chunk_by_chunk(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        start = 0
        for chunk, state in zip(self._chunks, self._states, strict=True):
            with torch.enable_grad(), rng_state.replayed(state), self._context():
                outputs = call_model(self._model, to_device(chunk, self._device))
            stop = start + n_samples(outputs)
            leaves = [leaf for _, leaf in flatten(outputs)[0]]
            pairs = [
                (leaf, gradient[start:stop].to(leaf.device))
                for leaf, gradient in zip(leaves, gradients, strict=True)
                if gradient is not None and isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ]
            torch.autograd.backward(
                [leaf for leaf, _ in pairs], [gradient for _, gradient in pairs]
            )
            start = stop

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        return (
            contextlib.nullcontext()
            if self._autocast is None
            else torch.autocast(self._device.type, self._autocast)
        )


class _Recompute(torch.autograd.Function):
    """Gradients go to the parameters where they are, as a backward pass within this one."""

    @staticmethod
    def forward(ctx: Any, again: _Again, trigger: torch.Tensor) -> tuple[Any, ...]:
        """Outputs, by chunks. ``trigger`` is what makes them want a backward pass."""
        ctx.again = again
        ctx.set_materialize_grads(False)
        return tuple(again.first())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None]:
        """Each chunk again."""
        ctx.again.second(gradients)
        return None, None

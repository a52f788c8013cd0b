"""BatchForward: the forward pass of a batch of any size, by a strategy that fits in memory.

If that strategy computes chunks, the backward pass computes each chunk again. The user computes
the loss, so the outputs of all chunks are one node of the autograd graph.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from pinfeed.compat.infinitybatch.missing_calls import warn
from pinfeed.errors import ArgumentError, EstimateError
from pinfeed.memory import limits
from pinfeed.tensors.numpy_torch import version_of
from pinfeed.tensors.pytree import Rebuild, flatten
from pinfeed.training.large_batch.batches import (
    Chunk,
    Chunks,
    as_tensors,
    n_samples,
    shapes_and_dtypes,
    slice_samples,
)
from pinfeed.training.large_batch.chunked_gradients import RecomputedChunks
from pinfeed.training.large_batch.memory_predictor import MemoryPredictor
from pinfeed.training.large_batch.step_spec import StepSpec, batch_norms, device_of
from pinfeed.training.large_batch.strategy_choice import StrategyChoice, choose_strategy
from pinfeed.training.large_batch.verifier import Verifier
from pinfeed.training.large_batch.whole_steps import WholeSteps, recomputes
from pinfeed.training.memory_model.tensor_specs import to_device
from pinfeed.training.memory_model.training_step import call_model
from pinfeed.validation.arguments import check_choice, whole_number

_STRATEGIES = ("auto", "plain", "two_pass", "checkpoint", "checkpoint_offload", "offload")


class BatchForward:
    """Computes the outputs of batches of any size.

    Args:
        config: Memory limits; None for the free memory.
        chunk_size: Samples per chunk; None for the largest chunk that fits.
        strategy: A strategy of BigBatch, except for ``"accumulate"``, which needs the loss.
        verify: Whether to compare gradients with those of the plain step, as BigBatch does.

    Raises:
        ArgumentError: If ``strategy`` or ``chunk_size`` is invalid.
    """

    def __init__(
        self,
        config: limits.MemoryLimits | None,
        chunk_size: int | None,
        strategy: str,
        verify: bool = True,
    ) -> None:
        check_choice(strategy, "strategy", _STRATEGIES)
        if chunk_size is not None:
            whole_number(chunk_size, "chunk_size")
        self._config = config or limits.MemoryLimits()
        self._chunk_size = chunk_size
        self._strategy = strategy
        self._verifier = Verifier(verify)
        self._choice_by_shape: dict[Any, StrategyChoice] = {}
        self._whole: WholeSteps | None = None
        self.chosen: StrategyChoice | None = None

    def forget(self) -> None:
        """Drop all choices and the memory for the previous device; call it after a move."""
        self._choice_by_shape.clear()
        self._verifier.forget()
        if self._whole is not None:
            self._whole.close()
        self._whole = None

    def outputs(self, model: nn.Module, inputs: Any, optimizer: Any, back: torch.device) -> Any:
        """Return the outputs of a batch.

        Args:
            model: The model.
            inputs: The inputs of the batch, on any device.
            optimizer: The optimizer of the model; None if it is unknown.
            back: Device of the outputs.
        """
        device = device_of(model)
        inputs = as_tensors(inputs)
        # The strategies are compared by their gradients, also before an evaluation.
        with torch.enable_grad():
            choice = self._choose(model, inputs, optimizer)
        self.chosen = choice
        if choice.strategy == "two_pass":
            return _outputs_in_chunks(model, inputs, choice.chunk_size, device, back)
        self._whole = self._whole or WholeSteps(device, self._config)
        inputs = to_device(inputs, device)
        with self._whole.context(choice.strategy, [model], inputs, choice.device_limit):
            return to_device(call_model(model, inputs), back)

    def _choose(self, model: nn.Module, inputs: Any, optimizer: Any) -> StrategyChoice:
        """Return the choice for batches of this shape; it is made once."""
        n = n_samples(inputs)
        if n == 0:
            raise ArgumentError("the batch is empty; expected at least one sample")
        modes = tuple(module.training for module in model.modules())
        key = (shapes_and_dtypes(inputs), *modes)
        if key not in self._choice_by_shape:
            self._choice_by_shape[key] = self._decide(model, n, inputs, optimizer)
        return self._choice_by_shape[key]

    def _decide(self, model: nn.Module, n: int, inputs: Any, optimizer: Any) -> StrategyChoice:
        spec = _spec_of_outputs(model)
        self._check_strategy(spec, inputs)
        if self._strategy not in ("auto", "two_pass"):
            why = f"strategy={self._strategy!r} was given"
            return StrategyChoice(self._strategy, n, why)  # type: ignore[arg-type]
        try:
            predictor = None
            if self._chunk_size is None:
                predictor = MemoryPredictor(model, self._config, inputs, optimizer=optimizer)
            size = self._chunk_size
            if self._strategy == "auto":
                return choose_strategy(spec, (inputs, None), size, predictor, self._verifier)
            if predictor is not None:
                size = predictor.chunk_size("two_pass", n)
        except EstimateError as error:
            warn(f"the whole batch is computed at once, because {error}", 7)
            return StrategyChoice("plain", n, "its memory cannot be predicted")
        assert size is not None
        return StrategyChoice("two_pass", min(n, size), "strategy='two_pass' was given")

    def _check_strategy(self, spec: StepSpec, inputs: Any) -> None:
        """Refuse, or warn about, a strategy that gives other gradients than the plain step."""
        if self._strategy == "two_pass" and (norms := batch_norms(spec.model)):
            raise ArgumentError(
                f"strategy='two_pass' computes chunks, but {norms[0]} normalizes over the batch; "
                "give strategy='checkpoint' or 'checkpoint_offload'"
            )
        if self._strategy != "two_pass" and not recomputes(self._strategy):
            return
        if problem := self._verifier.problem_of(self._strategy, spec, inputs):
            warn(
                f"strategy={self._strategy!r} does not give the gradients of the plain step: "
                f"{problem}; give strategy='auto', or verify=False if the difference does not "
                "matter",
                8,
            )


def _spec_of_outputs(model: nn.Module) -> StepSpec:
    """Return the spec of a step whose loss is unknown, so only outputs are compared."""
    return StepSpec(
        model,
        lambda outputs, _: outputs,
        (model,),
        None,
        lambda _: 1,
        contextlib.nullcontext,
        lambda loss: loss,
    )


def _outputs_in_chunks(
    model: nn.Module, inputs: Any, size: int, device: torch.device, back: torch.device
) -> Any:
    """Return the outputs of a batch; the backward pass computes them again from the inputs.

    Args:
        model: The model, on ``device``.
        inputs: The inputs of the batch, on any device.
        size: Samples of a chunk.
        device: Device of the model.
        back: Device of the outputs.
    """
    # The backward pass may run outside the context of autocast, or within another one.
    kind = device.type
    autocast = torch.autocast(
        kind, torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind)
    )

    def chunks() -> Chunks:
        for start in range(0, n_samples(inputs), size):
            yield Chunk(slice_samples(inputs, start, start + size), None, 0.0)

    def compute(chunk: Any) -> Any:
        with autocast:
            return to_device(call_model(model, to_device(chunk, device)), back)

    # Autograd adds a node for the outputs only if an input requires a gradient.
    trigger = torch.zeros((), requires_grad=any(p.requires_grad for p in model.parameters()))
    recomputed_chunks = RecomputedChunks(chunks, compute, [model])
    rebuild: list[Rebuild] = []
    leaves = _ChunkedForward.apply(recomputed_chunks, model, rebuild, trigger)  # type: ignore[no-untyped-call]
    return rebuild[0](iter(leaves))


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the identity of each parameter, and how often it was changed in place."""
    return {name: (id(one), version_of(one)) for name, one in model.named_parameters()}


class _ChunkedForward(torch.autograd.Function):
    """Autograd node of the outputs of all chunks.

    Its backward pass runs the backward pass of each chunk, which adds to the parameters' gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        chunks: RecomputedChunks,
        model: nn.Module,
        rebuild: list[Rebuild],
        trigger: torch.Tensor,
    ) -> tuple[Any, ...]:
        """Return the outputs' leaves; ``trigger`` requires a gradient if a parameter does."""
        ctx.chunks = chunks
        ctx.model = model
        ctx.versions = _versions(model)
        ctx.set_materialize_grads(False)
        leaves, of_leaves = flatten(chunks.outputs())
        rebuild.append(of_leaves)
        return tuple(leaf for _, leaf in leaves)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        """Compute each chunk again, and run its backward pass.

        Raises:
            RuntimeError: If a parameter has changed since the forward pass.
        """
        now = _versions(ctx.model)
        changed = [name for name, version in ctx.versions.items() if now.get(name) != version]
        if changed:
            raise RuntimeError(
                f"parameters ({', '.join(changed[:3])}) have changed since the forward pass of "
                "this batch, whose chunks the backward pass computes again; expected unchanged "
                "parameters; call backward before the step of the optimizer"
            )
        ctx.chunks.backward(gradients)
        return None, None, None, None

"""ForwardTrace: records the layers that a forward pass calls, on tensors without data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pinfeed.errors import EstimateError
from pinfeed.tensors.pytree import flatten
from pinfeed.training.memory_model.estimate import StepEstimator
from pinfeed.training.memory_model.models import call_model
from pinfeed.training.memory_model.tensor_specs import SampleSpec, samples_of
from pinfeed.training.memory_model.training_step import StepRun


@dataclass(frozen=True)
class LayerCall:
    """A layer's forward pass.

    Attributes:
        layer: The layer.
        input_shape: Shape of the first input tensor; ``()`` if there is none.
        output_shape: Shape of the output, or a tuple of shapes if the layer returns several
            tensors.
        n_variables: Elements of the new outputs. An output is new if it is not the input, not the
            output of another layer, and not a view of these. Elements count twice if they have a
            gradient.
    """

    layer: nn.Module
    input_shape: tuple[int, ...]
    output_shape: tuple[Any, ...]
    n_variables: int


class ForwardTrace:
    """A step for StepEstimator that runs the forward pass only, and records each layer.

    Attributes:
        calls: Calls of layers in the order in which they ended; the network's own call is last.
        outputs: Outputs of the network.
    """

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []
        self.outputs: Any = None
        # The storages are kept alive, because a new one could get the address of a freed one.
        self._storages: dict[int, Any] = {}

    def __call__(self, run: StepRun, batch_size: int) -> None:
        """Record a forward pass. The estimator runs a step twice, and the second run counts."""
        self.calls = []
        self._storages = {}
        for module in run.model.modules():
            # In training mode, BatchNorm refuses a batch of one. The shapes are the same in eval
            # mode.
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        inputs, _ = run.batch(batch_size)
        for tensor in tensor_leaves(inputs):
            self._is_new(tensor)
        hooks = [
            module.register_forward_hook(self._record, with_kwargs=True)
            for module in run.model.modules()
        ]
        self.outputs = call_model(run.model, inputs)
        for hook in hooks:
            hook.remove()

    @property
    def n_variables(self) -> int:
        """Elements of the new outputs of all layers."""
        return sum(call.n_variables for call in self.calls)

    @property
    def n_outputs(self) -> int | None:
        """Length of the first output tensor, which should be the batch size."""
        outputs = self.outputs
        if isinstance(outputs, Mapping):
            outputs = dict(outputs)
        first = next(tensor_leaves(outputs), None)
        return first.shape[0] if first is not None and first.ndim else None

    def _record(self, layer: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        input_tensors = list(tensor_leaves((args, kwargs)))
        output_tensors = list(tensor_leaves(outputs))
        input_shape = tuple(input_tensors[0].shape) if input_tensors else ()
        shapes = tuple(tuple(tensor.shape) for tensor in output_tensors)
        output_shape = shapes[0] if isinstance(outputs, torch.Tensor) else shapes
        n_variables = sum(
            tensor.numel() * (2 if tensor.requires_grad else 1)
            for tensor in output_tensors
            if self._is_new(tensor)
        )
        self.calls.append(LayerCall(layer, input_shape, output_shape, n_variables))

    def _is_new(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        if storage._cdata in self._storages:
            return False
        self._storages[storage._cdata] = storage
        return True


def tensor_leaves(value: Any) -> Iterator[torch.Tensor]:
    """Return an iterator over the tensors of a nested structure."""
    return (leaf for _, leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor))


def trace_forward(model: Any, samples: SampleSpec, n: int) -> ForwardTrace:
    """Trace the forward pass of a batch of ``n`` samples.

    Raises:
        EstimateError: If the network does not accept such a batch.
    """
    trace = ForwardTrace()
    StepEstimator(model, samples, None, optimizer=_optimizer).at(n, trace)
    return trace


def trace_input_shape(model: Any, input_shape: Any) -> ForwardTrace:
    """Trace the forward pass of a tensor of exactly this shape, or else of a batch of one.

    Raises:
        EstimateError: If the network accepts neither shape, with floats or with integers.
    """
    shape = samples_of(input_shape, "float32", "input").shapes[0]
    batch_shapes = [(1, *shape)]
    if shape and 0 not in shape:
        batch_shapes.insert(0, shape)
    first_error: EstimateError | None = None
    for n, *sample_shape in batch_shapes:
        for dtype in (_float_dtype(model), torch.int64):
            try:
                samples = samples_of(tuple(sample_shape), dtype, "input")
                return trace_forward(model, samples, n)
            except EstimateError as error:
                first_error = first_error or error
    assert first_error is not None
    raise first_error


def _float_dtype(model: Any) -> torch.dtype:
    """Return the dtype of the first floating point parameter, or torch's default dtype."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    floats = (p.dtype for p in parameters if p.is_floating_point())
    return next(floats, torch.get_default_dtype())


def _optimizer(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer without state, which never steps.

    A network may have no parameters, but an optimizer needs at least one.
    """
    return torch.optim.SGD(list(parameters) or [torch.zeros(1)])

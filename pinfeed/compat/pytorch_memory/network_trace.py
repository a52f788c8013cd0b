"""Traces of a network's forward pass without data: its layers, and the samples that it accepts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pinfeed.errors import ArgumentError, EstimateError, described
from pinfeed.tensors.pytree import flatten
from pinfeed.training.memory_model.estimate import StepEstimator
from pinfeed.training.memory_model.report import count_parameters
from pinfeed.training.memory_model.tensor_specs import SampleSpec, map_tensors, samples_of
from pinfeed.training.memory_model.training_step import StepRun, call_model

Integers = Literal["as they are", "as floats", "as int64"]
"""The conversion of integer samples, which may be ids, pixels, or ids stored in few bits."""


class LayerCall(NamedTuple):
    """A layer's forward pass."""

    layer: nn.Module
    input_shape: tuple[int, ...]
    """Shape of the first input tensor; ``()`` if there is none."""
    output_shape: tuple[Any, ...]
    """Shape of the output, or a tuple of shapes if the layer returns several tensors."""


class ForwardTrace:
    """A step for StepEstimator that runs the forward pass only, and records each layer.

    Attributes:
        calls: Calls of layers in the order in which they ended; the network's own call is last.
        n_variables: Elements of the new outputs of all layers, twice if they have a gradient. An
            output is new if it is not an input, not the output of another layer, and not a view of
            these.
        n_outputs: Length of the first output tensor, which should be the batch size.
    """

    def __call__(self, run: StepRun, batch_size: int) -> None:
        """Record a forward pass. The estimator runs a step twice, and the second run counts."""
        self.calls: list[LayerCall] = []
        self.n_variables = 0
        # The storages are kept alive, because a new one could get the address of a freed one.
        self._storages: dict[int, Any] = {}
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
        outputs = call_model(run.model, inputs)
        for hook in hooks:
            hook.remove()
        first = next(
            tensor_leaves(dict(outputs) if isinstance(outputs, Mapping) else outputs), None
        )
        self.n_outputs = first.shape[0] if first is not None and first.ndim else None

    def _record(self, layer: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        input_tensors = list(tensor_leaves((args, kwargs)))
        output_tensors = list(tensor_leaves(outputs))
        input_shape = tuple(input_tensors[0].shape) if input_tensors else ()
        shapes = tuple(tuple(tensor.shape) for tensor in output_tensors)
        output_shape = shapes[0] if isinstance(outputs, torch.Tensor) else shapes
        self.calls.append(LayerCall(layer, input_shape, output_shape))
        for tensor in output_tensors:
            if self._is_new(tensor):
                self.n_variables += tensor.numel() * (2 if tensor.requires_grad else 1)

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
    errors = []
    for n, *sample_shape in batch_shapes:
        for dtype in (_float_dtype(model), torch.int64):
            try:
                samples = samples_of(tuple(sample_shape), dtype, "input")
                return trace_forward(model, samples, n)
            except EstimateError as error:
                errors.append(error)
    raise errors[0]


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


def check_model_class(model_class: Any) -> Any:
    """Return ``model_class``, if it is a module, or a callable that needs no arguments.

    Raises:
        ArgumentError: If ``model_class`` is neither.
    """
    if isinstance(model_class, nn.Module):
        return model_class
    name = getattr(model_class, "__name__", repr(model_class))
    if not callable(model_class):
        raise ArgumentError(
            f"model_class={model_class!r}: expected a torch module, "
            "or a class or function that makes one"
        )
    try:
        inspect.signature(model_class).bind()
    except TypeError as error:
        raise ArgumentError(
            f"model_class={name} cannot be called without arguments ({described(error)}); "
            f"give a module, {name}(...), or a function that makes one, lambda: {name}(...)"
        ) from None
    except ValueError:
        # Some builtins have no signature. Calling them shows whether they need arguments.
        pass
    return model_class


class ConvertingModel(nn.Module):
    """A network that converts its inputs: floats to its own dtype, as a training loop would.

    Args:
        model: A module, which is not changed, or a function that makes one.
        integers: The conversion of integers.
    """

    def __init__(self, model: Any, integers: Integers = "as they are") -> None:
        super().__init__()
        self.model = model if isinstance(model, nn.Module) else model()
        if not isinstance(self.model, nn.Module):
            raise ArgumentError(
                f"model_class={model!r} returned a {type(self.model).__name__}; expected a torch "
                "module"
            )
        self.training = self.model.training
        self._dtype = _float_dtype(self.model)
        self._integers = integers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the network's own outputs."""
        args, kwargs = map_tensors(self._converted, (args, kwargs))
        return self.model(*args, **kwargs)

    def _converted(self, value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point() or (self._integers == "as floats" and not value.is_complex()):
            return value.to(self._dtype)
        return value.long() if self._integers == "as int64" else value


class SampleFormat(NamedTuple):
    """Format in which a network accepts samples."""

    model: Any
    """The network with a conversion of its inputs, or a function that makes it."""
    sample_shape: Any
    """Shape of a sample, without the dimension of the batch."""
    n_variables: int
    """Elements that the layers give for one sample."""


def find_sample_format(model_class: Any, input_shape: Any, input_dtype: Any) -> SampleFormat:
    """Find the format in which a network accepts samples, by trials with batches of two and three.

    A leading 1 of ``input_shape`` is the batch dimension if the network then returns one output
    for each sample. Otherwise it is part of the sample. Floats are converted to the network's
    dtype. Integers stay integers. If the network does not accept them, they become floats, or else
    int64.

    Raises:
        ArgumentError: If the shape, the dtype or the model is invalid.
        EstimateError: If the network accepts the samples in none of these formats. The error is
            that of the first trial.
    """
    model = check_model_class(model_class)
    errors = []
    for integers in _conversions(input_shape, input_dtype):
        converting: Any = functools.partial(ConvertingModel, model, integers)
        if isinstance(model, nn.Module):
            converting = converting()
        # A format that runs, although the number of outputs does not confirm it.
        unconfirmed: SampleFormat | None = None
        for shape in _possible_shapes(input_shape):
            samples = samples_of(shape, input_dtype, "input")
            try:
                two = trace_forward(converting, samples, 2)
                three = trace_forward(converting, samples, 3)
            except EstimateError as error:
                errors.append(error)
                continue
            found = SampleFormat(converting, shape, three.n_variables - two.n_variables)
            if (two.n_outputs, three.n_outputs) == (2, 3):
                return found
            # The last shape is the one that the user gave, and is preferred.
            unconfirmed = found
        if unconfirmed is not None:
            return unconfirmed
    raise errors[0]


def _conversions(input_shape: Any, input_dtype: Any) -> list[Integers]:
    """Return the conversions of integers to try, in order."""
    dtypes = samples_of(input_shape, input_dtype, "input").dtypes
    if all(dtype.is_floating_point or dtype.is_complex for dtype in dtypes):
        return ["as they are"]
    return ["as they are", "as floats", "as int64"]


def _possible_shapes(input_shape: Any) -> list[Any]:
    """Return the shapes that a sample may have, in the order in which to try them."""
    is_shape = isinstance(input_shape, (tuple, list)) and bool(input_shape)
    if is_shape and isinstance(input_shape[0], int) and input_shape[0] == 1:
        return [tuple(input_shape[1:]), tuple(input_shape)]
    return [input_shape]


def get_parameter_count(model_class: Any) -> int:
    """Return the number of elements of all parameters of a network, each counted once.

    A class or function makes the network without memory for its parameters.
    """
    model = check_model_class(model_class)
    if isinstance(model, nn.Module):
        return sum(count_parameters(model))
    with FakeTensorMode(allow_non_fake_inputs=True):
        return sum(count_parameters(ConvertingModel(model)))


def get_variable_count(model_class: Any, input_shape: Any) -> int:
    """Return the number of elements of the outputs of all layers, twice if they have gradients.

    An output that is the output of another layer, or a view of that output, counts once. This
    applies to containers, layers that work in place, and Flatten. Intermediate results of
    computations outside layers do not count.

    Raises:
        EstimateError: If the network accepts neither such an input nor a batch of one such input.
    """
    return trace_input_shape(check_model_class(model_class), input_shape).n_variables


class InspectNetwork:
    """Counts of a network's parameters and outputs, as in the original's first READMEs.

    Examples:
        >>> from pinfeed.compat.pytorch_memory import InspectNetwork
        >>> inspected = InspectNetwork(torch.nn.Linear(8, 2), (8,))
        >>> inspected.get_parameter_count()
        18

    Args:
        network: The network, or a class or a function without arguments that makes one.
        input_shape: Shape of an input, with or without the dimension of the batch.

    Raises:
        ArgumentError: If ``network`` is not a module and does not make one.
        EstimateError: If the network does not accept such an input.
    """

    def __init__(self, network: Any, input_shape: Any) -> None:
        self._n_parameters = get_parameter_count(network)
        self._n_variables = get_variable_count(network, input_shape)

    def get_parameter_count(self) -> int:
        """Return the number of elements of all parameters, each counted once."""
        return self._n_parameters

    def get_intermediate_variable_count(self) -> int:
        """Return the number that ``get_variable_count`` returns."""
        return self._n_variables


def summary_of_network(model_class: Any, input_shape: Any) -> list[dict[str, Any]]:
    """Return the layers of a network, in the order in which they return their outputs.

    Each is a dict of ``input_shape``, ``output_shape`` (a tuple of shapes for several outputs),
    ``parameter_count`` and ``layer_type_name``. Containers are layers, too.

    Raises:
        EstimateError: If the network accepts neither such an input nor a batch of one such input.
    """
    calls = trace_input_shape(check_model_class(model_class), input_shape).calls
    # The last call is the network itself, which is listed only if it is a single layer.
    return [
        {
            "input_shape": call.input_shape,
            "output_shape": call.output_shape,
            "parameter_count": get_parameter_count(call.layer),
            "layer_type_name": type(call.layer).__name__,
        }
        for call in (calls[:-1] or calls)
    ]

"""What a network makes of a sample: which shape and dtype it takes, and what its layers give, found on tensors without data."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from pinfeed.errors import ArgumentError, EstimateError, described
from pinfeed.tensors.pytree import flatten
from pinfeed.training.memory_model.estimate import StepEstimator
from pinfeed.training.memory_model.models import call_model
from pinfeed.training.memory_model.report import layers_of
from pinfeed.training.memory_model.step_run import StepRun
from pinfeed.training.memory_model.tensor_specs import SampleSpec, samples_of

Integers = Literal["as they are", "as floats", "as int64"]
"""What a network is given where samples are integers: ids, pixels of a byte, or ids that are stored in few bits."""


class Converting(nn.Module):
    """A network that converts its inputs itself: floats to its own dtype, as a loop would have to.

    Args:
        model: Of a module, which stays as it is; or what makes one when it is called.
        integers: What integers become.
    """

    def __init__(self, model: Any, integers: Integers = "as they are") -> None:
        super().__init__()
        self.model = model if isinstance(model, nn.Module) else model()
        if not isinstance(self.model, nn.Module):
            raise ArgumentError(
                f"model_class={model!r} made a {type(self.model).__name__}; expected a torch module"
            )
        self.training = self.model.training
        floats = [p.dtype for p in self.model.parameters() if p.is_floating_point()]
        self._dtype = floats[0] if floats else torch.get_default_dtype()
        self._integers = integers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The network's own outputs."""
        leaves, rebuild = flatten((args, kwargs))
        args, kwargs = rebuild(iter([self._converted(leaf) for _, leaf in leaves]))
        return self.model(*args, **kwargs)

    def _converted(self, value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point() or (self._integers == "as floats" and not value.is_complex()):
            return value.to(self._dtype)
        return value.long() if self._integers == "as int64" else value


@dataclass(frozen=True)
class Recognised:
    """How samples reach a network.

    Attributes:
        model: Takes batches of the samples as they are.
        sample_shape: Of a sample, without the dimension of the batch.
        n_variables: Elements that the layers give for one sample.
    """

    model: Any
    sample_shape: Any
    n_variables: int


@dataclass(frozen=True)
class LayerCall:
    """A layer's forward pass.

    Attributes:
        layer: The layer.
        input_shape: Of its first tensor.
        output_shape: Of what it gave: a shape, or a tuple of them where it gave several tensors.
        n_variables: Elements of what it gave that is new: neither the input itself nor what another
            layer gave, and no view of these. Twice as many where they have a gradient.
    """

    layer: nn.Module
    input_shape: tuple[int, ...]
    output_shape: tuple[Any, ...]
    n_variables: int


class Forward:
    """A step that runs the forward pass only, and looks at each layer.

    Attributes:
        calls: In the order in which they ended; the network's own is the last.
        outputs: Of the network.
    """

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []
        self.outputs: Any = None
        # Storages, which are kept: another one would come where one has gone.
        self._seen: dict[int, Any] = {}

    def __call__(self, run: StepRun, batch_size: int) -> None:
        """Look. Steps are run twice, and the second one counts."""
        self.calls = []
        self._seen = {}
        for module in run.model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                # In training it refuses a batch of one; shapes are the same.
                module.eval()
        inputs, _ = run.batch(batch_size)
        for tensor in tensors_of(inputs):
            self._is_new(tensor)
        hooks = [
            module.register_forward_hook(self._see, with_kwargs=True)
            for module in run.model.modules()
        ]
        self.outputs = call_model(run.model, inputs)
        for hook in hooks:
            hook.remove()

    def _see(self, layer: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        given, made = list(tensors_of((args, kwargs))), list(tensors_of(outputs))
        shapes = tuple(tuple(tensor.shape) for tensor in made)
        n_variables = sum(
            tensor.numel() * (2 if tensor.requires_grad else 1)
            for tensor in made
            if self._is_new(tensor)
        )
        shape = shapes[0] if isinstance(outputs, torch.Tensor) else shapes
        self.calls.append(
            LayerCall(layer, tuple(given[0].shape) if given else (), shape, n_variables)
        )

    def _is_new(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:
            return False
        self._seen[storage._cdata] = storage
        return True


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a structure."""
    return (leaf for _, leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor))


def checked(model_class: Any) -> Any:
    """``model_class``; ArgumentError unless it is a module, or makes one when it is called with nothing."""
    if isinstance(model_class, nn.Module):
        return model_class
    name = getattr(model_class, "__name__", repr(model_class))
    if not callable(model_class):
        raise ArgumentError(
            f"model_class={model_class!r}: expected a torch module, or a class or function that makes one"
        )
    try:
        inspect.signature(model_class).bind()
    except TypeError as error:
        raise ArgumentError(
            f"model_class={name} cannot be called without arguments ({described(error)}); give a module that you have made, or a function: "
            f"lambda: {name}(...)"
        ) from None
    except ValueError:
        # It has no signature.
        pass
    return model_class


def recognised(model_class: Any, input_shape: Any, input_dtype: Any) -> Recognised:
    """Find out how a network takes its samples, by trying it on batches of two and three.

    A leading 1 of ``input_shape`` is the dimension of a batch, if the network then gives as many
    outputs as it gets samples, and else part of the sample. Floats are converted to the network's
    dtype. Integers stay as they are; if it does not take them, they become floats, or else int64.

    Raises:
        ArgumentError: A shape, a dtype or a model that cannot be.
        EstimateError: It takes them in no way; the error is that of the first one.
    """
    model, first = checked(model_class), None
    kinds: list[Integers] = ["as they are"]
    if not all(
        dtype.is_floating_point or dtype.is_complex
        for dtype in samples_of(input_shape, input_dtype, "input").dtypes
    ):
        kinds += ["as floats", "as int64"]
    shapes = [input_shape]
    if (
        isinstance(input_shape, (tuple, list))
        and input_shape
        and isinstance(input_shape[0], int)
        and input_shape[0] == 1
    ):
        shapes = [tuple(input_shape[1:]), tuple(input_shape)]
    # It runs, and nobody knows which dimension is the batch's.
    weak = None
    for integers in kinds:
        for shape in shapes:
            taking: Any = (
                Converting(model, integers)
                if isinstance(model, nn.Module)
                else _Making(model, integers)
            )
            try:
                two, three = (
                    _forward(taking, samples_of(shape, input_dtype, "input"), n) for n in (2, 3)
                )
            except EstimateError as error:
                first = first or error
                continue
            found = Recognised(taking, shape, _n_variables(three) - _n_variables(two))
            if _n_outputs(two) == 2 and _n_outputs(three) == 3:
                return found
            # The shape as it was given comes last.
            weak = found
        if weak is not None:
            return weak
    assert first is not None
    raise first


def get_parameter_count(model_class: Any) -> int:
    """Elements of all parameters of a network, each once; it is made without memory for them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if isinstance(model := checked(model_class), nn.Module):
        layers = layers_of(model)
    else:
        with FakeTensorMode(allow_non_fake_inputs=True):
            layers = layers_of(Converting(model))
    return sum(layer.n_trainable + layer.n_frozen for layer in layers)


def get_variable_count(model_class: Any, input_shape: Any) -> int:
    """Elements of what the layers of a network give for an input of that shape, and as many again for their gradients.

    An output that is another one, or a view of it, counts once: of a container, of layers that work
    in place, of Flatten. What the network computes outside its layers is not seen, but for its
    result.

    Raises:
        EstimateError: The network does not take such an input, nor a batch of one of them.
    """
    return _n_variables(_as_given(checked(model_class), input_shape))


class InspectNetwork:
    """The counts of a network, as the first READMEs ask for them.

    Args:
        network: The network, or a class or a function without arguments that makes one.
        input_shape: Shape of an input, with or without the dimension of the batch.

    Raises:
        ArgumentError: If ``network`` is not a module and makes none.
        EstimateError: If the network does not take such an input.
    """

    def __init__(self, network: Any, input_shape: Any) -> None:
        self._n_parameters = get_parameter_count(network)
        self._n_variables = get_variable_count(network, input_shape)

    def get_parameter_count(self) -> int:
        """Return the number of elements of all parameters, each counted once."""
        return self._n_parameters

    def get_intermediate_variable_count(self) -> int:
        """Return what ``get_variable_count`` counts."""
        return self._n_variables


def summary_of_network(model_class: Any, input_shape: Any) -> list[dict[str, Any]]:
    """The layers of a network in the order in which they give their outputs, each as a dictionary; containers are layers too.

    ``input_shape``, ``output_shape`` (a tuple of shapes, where there are several outputs),
    ``parameter_count``, ``layer_type_name``.

    Raises:
        EstimateError: The network does not take such an input, nor a batch of one of them.
    """
    calls = _as_given(checked(model_class), input_shape).calls
    return [
        {
            "input_shape": call.input_shape,
            "output_shape": call.output_shape,
            "parameter_count": get_parameter_count(call.layer),
            "layer_type_name": type(call.layer).__name__,
        }
        # Without the network, unless it is a layer itself.
        for call in (calls[:-1] or calls)
    ]


@dataclass(frozen=True)
class _Making:
    """Makes the network when it is called, on whatever tensors then are made."""

    model: Any
    integers: Integers

    def __call__(self) -> Converting:
        return Converting(self.model, self.integers)


def _as_given(model: Any, input_shape: Any) -> Forward:
    """A forward pass on a tensor of just that shape; or on a batch of one of them."""
    shape, first = samples_of(input_shape, "float32", "input").shapes[0], None
    floats = (
        [p.dtype for p in model.parameters() if p.is_floating_point()]
        if isinstance(model, nn.Module)
        else []
    )
    for n, *rest in (shape, (1, *shape)) if shape and 0 not in shape else ((1, *shape),):
        for dtype in (floats[0] if floats else torch.get_default_dtype(), torch.int64):
            try:
                return _forward(model, samples_of(tuple(rest), dtype, "input"), n)
            except EstimateError as error:
                first = first or error
    assert first is not None
    raise first


def _forward(model: Any, samples: SampleSpec, n: int) -> Forward:
    forward = Forward()
    # Which prints tracebacks of what only is a try.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled = log.disabled
    log.disabled = True
    try:
        StepEstimator(model, samples, None, optimizer=_optimizer, device="cpu").at(n, forward)
    finally:
        log.disabled = disabled
    return forward


def _optimizer(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """One that keeps nothing; it does not step, for there are no gradients, and a network may have no parameters."""
    return torch.optim.SGD(list(parameters) or [torch.zeros(1)])


def _n_variables(forward: Forward) -> int:
    return sum(call.n_variables for call in forward.calls)


def _n_outputs(forward: Forward) -> int | None:
    """How many samples the network's outputs seem to be of."""
    outputs = list(
        tensors_of(
            dict(forward.outputs) if isinstance(forward.outputs, Mapping) else forward.outputs
        )
    )
    return outputs[0].shape[0] if outputs and outputs[0].ndim else None

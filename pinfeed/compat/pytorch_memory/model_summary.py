"""Counts of a network's parameters and outputs, and a summary of its layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from pinfeed.compat.pytorch_memory.network_trace import (
    ConvertingModel,
    check_model_class,
    trace_input_shape,
)
from pinfeed.training.memory_model.report import layers_of


def get_parameter_count(model_class: Any) -> int:
    """Return the number of elements of all parameters of a network, each counted once.

    A class or function makes the network without memory for its parameters.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = check_model_class(model_class)
    if isinstance(model, nn.Module):
        layers = layers_of(model)
    else:
        with FakeTensorMode(allow_non_fake_inputs=True):
            layers = layers_of(ConvertingModel(model))
    return sum(layer.n_trainable + layer.n_frozen for layer in layers)


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

"""SampleFormat: the shape and dtype in which a network accepts samples, found by trials."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from pinfeed.compat.pytorch_memory.forward_trace import trace_forward
from pinfeed.errors import ArgumentError, EstimateError, described
from pinfeed.tensors.pytree import flatten
from pinfeed.training.memory_model.tensor_specs import samples_of

Integers = Literal["as they are", "as floats", "as int64"]
"""The conversion of integer samples, which may be ids, pixels, or ids stored in few bits."""


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
        floats = [p.dtype for p in self.model.parameters() if p.is_floating_point()]
        self._dtype = floats[0] if floats else torch.get_default_dtype()
        self._integers = integers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the network's own outputs."""
        leaves, rebuild = flatten((args, kwargs))
        args, kwargs = rebuild(iter([self._converted(leaf) for _, leaf in leaves]))
        return self.model(*args, **kwargs)

    def _converted(self, value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point() or (self._integers == "as floats" and not value.is_complex()):
            return value.to(self._dtype)
        return value.long() if self._integers == "as int64" else value


@dataclass(frozen=True)
class ConvertingModelFactory:
    """A function that makes the network at its call, in the tensor mode of the estimator."""

    model: Any
    integers: Integers

    def __call__(self) -> ConvertingModel:
        return ConvertingModel(self.model, self.integers)


@dataclass(frozen=True)
class SampleFormat:
    """Format in which a network accepts samples.

    Attributes:
        model: The network with a conversion of its inputs, or a function that makes it.
        sample_shape: Shape of a sample, without the dimension of the batch.
        n_variables: Elements that the layers give for one sample.
    """

    model: Any
    sample_shape: Any
    n_variables: int


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
    first_error: EstimateError | None = None
    for integers in _conversions(input_shape, input_dtype):
        # A format that runs, although the number of outputs does not confirm it.
        unconfirmed: SampleFormat | None = None
        for shape in _possible_shapes(input_shape):
            try:
                found, is_confirmed = _try_format(model, shape, input_dtype, integers)
            except EstimateError as error:
                first_error = first_error or error
                continue
            if is_confirmed:
                return found
            # The last shape is the one that the user gave, and is preferred.
            unconfirmed = found
        if unconfirmed is not None:
            return unconfirmed
    assert first_error is not None
    raise first_error


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


def _try_format(
    model: Any, shape: Any, input_dtype: Any, integers: Integers
) -> tuple[SampleFormat, bool]:
    """Try a format with batches of two and three samples.

    Returns:
        The format, and whether the outputs have the batch size.
    """
    converting: Any = (
        ConvertingModel(model, integers)
        if isinstance(model, nn.Module)
        else ConvertingModelFactory(model, integers)
    )
    two = trace_forward(converting, samples_of(shape, input_dtype, "input"), 2)
    three = trace_forward(converting, samples_of(shape, input_dtype, "input"), 3)
    found = SampleFormat(converting, shape, three.n_variables - two.n_variables)
    return found, two.n_outputs == 2 and three.n_outputs == 3

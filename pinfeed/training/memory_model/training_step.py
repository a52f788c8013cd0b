"""TrainingStep: its model, loss and samples; StepRun: the step on tensors without data."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError, EstimateError
from pinfeed.tensors.pytree import flatten
from pinfeed.training.memory_model.storage_tracker import StorageTracker
from pinfeed.training.memory_model.tensor_specs import SampleSpec


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Call the model: a tuple or list is positional arguments, a mapping keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def tensors_of(*models: Any) -> Iterator[torch.Tensor]:
    """Yield parameters, buffers, and tensors that are plain attributes of all that are modules."""
    for module in (one for one in models if isinstance(one, nn.Module)):
        yield from module.parameters()
        yield from module.buffers()
        for one in module.modules():
            yield from (value for value in vars(one).values() if isinstance(value, torch.Tensor))


def require_initialized(model: nn.Module) -> None:
    """Check that the shapes of all parameters are known.

    Raises:
        ArgumentError: If a lazy module has not seen a batch yet.
    """
    kind = nn.parameter.UninitializedParameter
    lazy = [name for name, one in model.named_parameters() if isinstance(one, kind)]
    if lazy:
        raise ArgumentError(
            f"the model has uninitialized parameters ({', '.join(lazy[:3])}), because a lazy "
            "module has not seen a batch; expected parameters with known shapes; call the model "
            "with one batch first, or use modules that are not lazy"
        )


def bytes_on_device(
    model: Any, device: torch.device, *, loss: Any = None, optimizer: Any = None
) -> int:
    """Return the bytes of tensors and gradients of a model, a loss and an optimizer on a device.

    A device without an index stands for all devices of its type.
    """
    found = [*tensors_of(model, loss)]
    if isinstance(model, nn.Module):
        require_initialized(model)
    if isinstance(optimizer, torch.optim.Optimizer):
        found += state_tensors(optimizer)
    storages = {
        one.untyped_storage()._cdata: one.untyped_storage().nbytes()
        for tensor in found
        for one in (tensor, tensor.grad)
        if one is not None
        and one.layout is torch.strided
        and one.device.type == device.type
        and device.index in (None, one.device.index)
    }
    return sum(storages.values())


def copies_without_data(model: Any, loss: Any) -> tuple[nn.Module, Any, dict[int, torch.Tensor]]:
    """Copy model and loss onto fake tensors, in the fake tensor mode that is active.

    Returns:
        The model in training mode, the loss, and the fake tensors by the id of the original.
    """
    fakes = {id(tensor): tensor for tensor in tensors_of(model, loss)}
    fakes = {key: _fake_of(tensor) for key, tensor in fakes.items()}
    return *copies(model, loss, dict(fakes)), fakes


def copies(model: Any, loss: Any, memo: dict[int, Any]) -> tuple[nn.Module, Any]:
    """Copy model and loss; a model that is a class or function makes one instead.

    Args:
        model: A module, or a class or function that makes one.
        loss: A loss, which is copied if it is a module.
        memo: Replacements of tensors in the copies, by the id of the original. It receives all
            other objects that were copied.

    Returns:
        The model in training mode, and the loss.
    """
    made = copy.deepcopy(model, memo) if isinstance(model, nn.Module) else model()
    if not isinstance(made, nn.Module):
        raise ArgumentError(
            f"model={model!r} returned a {type(made).__name__}; expected a torch module"
        )
    made_loss = copy.deepcopy(loss, memo) if isinstance(loss, nn.Module) else loss
    return made if made.training else made.train(), made_loss


def _fake_of(tensor: torch.Tensor) -> torch.Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, tensor.requires_grad)
    return fake


def state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (leaf for _, leaf in flatten(state)[0] if isinstance(leaf, torch.Tensor))


class TrainingStep:
    """Model, loss, optimizer and samples of a training step, with batches of any size.

    Args:
        model: A module, which stays unchanged; or a class or function that makes one.
        inputs: Shapes and dtypes of a sample for the model: a tensor, positional arguments (a
            tuple) or keyword arguments (a dict).
        targets: Shapes and dtypes of a sample's target for the loss; None without targets.
        loss: Function of outputs and targets; None for the sum of the outputs.
        optimizer: A torch optimizer of the model's parameters; or its class, or a function of
            parameters. None for AdamW.
        autocast: Dtype of autocast; None for no autocast.

    Raises:
        ArgumentError: If ``model`` or ``autocast`` is invalid.
    """

    def __init__(
        self,
        model: Any,
        inputs: SampleSpec,
        targets: SampleSpec | None,
        *,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        optimizer: Any = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        if not callable(model):
            raise ArgumentError(
                f"model={model!r}: expected a torch module, or a class or function that makes one"
            )
        if isinstance(model, nn.Module):
            require_initialized(model)
        check_autocast(autocast)
        self.model = model
        self.inputs = inputs
        self.targets = targets
        self.loss = loss or _sum_of_outputs
        self.optimizer = optimizer
        self.autocast_dtype = autocast

    def autocast(self, device_type: str = "cpu") -> contextlib.AbstractContextManager[Any]:
        """Return the context in which forward passes and losses run."""
        return autocast_context(device_type, self.autocast_dtype)

    def batch(
        self, n: int, make: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
    ) -> tuple[Any, Any]:
        """Return inputs and targets of ``n`` samples; ``make`` returns a tensor for a shape."""
        targets = None if self.targets is None else self.targets.batch(n, make)
        return self.inputs.batch(n, make), targets

    def optimizer_of(self, model: nn.Module, stand_ins: Mapping[int, torch.Tensor]) -> Any:
        """Return an optimizer for a copy of the model, with the user's class and options.

        Args:
            model: The copy.
            stand_ins: Tensors of the copy, by the id of the original tensor.

        Raises:
            ArgumentError: If the optimizer has parameters that are not in ``stand_ins``.
            EstimateError: If no parameter requires a gradient.
        """
        given = self.optimizer
        if not isinstance(given, torch.optim.Optimizer):
            parameters = [p for p in model.parameters() if p.requires_grad]
            if given is None and not parameters:
                raise EstimateError(
                    "the model has no parameter that requires a gradient, so a training step "
                    "cannot be estimated; unfreeze parameters, or leave out the model and give "
                    "preferred_batch_size"
                )
            return (given or torch.optim.AdamW)(parameters)
        if any(id(p) not in stand_ins for group in given.param_groups for p in group["params"]):
            raise ArgumentError(
                "optimizer= has parameters that belong neither to the model nor to the loss; give "
                "an optimizer of model.parameters(), or its class"
            )
        groups = [
            group | {"params": [stand_ins[id(p)] for p in group["params"]]}
            for group in given.param_groups
        ]
        accepted = inspect.signature(type(given)).parameters
        options = {name: value for name, value in given.defaults.items() if name in accepted}
        return type(given)(groups, **options)


class StepRun:
    """Parts of a training step on tensors without data, which a Step composes.

    Args:
        training: The training step.
        model: A copy of its model, on fake tensors.
        loss: Its loss, or a copy.
        tracker: Tracker of the memory of the step.

    Attributes:
        model: The model.
        tracker: The tracker.
        held: Outputs and loss of the previous step, while they are alive.
    """

    def __init__(
        self, training: TrainingStep, model: nn.Module, loss: Any, tracker: StorageTracker
    ) -> None:
        self._training = training
        self.model = model
        self._loss = loss
        self.tracker = tracker
        self.held: tuple[Any, ...] = ()
        self._n = 0

    def batch(self, n: int) -> tuple[Any, Any]:
        """Return inputs and targets of ``n`` samples."""
        self.tracker.enter("batch")
        self._n = n
        return self._training.batch(n, lambda shape, dtype: torch.empty(shape, dtype=dtype))

    def outputs(self, inputs: Any) -> Any:
        """Run the forward pass of the last batch."""
        self.tracker.enter("forward")
        self.tracker.n_samples = max(self.tracker.n_samples, self._n)
        with self._training.autocast():
            return call_model(self.model, inputs)

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Compute the loss."""
        self.tracker.enter("forward")
        with self._training.autocast():
            found: torch.Tensor = self._loss(outputs, targets)
            return found

    def backward(self, loss: Any) -> None:
        """Run the backward pass, and label the gradients."""
        self.tracker.enter("backward")
        loss.backward()
        self.tracker.label((p.grad for p in self.model.parameters()), "gradients")


Step = Callable[[StepRun, int], Any]
"""Function that computes the gradients of a batch of a size.

Its result lives until the next step, as the variables of a training loop do.
"""


def plain_step(run: StepRun, batch_size: int) -> Any:
    """Run forward pass, loss and backward pass of the whole batch."""
    inputs, targets = run.batch(batch_size)
    outputs = run.outputs(inputs)
    run.held = run.held[1:]
    loss = run.loss(outputs, targets)
    # The variables of a loop keep their values until the next step assigns them again.
    run.held = (outputs, loss)
    run.backward(loss)
    return inputs, targets, outputs, loss


def autocast_context(
    device_type: str, dtype: torch.dtype | None
) -> contextlib.AbstractContextManager[Any]:
    """Return the context of autocast to a dtype; None is no autocast."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device_type, dtype)


def check_autocast(dtype: Any) -> None:
    """Check that autocast accepts a dtype.

    Raises:
        ArgumentError: If ``dtype`` is neither a floating-point dtype of torch nor None.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(
            f"autocast={dtype!r}: expected a floating-point dtype of torch, such as "
            "torch.bfloat16, or None"
        )


def _sum_of_outputs(outputs: Any, targets: Any) -> torch.Tensor:
    tensors = [leaf for _, leaf in flatten(outputs)[0] if isinstance(leaf, torch.Tensor)]
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()

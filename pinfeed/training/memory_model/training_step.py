"""TrainingStep: its model, loss and samples; StepRun: the step on tensors without data."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError, EstimateError
from pinfeed.training.memory_model.storage_tracker import StorageTracker
from pinfeed.training.memory_model.tensor_specs import SampleSpec, tensor_leaves


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


def copies(model: Any, loss: Any, memo: dict[int, Any]) -> tuple[nn.Module, Any]:
    """Copy model and loss; a model that is a class or function makes one instead.

    Args:
        model: A module, or a class or function that makes one.
        loss: A loss, which is copied if it is a module.
        memo: Replacements of tensors in the copies, by the id of the original. It receives the
            copies of all other objects.

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


def state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from tensor_leaves(state)


@dataclass(eq=False)
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

    model: Any
    inputs: SampleSpec
    targets: SampleSpec | None
    _: KW_ONLY
    loss: Any = None
    optimizer: Any = None
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise ArgumentError(
                f"model={self.model!r}: expected a torch module, or a class or function that makes "
                "one"
            )
        if isinstance(self.model, nn.Module):
            require_initialized(self.model)
        check_autocast(self.autocast)
        self.loss = self.loss or _sum_of_outputs

    @property
    def sample_nbytes(self) -> list[int]:
        """Bytes of each tensor of one sample: inputs and targets."""
        specs = [spec for spec in (self.inputs, self.targets) if spec is not None]
        return [nbytes for spec in specs for nbytes in spec.nbytes]

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


@dataclass(eq=False)
class StepRun:
    """Parts of a training step on tensors without data, which a Step composes.

    Attributes:
        training: The training step.
        model: A copy of its model, on fake tensors.
        loss_function: Its loss, or a copy.
        tracker: Tracker of the memory of the step.
        held: Outputs and loss of the previous step, while they are alive.
        n_samples: Samples of the largest forward pass.
    """

    training: TrainingStep
    model: nn.Module
    loss_function: Any
    tracker: StorageTracker
    held: tuple[Any, ...] = ()
    n_samples: int = 0
    _n: int = 0

    def batch(self, n: int) -> tuple[Any, Any]:
        """Return inputs and targets of ``n`` samples."""
        self.tracker.enter("batch", "making the batch")
        self._n = n
        return self.training.batch(n, lambda shape, dtype: torch.empty(shape, dtype=dtype))

    def outputs(self, inputs: Any) -> Any:
        """Run the forward pass of the last batch."""
        self.tracker.enter("forward", "the forward pass")
        self.n_samples = max(self.n_samples, self._n)
        with autocast_context("cpu", self.training.autocast):
            return call_model(self.model, inputs)

    def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Compute the loss."""
        self.tracker.enter("forward", "the loss")
        with autocast_context("cpu", self.training.autocast):
            found: torch.Tensor = self.loss_function(outputs, targets)
            return found

    def backward(self, tensors: Any, gradients: Any = None) -> None:
        """Run the backward pass of a loss, or of tensors with these gradients; label gradients."""
        self.tracker.enter("backward", "the backward pass")
        torch.autograd.backward(tensors, gradients)
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
    return torch.stack([tensor.float().sum() for tensor in tensor_leaves(outputs)]).sum()

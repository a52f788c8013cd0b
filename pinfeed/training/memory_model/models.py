"""Functions on models: call them, list their tensors, copy them, and make their optimizers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from pinfeed.errors import ArgumentError
from pinfeed.tensors.pytree import flatten


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


def bytes_on_device(model: Any, device: torch.device) -> int:
    """Return the bytes of a model's tensors and gradients on the device."""
    if not isinstance(model, nn.Module):
        return 0
    require_initialized(model)
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    tensors = {id(tensor): tensor for tensor in (*tensors_of(model), *gradients)}
    on_device = [one for one in tensors.values() if one.device.type == device.type]
    return sum(tensor.numel() * tensor.element_size() for tensor in on_device)


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


def optimizer_for(model: nn.Module, given: Any, stand_ins: Mapping[int, torch.Tensor]) -> Any:
    """Return an optimizer for a copy of a model.

    Args:
        model: The copy.
        given: An optimizer of the original, or a function that makes an optimizer from parameters;
            None for AdamW.
        stand_ins: Tensors of the copy by the id of the original tensor.

    Raises:
        ArgumentError: If the optimizer has parameters that are not in ``stand_ins``.
    """
    if not isinstance(given, torch.optim.Optimizer):
        make = given or torch.optim.AdamW
        return make([p for p in model.parameters() if p.requires_grad])
    if any(id(p) not in stand_ins for group in given.param_groups for p in group["params"]):
        raise ArgumentError(
            "optimizer= has parameters that belong neither to the model nor to the loss; give an "
            "optimizer of model.parameters(), or its class"
        )
    groups = [
        group | {"params": [stand_ins[id(p)] for p in group["params"]]}
        for group in given.param_groups
    ]
    accepted = inspect.signature(type(given)).parameters
    options = {name: value for name, value in given.defaults.items() if name in accepted}
    return type(given)(groups, **options)


def state_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (leaf for _, leaf in flatten(state)[0] if isinstance(leaf, torch.Tensor))

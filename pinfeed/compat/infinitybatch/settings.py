"""Settings of an InfinityBatch: model, optimizer, criterion, dataloader and devices."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from pinfeed.compat.infinitybatch.containers import Containers, RecordedLoader
from pinfeed.compat.infinitybatch.forward import BatchForward
from pinfeed.errors import ArgumentError


class InfinityBatchError(ArgumentError):
    """A setting is missing."""


class InfinityBatchWarning(Warning):
    """A setting or a call is probably a mistake."""


class Settings:
    """The model, the optimizer, the criterion, the dataloader and the devices, as properties.

    The model, the optimizer and the criterion can be set once.
    """

    def __init__(self, forward: BatchForward, verbose: bool) -> None:
        self._batch_forward = forward
        self._model: nn.Module | None = None
        self._optimizer: Any = None
        self._criterion: Any = None
        self._forward_device: torch.device | None = None
        self._containers = Containers()
        self.verbose_mode = verbose

    @property
    def model(self) -> nn.Module | None:
        """The model that is trained. It can be set once."""
        return self._model

    @model.setter
    def model(self, model: nn.Module | None) -> None:
        if self._is_unset("model"):
            self._model = model
            self.updateforwarddevice()
            self.checkdevices_()

    @property
    def optimizer(self) -> Any:
        """The optimizer of the model's parameters. It can be set once."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        if self._is_unset("optimizer"):
            self._optimizer = optimizer

    optimier = optimizer
    """Alias of ``optimizer``, as the README of infinitybatch spells it."""

    @property
    def criterion(self) -> Any:
        """The loss function. It can be set once."""
        return self._criterion

    @criterion.setter
    def criterion(self, criterion: Any) -> None:
        if self._is_unset("criterion"):
            self._criterion = criterion

    @property
    def dataloader(self) -> Any:
        """The dataloader. Iterating it begins an epoch, and the containers record its batches."""
        return None if self._loader is None else RecordedLoader(self._containers, self._loader)

    @dataloader.setter
    def dataloader(self, dataloader: Any) -> None:
        self._loader = dataloader.loader if isinstance(dataloader, RecordedLoader) else dataloader

    @property
    def backward_device(self) -> torch.device:
        """The device of outputs, targets and losses."""
        return self._backward_device

    @backward_device.setter
    def backward_device(self, device: torch.device | str | int | None) -> None:
        self._backward_device = torch.device("cpu" if device is None else device)
        self.checkdevices_()

    @property
    def forward_device(self) -> torch.device | None:
        """The device of the model; None without a model that has trainable parameters."""
        return self._forward_device

    def changemodeldevice(self, device: torch.device | str | int) -> None:
        """Move the model to a device."""
        if self._model is not None:
            self._model.to(device)
            self.updateforwarddevice()
            self.checkdevices_()

    def updateforwarddevice(self) -> None:
        """Set ``forward_device`` to the device that the model is on now."""
        before = self._forward_device
        self._forward_device = None
        if self._model is not None:
            self._forward_device = next(
                (p.device for p in self._model.parameters() if p.requires_grad), None
            )
            if self._forward_device is None:
                warn("the model has no trainable parameter", 3)
        if self._forward_device != before:
            self._batch_forward.forget()

    def checkdevices_(self) -> None:
        """Warn if forward and backward device are the same."""
        if self._forward_device is None:
            return
        if _with_index(self._forward_device) == _with_index(self._backward_device):
            warn(f"forward and backward device are the same: {self._forward_device}", 4)

    def _is_unset(self, name: str) -> bool:
        if getattr(self, f"_{name}") is not None:
            warn(f"{name} was set before and does not change; make a new InfinityBatch", 4)
            return False
        return True

    def _required(self, name: str) -> Any:
        found = self._loader if name == "dataloader" else getattr(self, f"_{name}")
        if found is None:
            raise InfinityBatchError(f"{name} is not set; set it: ib.{name} = {name}")
        return found


def warn(message: str, stacklevel: int) -> None:
    """Warn with InfinityBatchWarning; a stack level of 2 is the caller of this function."""
    warnings.warn(message, InfinityBatchWarning, stacklevel=stacklevel)


def _with_index(device: torch.device) -> torch.device:
    """Return the device with its index: ``cuda`` is the current CUDA device."""
    return torch.empty(0, device=device).device

"""InfinityBatch: the training manager of infinitybatch."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from pinfeed.compat.infinitybatch.containers import Containers, Watched
from pinfeed.compat.infinitybatch.forward import Forwards
from pinfeed.errors import ArgumentError
from pinfeed.memory import limits
from pinfeed.training.large_batch.select import StrategyChoice
from pinfeed.training.large_batch.strategies.micro_batches import as_tensors, n_samples
from pinfeed.training.memory_model.tensor_specs import to_device
from pinfeed.training.trainer.evaluate import pair_of


class InfinityBatchError(ArgumentError):
    """What is needed was not given."""


class InfinityBatchWarning(Warning):
    """What is hardly meant."""


class InfinityBatch:
    """Trains with batches of any size.

    Args:
        model: Its inputs have their samples along the first dimension. Set once, as the next two.
        optimizer: Of the model's parameters.
        criterion: Called with outputs and targets.
        dataloader: Of pairs of inputs and targets.
        backward_device: Where outputs, targets and losses are; None for the CPU.
        verbose: Print progress.
        config: Limits of memory; None for what is free.
        chunk_size: Samples at a time, in place of what fits.
        strategy: As for ``pinfeed.BigBatch``, but for ``"accumulate"``.
        prove: As for ``pinfeed.BigBatch``.
    """

    def __init__(
        self, model: nn.Module | None = None, optimizer: Any = None, criterion: Any = None, dataloader: Any = None,
        backward_device: torch.device | str | int | None = None, verbose: bool = True, *,
        config: limits.MemoryLimits | None = None, chunk_size: int | None = None, strategy: str = "auto", prove: bool = True,
    ) -> None:  # fmt: skip
        if not torch.cuda.is_available():
            _warn("there is no CUDA device: batches are computed within the memory of the host", 3)
        self._forwards = Forwards(config, chunk_size, strategy, prove)
        self._model: nn.Module | None = None
        self._optimizer: Any = None
        self._criterion: Any = None
        self._forward_device: torch.device | None = None
        self._loss: torch.Tensor | None = None
        self._containers = Containers()
        self.verbose_mode = verbose
        self.backward_device = backward_device
        self.dataloader = dataloader
        self.model = model
        self.optimizer = optimizer
        self.criterion = criterion

    def __call__(self, num_epochs: int) -> None:
        """The same as ``train``."""
        self.train(num_epochs)

    def train(self, num_epochs: int) -> None:
        """Clear the containers and train for so many epochs."""
        self.clearcontainers_()
        self._print(f"Training for {num_epochs} epochs.")
        for epoch in range(num_epochs):
            self._print(f"Epoch: {epoch + 1}/{num_epochs}")
            self.epoch()

    def epoch(self) -> None:
        """Train for one epoch.

        Raises:
            InfinityBatchError: Something was not set, or the dataloader gives no batch.
        """
        for name in ("model", "optimizer", "criterion", "dataloader"):
            self._given(name)
        self.updateforwarddevice()
        self.epochstart_()
        self.zero_grad()
        n_batches = n = size = 0
        for batch in self._loader:
            inputs, targets = pair_of(batch)
            size = n_samples(as_tensors(inputs))
            self._print(
                f"-- batch {n_batches}: finished with {n}, current batch size {size}.", end="\r"
            )
            self.targets[-1].append(to_device(as_tensors(targets), self.backward_device))
            self.batch_(inputs)
            n_batches, n = n_batches + 1, n + size
            self.loss()
            self.backward()
            self.step()
            self.zero_grad()
        if not n_batches:
            raise InfinityBatchError(
                f"dataloader={self._loader!r} gave no batch; expected at least one"
            )
        self._containers.read_losses()
        self._print(
            f"-- Epoch finished with {n_batches} batch(es), {n} element(s) were forwarded, last batch size was {size}."
        )

    def batch_(self, inputs: Any = None) -> Any:
        """Outputs of a whole batch, on the backward device.

        Args:
            inputs: None for those of the batch that ``dataloader`` gave last.

        Raises:
            InfinityBatchError: There is no model, or it gave none.
        """
        model = self._given("model")
        if not self.inputs:
            self.epochstart_()
        if inputs is None:
            if not self.inputs[-1]:
                raise InfinityBatchError(
                    "batch_() has no inputs: dataloader gave no batch yet; give them, as batch_(inputs)"
                )
            inputs = self.inputs[-1][-1]
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        outputs = self._forwards.outputs(
            model, inputs, self._optimizer, device, self._backward_device
        )
        if self._forwards.unpredicted is not None:
            _warn(
                f"the whole batch is computed at once, for {self._forwards.unpredicted}; give chunk_size=",
                3,
            )
            self._forwards.unpredicted = None
        self.inputs[-1].append(inputs)
        self.outputs[-1].append(outputs)
        return outputs

    def loss(self) -> None:
        """Compute the loss of the last outputs and targets; ``losses`` has it, and ``backward`` takes it.

        Raises:
            InfinityBatchError: There are no outputs, or no targets.
        """
        if not self.outputs or not self.outputs[-1]:
            raise InfinityBatchError("loss() has no outputs; call batch_(inputs) first")
        if not self.targets[-1]:
            raise InfinityBatchError(
                "loss() has no targets; iterate ib.dataloader, or call ib.targets[-1].append(targets) first"
            )
        outputs = self.outputs[-1][-1]
        self._loss = loss = self._given("criterion")(
            outputs, to_device(self.targets[-1][-1], self._backward_device)
        )
        self._containers.add_loss(loss, n_samples(outputs))

    def backward(self) -> None:
        """Backward pass of the last loss; warns if there is none."""
        if self._loss is None:
            _warn("backward() without a loss; call loss() first", 3)
            return
        loss = self._loss
        self._loss = None
        loss.backward()
        self._containers.detach_outputs()

    def step(self) -> None:
        """A step of the optimizer."""
        self._given("optimizer").step()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self._given("optimizer").zero_grad()

    @property
    def model(self) -> nn.Module | None:
        """What is trained. It can be set once."""
        return self._model

    @model.setter
    def model(self, model: nn.Module | None) -> None:
        if self._is_first("model"):
            self._model = model
            self.updateforwarddevice()
            self.checkdevices_()

    @property
    def optimizer(self) -> Any:
        """What trains it. It can be set once."""
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        if self._is_first("optimizer"):
            self._optimizer = optimizer

    optimier = optimizer
    """As the README writes it."""

    @property
    def criterion(self) -> Any:
        """The loss. It can be set once."""
        return self._criterion

    @criterion.setter
    def criterion(self, criterion: Any) -> None:
        if self._is_first("criterion"):
            self._criterion = criterion

    @property
    def dataloader(self) -> Any:
        """What gives batches.

        Iterated, it begins an epoch of the containers, and has them keep the batch.
        """
        return None if self._loader is None else Watched(self._containers, self._loader)

    @dataloader.setter
    def dataloader(self, dataloader: Any) -> None:
        self._loader = dataloader.loader if isinstance(dataloader, Watched) else dataloader

    @property
    def backward_device(self) -> torch.device:
        """Where outputs, targets and losses are."""
        return self._backward_device

    @backward_device.setter
    def backward_device(self, device: torch.device | str | int | None) -> None:
        self._backward_device = torch.device("cpu" if device is None else device)
        self.checkdevices_()

    @property
    def forward_device(self) -> torch.device | None:
        """Where the model is; None without one that can be trained."""
        return self._forward_device

    @property
    def chosen(self) -> StrategyChoice | None:
        """How the last batch was computed."""
        return self._forwards.chosen

    @property
    def inputs(self) -> list[Any]:
        """By epoch; of the last one, those of the last batch: ``inputs[-1][-1]``."""
        return self._containers.inputs

    @property
    def outputs(self) -> list[Any]:
        """Likewise."""
        return self._containers.outputs

    @property
    def targets(self) -> list[Any]:
        """Likewise."""
        return self._containers.targets

    @property
    def losses(self) -> list[list[tuple[float, int]]]:
        """``losses[epoch][batch]``: the loss, and the number of samples."""
        return self._containers.read_losses()

    def changemodeldevice(self, device: torch.device | str | int) -> None:
        """Move the model."""
        if self._model is not None:
            self._model.to(device)
            self.updateforwarddevice()
            self.checkdevices_()

    def updateforwarddevice(self) -> None:
        """See where the model is."""
        before = self._forward_device
        self._forward_device = None
        if self._model is not None:
            self._forward_device = next(
                (p.device for p in self._model.parameters() if p.requires_grad), None
            )
            if self._forward_device is None:
                _warn("the model has no parameter that can be trained", 3)
        if self._forward_device != before:
            self._forwards.forget()

    def checkdevices_(self) -> None:
        """Warn if forward and backward device are the same."""
        if self._forward_device is not None and _indexed(self._forward_device) == _indexed(
            self._backward_device
        ):
            _warn(f"forward and backward device are the same, {self._forward_device}", 4)

    def clearcontainers_(self) -> None:
        """Forget everything that was measured."""
        self._containers.clear()

    def epochstart_(self) -> None:
        """Begin an epoch of the containers."""
        self._containers.begin_epoch()

    def _is_first(self, name: str) -> bool:
        if getattr(self, f"_{name}") is not None:
            _warn(f"{name} is set already, and stays", 4)
            return False
        return True

    def _given(self, name: str) -> Any:
        found = self._loader if name == "dataloader" else getattr(self, f"_{name}")
        if found is None:
            raise InfinityBatchError(f"{name} was not set; set it, as ib.{name} = {name}")
        return found

    def _print(self, *words: str, end: str = "\n") -> None:
        if self.verbose_mode:
            print(*words, end=end)


def _indexed(device: torch.device) -> torch.device:
    """``cuda`` is the current CUDA device."""
    return torch.empty(0, device=device).device


def _warn(message: str, stacklevel: int) -> None:
    warnings.warn(message, InfinityBatchWarning, stacklevel=stacklevel)

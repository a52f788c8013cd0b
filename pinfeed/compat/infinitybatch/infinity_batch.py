"""InfinityBatch: the trainer of infinitybatch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from pinfeed.compat.infinitybatch.forward import BatchForward
from pinfeed.compat.trainer.evaluate import pair_of
from pinfeed.errors import ArgumentError
from pinfeed.memory import limits
from pinfeed.training.large_batch.batches import as_tensors, n_samples
from pinfeed.training.large_batch.strategy_selector import StrategyChoice
from pinfeed.training.memory_model.tensor_specs import map_tensors, to_device
from pinfeed.validation.arguments import whole_number


class InfinityBatchError(ArgumentError):
    """A setting is missing."""


class InfinityBatchWarning(Warning):
    """A setting or a call is probably a mistake."""


class InfinityBatch:
    """Trainer for batches of any size, in bounded memory.

    Examples:
        >>> import warnings
        >>> from pinfeed.compat import infinitybatch
        >>> warnings.simplefilter("ignore", infinitybatch.InfinityBatchWarning)  # without a GPU
        >>> loader = [(torch.randn(500, 8), torch.randn(500, 1)) for _ in range(3)]
        >>> ib = infinitybatch.InfinityBatch(torch.nn.Linear(8, 1), verbose=False, chunk_size=100)
        >>> ib.optimizer = torch.optim.Adam(ib.model.parameters())
        >>> ib.criterion, ib.dataloader = torch.nn.MSELoss(), loader
        >>> ib.train(2)

    Args:
        model: The model; the first dimension of its inputs is the batch. Like ``optimizer`` and
            ``criterion``, it can also be set later, once.
        optimizer: The optimizer of the model's parameters.
        criterion: The loss function, called with outputs and targets.
        dataloader: An iterable of pairs of inputs and targets.
        backward_device: The device of outputs, targets and losses; None for the CPU.
        verbose: Whether to print progress.
        config: Memory limits; None for the free memory.
        chunk_size: Samples per chunk; None for the largest chunk that fits.
        strategy: A strategy of ``pinfeed.BigBatch``, except for ``"accumulate"``.
        verify: Whether to compare gradients with those of the plain step, as ``pinfeed.BigBatch``
            does.

    Attributes:
        inputs: The inputs by epoch. The last batch is ``inputs[-1][-1]``; no other batch is kept.
        outputs: The same for the outputs.
        targets: The same for the targets.
        forward_device: The device of the model; None without a model that has trainable parameters.
        verbose_mode: Whether progress is printed.
    """

    # It is one class because its attributes and methods are those of the original.

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Any = None,
        criterion: Any = None,
        dataloader: Any = None,
        backward_device: torch.device | str | int | None = None,
        verbose: bool = True,
        *,
        config: limits.MemoryLimits | None = None,
        chunk_size: int | None = None,
        strategy: str = "auto",
        verify: bool = True,
    ) -> None:
        if not torch.cuda.is_available():
            warn("there is no CUDA device, so batches are computed on the CPU, in host memory", 3)
        self._batch_forward = BatchForward(config, chunk_size, strategy, verify)
        self._model: nn.Module | None = None
        self._optimizer: Any = None
        self._criterion: Any = None
        self.forward_device: torch.device | None = None
        self._loss: torch.Tensor | None = None
        self._losses: list[list[tuple[float, int]]] = []
        self._unread: list[tuple[torch.Tensor, int]] = []
        self.verbose_mode = verbose
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.targets: list[Any] = []
        self.backward_device = backward_device
        self.dataloader = dataloader
        self.model = model
        self.optimizer = optimizer
        self.criterion = criterion

    def __call__(self, num_epochs: int) -> None:
        """Do the same as ``train``."""
        self.train(num_epochs)

    def train(self, num_epochs: int) -> None:
        """Clear the containers and train for ``num_epochs`` epochs.

        Raises:
            ArgumentError: If ``num_epochs`` is not a whole number, or is negative.
        """
        num_epochs = whole_number(num_epochs, "num_epochs", least=0)
        self.clearcontainers_()
        self._print(f"Training for {num_epochs} epochs.")
        for epoch in range(num_epochs):
            self._print(f"Epoch: {epoch + 1}/{num_epochs}")
            self.epoch()

    def epoch(self) -> None:
        """Train for one epoch.

        Raises:
            InfinityBatchError: If a setting is missing, or the dataloader yields no batch.
        """
        for name in ("model", "optimizer", "criterion", "dataloader"):
            self._required(name)
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
            n_batches += 1
            n += size
            self.loss()
            self.backward()
            self.step()
            self.zero_grad()
        if not n_batches:
            raise InfinityBatchError(
                f"dataloader={self._loader!r} yielded no batch; expected at least one"
            )
        self._read_losses()
        self._print(
            f"-- Epoch finished with {n_batches} batch(es), {n} element(s) were forwarded, "
            f"last batch size was {size}."
        )

    def batch_(self, inputs: Any = None) -> Any:
        """Compute the outputs of a whole batch, on the backward device.

        Args:
            inputs: The inputs of the batch; None for the inputs that ``dataloader`` yielded last.

        Raises:
            InfinityBatchError: If there is no model, or ``dataloader`` has not yielded a batch yet.
        """
        model = self._required("model")
        if not self.inputs:
            self.epochstart_()
        if inputs is None:
            if not self.inputs[-1]:
                raise InfinityBatchError(
                    "batch_() has no inputs, because dataloader has not yielded a batch yet; "
                    "iterate ib.dataloader, or give the inputs: batch_(inputs)"
                )
            inputs = self.inputs[-1][-1]
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        outputs = self._batch_forward.outputs(
            model, inputs, self._optimizer, device, self._backward_device
        )
        if self._batch_forward.unpredicted is not None:
            warn(
                "the whole batch is computed at once, "
                f"because {self._batch_forward.unpredicted}; give chunk_size= to compute chunks",
                3,
            )
            self._batch_forward.unpredicted = None
        self.inputs[-1].append(inputs)
        self.outputs[-1].append(outputs)
        return outputs

    def loss(self) -> None:
        """Compute the loss of the last outputs and targets, for ``losses`` and ``backward``.

        Raises:
            InfinityBatchError: If there are no outputs or no targets.
        """
        if not self.outputs or not self.outputs[-1]:
            raise InfinityBatchError("loss() has no outputs; call batch_(inputs) first")
        if not self.targets[-1]:
            raise InfinityBatchError(
                "loss() has no targets; "
                "iterate ib.dataloader, or call ib.targets[-1].append(targets) first"
            )
        outputs = self.outputs[-1][-1]
        targets = to_device(self.targets[-1][-1], self._backward_device)
        loss = self._required("criterion")(outputs, targets)
        self._loss = loss
        self._unread.append((loss.detach().reshape(()), n_samples(outputs)))

    def backward(self) -> None:
        """Run the backward pass of the last loss. Warn if there is none."""
        if self._loss is None:
            warn("backward() has no loss; call loss() first", 3)
            return
        loss = self._loss
        self._loss = None
        loss.backward()
        # Detached outputs free the graph of the backward pass.
        for outputs in self.outputs[-1]:
            self.outputs[-1].append(map_tensors(torch.Tensor.detach, outputs))

    def step(self) -> None:
        """Run a step of the optimizer."""
        self._required("optimizer").step()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self._required("optimizer").zero_grad()

    @property
    def chosen(self) -> StrategyChoice | None:
        """The strategy that computed the last batch."""
        return self._batch_forward.chosen

    @property
    def losses(self) -> list[list[tuple[float, int]]]:
        """The loss and the number of samples of each batch, as ``losses[epoch][batch]``."""
        self._read_losses()
        return self._losses

    def clearcontainers_(self) -> None:
        """Clear the containers. A running loop continues in a new epoch."""
        for container in (self.inputs, self.outputs, self.targets, self._losses, self._unread):
            container.clear()

    def epochstart_(self) -> None:
        """Begin a new epoch in the containers, and drop the batch of the previous one."""
        self._read_losses()
        for container in (self.inputs, self.outputs, self.targets):
            for ended in container:
                ended.clear()
            container.append(LastOnly())
        self._losses.append([])

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
        return None if self._loader is None else RecordedLoader(self, self._loader)

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

    def changemodeldevice(self, device: torch.device | str | int) -> None:
        """Move the model to a device."""
        if self._model is not None:
            self._model.to(device)
            self.updateforwarddevice()
            self.checkdevices_()

    def updateforwarddevice(self) -> None:
        """Set ``forward_device`` to the device that the model is on now."""
        before = self.forward_device
        self.forward_device = None
        if self._model is not None:
            self.forward_device = next(
                (p.device for p in self._model.parameters() if p.requires_grad), None
            )
            if self.forward_device is None:
                warn("the model has no trainable parameter", 3)
        if self.forward_device != before:
            self._batch_forward.forget()

    def checkdevices_(self) -> None:
        """Warn if forward and backward device are the same."""
        if self.forward_device is None:
            return
        if _with_index(self.forward_device) == _with_index(self._backward_device):
            warn(f"forward and backward device are the same: {self.forward_device}", 4)

    def _read_losses(self) -> None:
        """Add the losses since the last call as numbers, with the sizes of their batches.

        Reading a loss waits for its device. Losses are therefore read only when the user reads
        ``losses`` or when an epoch ends.
        """
        if self._unread:
            values = torch.stack([loss.double() for loss, _ in self._unread]).tolist()
            sizes = [n for _, n in self._unread]
            self._losses[-1] += zip(values, sizes, strict=True)
        self._unread = []

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

    def _print(self, *words: str, end: str = "\n") -> None:
        if self.verbose_mode:
            print(*words, end=end)


class LastOnly(list[Any]):
    """A list that keeps only the value that was appended last."""

    def append(self, value: Any) -> None:
        """Replace the value by this one."""
        self[:] = [value]


class RecordedLoader:
    """A dataloader whose batches are recorded in the containers of an InfinityBatch."""

    def __init__(self, manager: InfinityBatch, loader: Any) -> None:
        self.manager = manager
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        manager = self.manager
        # epochstart_ may have been called for this loop already.
        is_fresh = manager.inputs and not (manager.inputs[-1] or manager.losses[-1])
        if not is_fresh:
            manager.epochstart_()
        for batch in self.loader:
            # The training step may have cleared the containers.
            if not manager.inputs:
                manager.epochstart_()
            is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
            manager.inputs[-1].append(batch[0] if is_pair else batch)
            if is_pair:
                manager.targets[-1].append(batch[1])
            yield batch

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":
            # The attribute is not set yet, or belongs to a protocol that is not the loader's.
            raise AttributeError(name)
        return getattr(self.loader, name)


def warn(message: str, stacklevel: int) -> None:
    """Warn with InfinityBatchWarning; a stack level of 2 is the caller of this function."""
    warnings.warn(message, InfinityBatchWarning, stacklevel=stacklevel)


def _with_index(device: torch.device) -> torch.device:
    """Return the device with its index: ``cuda`` is the current CUDA device."""
    return torch.empty(0, device=device).device

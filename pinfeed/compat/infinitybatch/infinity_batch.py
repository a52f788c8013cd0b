"""InfinityBatch: the training manager of infinitybatch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from pinfeed.compat.infinitybatch.forward import BatchForward
from pinfeed.compat.infinitybatch.history import (
    History,
    Means,
    Metrics,
    Recorder,
    check_metrics,
)
from pinfeed.compat.infinitybatch.missing_calls import MissingCalls, warn
from pinfeed.errors import ArgumentError
from pinfeed.memory import limits
from pinfeed.pipeline.sources.loader_source import check_loader
from pinfeed.training.large_batch.batches import as_tensors, n_samples
from pinfeed.training.large_batch.strategy_choice import StrategyChoice
from pinfeed.training.memory_model.tensor_specs import map_tensors, to_device
from pinfeed.validation.arguments import whole_number

_SET_ONCE = ("model", "optimizer", "criterion")
"""Attributes that do not change after they were set."""
_EVENTS = ("on_train_begin", "on_epoch_begin", "on_batch_end", "on_epoch_end", "on_train_end")
"""Methods of callback objects."""


class InfinityBatchError(ArgumentError):
    """A setting is missing."""


class InfinityBatch:
    """Training manager for batches of any size, in bounded memory.

    Examples:
        >>> import warnings
        >>> from pinfeed.compat import infinitybatch
        >>> warnings.simplefilter("ignore", infinitybatch.InfinityBatchWarning)  # without a GPU
        >>> loader = [(torch.randn(500, 8), torch.randn(500, 1)) for _ in range(3)]
        >>> ib = infinitybatch.InfinityBatch(torch.nn.Linear(8, 1), verbose=False, chunk_size=100)
        >>> ib.optimizer = torch.optim.Adam(ib.model.parameters())
        >>> ib.criterion, ib.dataloader = torch.nn.MSELoss(), loader
        >>> ib.train(2)
        >>> ib.evaluate(loader)
        {'loss': ...}
        >>> ib.history
        <History: 2 epochs, 6 batches, 1 evaluations>

    It warns if a loop of the user forgets ``step`` or ``zero_grad``. Callbacks are objects with
    some of these methods:

    - ``on_train_begin(ib)``, ``on_train_end(ib)``: Before and after ``train``; the latter is not
      called after an error.
    - ``on_epoch_begin(ib, epoch)``: Before an epoch, with its number from 0.
    - ``on_batch_end(ib, batch, loss)``: After a batch, with its number from 0 and the loss as a
      tensor on the backward device (None if the loop did not call ``ib.loss``).
    - ``on_epoch_end(ib, record)``: After an epoch, with its Record of the history; not called after
      an error or ``break``. It is the place to step schedulers.

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
        callbacks: Callback objects, called in this order.

    Attributes:
        model: The model that is trained. It can be set once.
        optimizer: The optimizer of the model's parameters. It can be set once.
        criterion: The loss function. It can be set once.
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
        callbacks: Iterable[Any] = (),
    ) -> None:
        self._callbacks = checked_callbacks(callbacks)
        if not torch.cuda.is_available():
            warn("there is no CUDA device, so batches are computed on the CPU, in host memory", 3)
        self._batch_forward = BatchForward(config, chunk_size, strategy, verify)
        self.forward_device: torch.device | None = None
        self._loss: torch.Tensor | None = None
        self._batch_loss: torch.Tensor | None = None
        self._recorder = Recorder()
        self._is_stopped = False
        self.verbose_mode = verbose
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.targets: list[Any] = []
        self.backward_device = backward_device
        self.dataloader = dataloader
        self.model: Any = model
        self.optimizer: Any = optimizer
        self.criterion: Any = criterion

    def __call__(self, num_epochs: int) -> None:
        """Do the same as ``train``."""
        self.train(num_epochs)

    def train(self, num_epochs: int) -> None:
        """Clear the containers and train for ``num_epochs`` epochs, or until ``stop``.

        Raises:
            ArgumentError: If ``num_epochs`` is not a whole number, or is negative.
        """
        num_epochs = whole_number(num_epochs, "num_epochs", least=0)
        self.clearcontainers_()
        self._is_stopped = False
        self._call_back("on_train_begin", self)
        self._print(f"Training for {num_epochs} epochs.")
        for epoch in range(num_epochs):
            if self._is_stopped:
                break
            self._print(f"Epoch: {epoch + 1}/{num_epochs}")
            self.epoch()
        self._call_back("on_train_end", self)

    def epoch(self) -> None:
        """Train for one epoch.

        Raises:
            InfinityBatchError: If a setting is missing, or the dataloader yields no batch.
        """
        for name in ("model", "optimizer", "criterion", "dataloader"):
            self._required(name)
        self.updateforwarddevice()
        self.zero_grad()
        n_batches = n = size = 0
        # Without closing, an error that the user keeps would keep the loop running.
        with contextlib.closing(iter(self.dataloader)) as batches:
            for batch in batches:
                inputs, _ = pair_of(batch)
                size = n_samples(as_tensors(inputs))
                self._print(
                    f"-- batch {n_batches}: finished with {n}, current batch size {size}.", end="\r"
                )
                self.batch_(inputs)
                n_batches += 1
                n += size
                self.loss()
                self.backward()
                self.step()
                self.zero_grad()
        self._print(
            f"-- Epoch finished with {n_batches} batch(es), {n} element(s) were forwarded, "
            f"last batch size was {size}."
        )

    def stop(self) -> None:
        """End the current epoch after the current batch, and end ``train``.

        Callbacks and loops over ``dataloader`` may call it.
        """
        self._is_stopped = True

    def evaluate(self, loader: Any, metrics: Metrics | None = None) -> dict[str, float]:
        """Return loss and metrics of other batches, in eval mode and without gradients.

        Batches are computed in the memory of a training step. Afterwards each module is in its
        previous mode again. The containers do not change.

        Args:
            loader: An iterable of pairs of inputs and targets, or of inputs alone.
            metrics: Functions of the outputs and targets of a batch of the loader, by name.

        Returns:
            ``"loss"``, the mean weighted by the terms of each batch (or the sum, if the loss is a
            sum), and the mean of each metric, weighted by samples. The history records them too.

        Raises:
            ArgumentError: If the loader yields no samples, ``metrics`` is not a dict of functions,
                or a metric has the name of a column of the history.
            InfinityBatchError: If there is no model or no criterion.
        """
        check_loader(loader)
        metrics = check_metrics(metrics)
        model = self._required("model")
        criterion = self._required("criterion")
        begin = time.perf_counter()
        means = Means(criterion, metrics)
        with torch.no_grad(), in_eval_mode(model, criterion):
            for inputs, targets in map(pair_of, loader):
                outputs = self._outputs(inputs)
                targets = to_device(as_tensors(targets), self._backward_device)
                loss = torch.as_tensor(criterion(outputs, targets)).detach().double()
                means.add(loss, outputs, targets, n_samples(as_tensors(inputs)))
        if not means.n_samples:
            raise ArgumentError(
                f"loader={loader!r} yielded no samples; expected at least one batch"
            )
        found = means.read()
        values = {name: found[name] for name in metrics}
        seconds = time.perf_counter() - begin
        self._recorder.add_evaluation(found["loss"], means.n_samples, seconds, values)
        return found

    def batch_(self, inputs: Any = None) -> Any:
        """Compute the outputs of a whole batch, on the backward device.

        Args:
            inputs: The inputs of the batch; None for the inputs that ``dataloader`` yielded last.

        Raises:
            InfinityBatchError: If there is no model, or ``dataloader`` has not yielded a batch yet.
        """
        self._required("model")
        self._missing_calls.report()
        if not self.inputs:
            self.epochstart_()
        if inputs is None:
            if not self.inputs[-1]:
                raise InfinityBatchError(
                    "batch_() has no inputs, because dataloader has not yielded a batch yet; "
                    "iterate ib.dataloader, or give the inputs: batch_(inputs)"
                )
            inputs = self.inputs[-1][-1]
        outputs = self._outputs(inputs)
        self._missing_calls.watch(outputs)
        self.inputs[-1].append(inputs)
        self.outputs[-1].append(outputs)
        return outputs

    def _outputs(self, inputs: Any) -> Any:
        """Return the outputs of a whole batch, on the backward device."""
        model = self._required("model")
        return self._batch_forward.outputs(model, inputs, self.optimizer, self._backward_device)

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
        targets = to_device(as_tensors(self.targets[-1][-1]), self._backward_device)
        loss = self._required("criterion")(outputs, targets)
        self._loss = loss
        self._batch_loss = loss.detach()
        self._recorder.add(loss, n_samples(outputs))

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
        self._recorder.read()
        return self._recorder.losses

    @property
    def history(self) -> History:
        """Losses, times and metrics of the whole training as numbers; ``train`` keeps them."""
        self._recorder.read()
        return self._recorder.history

    def clearcontainers_(self) -> None:
        """Clear the containers. A running loop continues in a new epoch."""
        self._recorder.clear()
        for container in (self.inputs, self.outputs, self.targets):
            container.clear()

    def epochstart_(self) -> None:
        """Begin a new epoch in the containers, and drop the batch of the previous one."""
        self._recorder.begin_epoch()
        for container in (self.inputs, self.outputs, self.targets):
            for ended in container:
                ended.clear()
            container.append(LastOnly())

    def __setattr__(self, name: str, value: Any) -> None:
        name = "optimizer" if name == "optimier" else name
        if name in _SET_ONCE and vars(self).get(name) is not None:
            warn(f"{name} was set before and does not change; make a new InfinityBatch", 3)
            return
        super().__setattr__(name, value)
        if name == "model":
            self.updateforwarddevice()
            self.checkdevices_()
        elif name == "optimizer":
            self._missing_calls = MissingCalls(value)

    @property
    def optimier(self) -> Any:
        """Alias of ``optimizer``, as the README of infinitybatch spells it."""
        return self.optimizer

    @property
    def dataloader(self) -> Any:
        """The dataloader. Iterating it begins an epoch, and the containers record its batches."""
        return None if self._dataloader is None else RecordedLoader(self, self._dataloader)

    @dataloader.setter
    def dataloader(self, dataloader: Any) -> None:
        is_recorded = isinstance(dataloader, RecordedLoader)
        self._dataloader = dataloader.loader if is_recorded else dataloader

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
        if self.model is not None:
            self.model.to(device)
            self.updateforwarddevice()
            self.checkdevices_()

    def updateforwarddevice(self) -> None:
        """Set ``forward_device`` to the device that the model is on now."""
        before = self.forward_device
        self.forward_device = None
        if self.model is not None:
            devices = (p.device for p in self.model.parameters() if p.requires_grad)
            self.forward_device = next(devices, None)
            if self.forward_device is None:
                warn("the model has no trainable parameter", 3)
        if self.forward_device != before:
            self._batch_forward.forget()

    def checkdevices_(self) -> None:
        """Warn if forward and backward device are the same."""
        found = self.forward_device
        if found is not None and _with_index(found) == _with_index(self._backward_device):
            warn(f"forward and backward device are the same: {found}", 4)

    def _batches(self, loader: Any) -> Generator[Any, None, None]:
        """Yield the batches of an epoch of a loader, and record them."""
        # epochstart_ may have been called for this loop already.
        if not self.inputs or self.inputs[-1]:
            self.epochstart_()
        self._is_stopped = False
        self._missing_calls.epoch_begins()
        self._call_back("on_epoch_begin", self, self._recorder.n_epochs - 1)
        n_batches = 0
        batches = iter(loader)
        # The reader thread of a feeder ends with the loop, also after a break.
        can_close = hasattr(batches, "close")
        with contextlib.closing(batches) if can_close else contextlib.nullcontext():
            for batch in batches:
                # The training step may have cleared the containers.
                if not self.inputs:
                    self.epochstart_()
                is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
                inputs, targets = batch if is_pair else (batch, None)
                self.inputs[-1].append(inputs)
                self.targets[-1].append(targets)
                self._batch_loss = None
                yield batch
                self._call_back("on_batch_end", self, n_batches, self._batch_loss)
                n_batches += 1
                if self._is_stopped:
                    break
        if not n_batches:
            raise InfinityBatchError(
                f"dataloader={loader!r} yielded no batch; expected at least one"
            )
        self._missing_calls.epoch_ends()
        self._missing_calls.report()
        self._call_back("on_epoch_end", self, self._recorder.end_epoch())

    def _call_back(self, method: str, *args: Any) -> None:
        """Call a method of each callback object that has it; errors of the objects propagate."""
        for callback in self._callbacks:
            if (found := getattr(callback, method, None)) is not None:
                found(*args)

    def _required(self, name: str) -> Any:
        found = getattr(self, name)
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

    def __iter__(self) -> Generator[Any, None, None]:
        return self.manager._batches(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":
            # The attribute is not set yet, or belongs to a protocol that is not the loader's.
            raise AttributeError(name)
        return getattr(self.loader, name)


def checked_callbacks(callbacks: Any) -> list[Any]:
    """Return callback objects as a list.

    Raises:
        ArgumentError: If an object has none of the methods of callbacks.
    """
    expected = f"expected a list of objects with some of {', '.join(_EVENTS)}"
    if not isinstance(callbacks, Iterable):
        raise ArgumentError(f"callbacks={callbacks!r}: {expected}")
    found = list(callbacks)
    for callback in found:
        methods = [getattr(callback, name, None) for name in _EVENTS]
        if isinstance(callback, type) or not any(map(callable, methods)):
            raise ArgumentError(f"callbacks= has {callback!r}; {expected}")
    return found


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets of a batch; targets are None if the batch has inputs only.

    Raises:
        ArgumentError: If the batch is a tuple or list that is not a pair.
    """
    if not isinstance(batch, (tuple, list)):
        return batch, None
    if len(batch) != 2:
        raise ArgumentError(
            f"a batch has {len(batch)} parts; expected a pair of inputs and targets, each of any "
            "structure"
        )
    return batch[0], batch[1]


@contextlib.contextmanager
def in_eval_mode(*values: Any) -> Iterator[None]:
    """Put the modules among the values in eval mode, and restore the modes at the end."""
    modules = [value for value in values if isinstance(value, nn.Module)]
    were_training = [part for module in modules for part in module.modules() if part.training]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part in were_training:
            part.training = True


def _with_index(device: torch.device) -> torch.device:
    """Return the device with its index: ``cuda`` is the current CUDA device."""
    return torch.empty(0, device=device).device

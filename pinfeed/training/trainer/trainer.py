"""Trainer: a training run, whole, epoch by epoch, or as the caller's own loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from pinfeed.devices import torch_device
from pinfeed.errors import ArgumentError, ClosedError
from pinfeed.feeders.dataloader import LoaderFeeder, wrap_loader
from pinfeed.feeders.feeder import Feeder
from pinfeed.memory import limits
from pinfeed.pipeline.sources.dataloader import check_loader
from pinfeed.training.embeddings.optimizer import RowOptimizer
from pinfeed.training.large_batch.big_batch import BigBatch
from pinfeed.training.large_batch.select import StrategyChoice
from pinfeed.training.large_batch.strategies.micro_batches import as_tensors, n_samples
from pinfeed.training.large_batch.strategy_options import StrategyOptions, check_step
from pinfeed.training.trainer.callbacks import Callbacks, progress_bar
from pinfeed.training.trainer.evaluate import Evaluator, Metrics, check_metrics, pair_of
from pinfeed.training.trainer.history import History, Record
from pinfeed.training.trainer.loop_checks import MissingStepCheck
from pinfeed.training.trainer.optimizers import OptimizerGroup, parameters_of
from pinfeed.training.trainer.recorder import Recorder
from pinfeed.validation.arguments import check_flag, explain_arguments, whole_number

_HINTS = {
    **dict.fromkeys(
        ("epochs", "n_epochs", "num_epochs", "max_epochs"),
        "give it to train(): trainer.train(n_epochs)",
    ),
    "batch_size": "the loader has it; samples that are computed at a time are chunk_size=",
    **dict.fromkeys(
        ("dataset", "data", "train_loader", "train_dataloader"),
        "give a loader of batches: DataLoader(dataset, batch_size=...)",
    ),
    **dict.fromkeys(
        ("lr", "learning_rate", "weight_decay"),
        "give it to the optimizer: torch.optim.SGD(model.parameters(), lr=...)",
    ),
    **dict.fromkeys(
        ("metrics", "val_loader", "eval_loader"),
        "give it to evaluate(): trainer.evaluate(loader, metrics)",
    ),
    **dict.fromkeys(("amp", "precision", "dtype"), "give autocast=torch.bfloat16"),
    **dict.fromkeys(("lr_scheduler", "schedulers"), "give it as scheduler="),
    **dict.fromkeys(
        ("gpu_memory_limit", "cpu_memory_limit"),
        "limits are given together: config=pinfeed.Config(...)",
    ),
    **dict.fromkeys(
        ("max_norm", "grad_clip", "max_grad_norm", "gradient_clip_val"), "give it as clip_norm="
    ),
}
"""Advice, by the names that other trainers have for it."""


class Trainer:
    """Trains a model.

    These three are the same:

        trainer.train(1)

        trainer.epoch()

        for inputs, targets in trainer.batches():
            trainer.backward(inputs, targets)
            trainer.step()
            trainer.zero_grad()

    Gradients are those of whole batches, by a BigBatch. Without ``config`` and ``chunk_size`` that
    is the plain step, and batches come to the device ahead of the loop; with them, batches stay
    where the loader has them, and come to the device in chunks.

    What an epoch measured is in ``history`` when it has ended; no batch waits for the device. The
    model stays in the mode it is in.

    Args:
        model: The model.
        loss: Called with outputs and targets; with outputs and None where there are none.
        optimizer: A torch optimizer, or several of different parameters; a RowOptimizer too.
        loader: A DataLoader, a Feeder, or another iterable of batches: pairs of inputs and targets,
            or inputs alone, in any structure.
        config: Limits of memory, as for BigBatch.
        chunk_size: Samples at a time, in place of that.
        strategy: As for BigBatch.
        prove: As for BigBatch.
        scheduler: One, or several; stepped after every epoch, ReduceLROnPlateau with its mean loss.
            Of batches: call it in a callback.
        clip_norm: The norm of all gradients together is brought down to this before a step.
        scaler: A ``torch.amp.GradScaler``.
        autocast: The dtype of autocast for forward passes and losses.
        device: The model is moved there; None for where it is.
        callbacks: Objects with some of the methods that ``Callbacks`` names.
        progress: Show a progress bar.

    Raises:
        ArgumentError: An argument is invalid, or two arguments conflict.
        DeviceError: There is no such device.
    """

    @explain_arguments(_HINTS)
    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], torch.Tensor],
        optimizer: Any,
        loader: Any,
        *,
        config: limits.MemoryLimits | None = None,
        chunk_size: int | None = None,
        strategy: str = "auto",
        prove: bool = True,
        scheduler: Any = None,
        clip_norm: float | None = None,
        scaler: Any = None,
        autocast: torch.dtype | None = None,
        device: Any = None,
        callbacks: Iterable[Any] = (),
        progress: bool = False,
    ) -> None:
        self._updates = OptimizerGroup(optimizer, scheduler, clip_norm, scaler)
        self._callbacks = Callbacks(callbacks)
        check_flag(progress, "progress")
        check_loader(loader)
        is_limited = config is not None or chunk_size is not None
        if strategy == "auto" and not is_limited:
            strategy = "plain"
        options = StrategyOptions(config, chunk_size, strategy, autocast, prove)
        check_step(model, loss, options, scaler)
        if device is not None:
            model.to(torch_device(device, exists=True))
        self._big = BigBatch(
            model,
            loss,
            config=config,
            chunk_size=chunk_size,
            strategy=strategy,
            autocast=autocast,
            scaler=scaler,
            prove=prove,
        )
        self.model = model
        self._loss = loss
        self.loader = loader
        _check_is_stepped(model, loss, self._updates.optimizers)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._chunk_size = chunk_size
        self._autocast = autocast
        self._progress = progress
        is_there = isinstance(loader, (Feeder, LoaderFeeder))
        self._feeder = (
            wrap_loader(loader, device=self._device) if not is_limited and not is_there else None
        )
        self._events = MissingStepCheck(
            self._updates.optimizers, parameters_of, has_scaler=scaler is not None
        )
        self._recorder = Recorder(self._device)
        self._is_training = self._is_stopped = self._is_closed = False

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of threads, page-locked memory and the optimizers.

        The history stays. Idempotent.
        """
        self._is_closed = True
        with contextlib.ExitStack() as stack:
            stack.callback(self._events.close)
            stack.callback(self._big.close)
            if self._feeder is not None:
                stack.callback(self._feeder.close)

    @property
    def history(self) -> History:
        """What was measured."""
        return self._recorder.history

    @property
    def n_epochs(self) -> int:
        """Epochs that were begun."""
        return self._recorder.n_epochs

    @property
    def chosen(self) -> StrategyChoice | None:
        """How the gradients of the last batch were computed; None before the first."""
        return self._big.chosen

    def train(self, n_epochs: int) -> History:
        """Train for so many epochs, or until ``stop``; what was measured.

        Raises:
            ArgumentError: ``n_epochs`` is no whole number, or the loader gives no batch.
        """
        n_epochs = whole_number(n_epochs, "n_epochs", least=0)
        self._is_training = True
        self._is_stopped = False
        try:
            self._callbacks("on_train_begin", self)
            for _ in range(n_epochs):
                if self._is_stopped:
                    break
                self.epoch()
            self._callbacks("on_train_end", self)
        finally:
            self._is_training = False
        return self.history

    def epoch(self) -> float:
        """Train for one epoch; the mean of its losses, weighed by samples."""
        with contextlib.closing(self.batches()) as batches:
            # An error that is kept would keep the loop running.
            for batch in batches:
                self.backward(*batch)
                self.step()
                self.zero_grad()
        return self.history.epochs[-1].loss

    def batches(self) -> Generator[tuple[Any, Any], None, None]:
        """Inputs and targets of an epoch, for a loop of the caller's.

        Gradients that are there when it begins are cleared.

        Raises:
            ArgumentError: The loader gives no batch, or one that is no pair.
            ClosedError: This is closed, or another loop over it runs.
        """
        self._require_open()
        if self._recorder.is_recording:
            raise ClosedError(
                "batches() while another loop over this trainer is running; end it (or close() its iterator) first"
            )
        self._is_stopped = self._is_training and self._is_stopped
        epoch = self._recorder.begin()
        try:
            self._updates.zero_grad()
            self._events.epoch_begins()
            self._callbacks("on_epoch_begin", self, epoch)
            n_batches = yield from self._lent(epoch)
            if not n_batches and not self._is_stopped:
                raise ArgumentError(
                    f"loader={self.loader!r} gave no batch; expected at least one (an iterator is used up after its first epoch, and "
                    "drop_last leaves nothing of fewer samples than a batch)"
                )
            self._events.epoch_ends()
        finally:
            self._recorder.end()
        row = self._recorder.summary()
        self._updates.epoch_ends(row.loss)
        self._callbacks("on_epoch_end", self, row)

    def backward(self, inputs: Any, targets: Any = None) -> torch.Tensor:
        """Add the gradients of a batch to those that are there; its loss, on the device.

        In a loop over ``batches`` it is recorded.
        """
        self._require_open()
        n = n_samples(as_tensors(inputs))
        self._events.backward_begins()
        loss = self._big.backward(inputs, targets)
        self._recorder.add(loss, n)
        return loss

    def step(self) -> None:
        """Have the optimizers use the gradients: unscaled, and clipped where that was asked for."""
        self._updates.step()
        self._events.stepped()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self._updates.zero_grad()
        self._events.cleared()

    def stop(self) -> None:
        """End the loop after the batch that is under way, and training with it.

        For callbacks, and for loops over ``batches``.
        """
        self._is_stopped = True

    def evaluate(self, loader: Any, metrics: Metrics | None = None) -> dict[str, float]:
        """Loss and metrics of other batches: in eval mode, without gradients, in chunks.

        Modes are as before afterwards.

        Args:
            loader: As the Trainer's.
            metrics: By name, functions of the outputs and targets of a batch of the loader.

        Returns:
            ``"loss"``, weighed by the terms of each batch (a sum, if the loss is a sum), and the
            mean of each metric, weighed by samples. Also in the history.

        Raises:
            ArgumentError: The loader gives no batches or no samples, ``metrics`` is no dict of
                functions, or a metric has a name of the history's columns.
        """
        check_loader(loader)
        check_metrics(metrics)
        metrics = dict(metrics or {})
        if taken_names := set(metrics) & set(Record.__dataclass_fields__):
            raise ArgumentError(
                f"metrics= has {min(taken_names)!r}, which is a column of the history; give it another name"
            )
        begin, size = time.perf_counter(), self._chunk_size
        if (
            size is None
            and self.chosen is not None
            and self.chosen.strategy in ("accumulate", "two_pass")
        ):
            size = self.chosen.chunk_size
        evaluator = Evaluator(self.model, self._loss, self._device, size, self._context)
        found, n = evaluator.run(loader, metrics, isinstance(loader, (Feeder, LoaderFeeder)))
        seconds, values = time.perf_counter() - begin, {name: found[name] for name in metrics}
        self._recorder.evaluation(found["loss"], n, seconds, values)
        return found

    def _lent(self, epoch: int) -> Generator[tuple[Any, Any], None, int]:
        """The batches; afterwards their number."""
        number, source = -1, self.loader if self._feeder is None else self._feeder
        with progress_bar(self._progress, source, epoch) as update, contextlib.ExitStack() as stack:
            batches = iter(source)
            if hasattr(batches, "close"):
                # A reader thread ends with the loop, by break too.
                stack.callback(batches.close)
            for number, batch in enumerate(batches):
                yield pair_of(batch)
                update(self._recorder.loss)
                self._callbacks("on_batch_end", self, number, self._recorder.loss)
                self._recorder.loss = None
                if self._is_stopped:
                    break
        return number + 1

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the trainer is closed; make a new one")

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        return (
            contextlib.nullcontext()
            if self._autocast is None
            else torch.autocast(self._device.type, self._autocast)
        )


def _check_is_stepped(model: nn.Module, loss: Any, optimizers: Sequence[Any]) -> None:
    """Raise ArgumentError where no optimizer steps a parameter of model or loss, as after the model was copied or made anew."""
    modules = [module for module in (model, loss) if isinstance(module, nn.Module)]
    wanted = {
        id(parameter)
        for module in modules
        for parameter in module.parameters()
        if parameter.requires_grad
    }
    stepped = [id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)]
    if (
        wanted.isdisjoint(stepped)
        and wanted
        and not any(isinstance(optimizer, RowOptimizer) for optimizer in optimizers)
    ):
        raise ArgumentError(
            f"optimizer= steps none of the {len(wanted)} parameters of the model; make it of model.parameters() of this very model"
        )

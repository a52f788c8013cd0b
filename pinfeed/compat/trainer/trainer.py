"""Trainer: trains a model in one call, epoch by epoch, or in the user's own loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from pinfeed.compat.trainer.callbacks import Callbacks, progress_bar
from pinfeed.compat.trainer.evaluate import Evaluator, Metrics, check_metrics, pair_of
from pinfeed.compat.trainer.history import History, Record
from pinfeed.compat.trainer.optimizer_group import MissingStepCheck, OptimizerGroup
from pinfeed.compat.trainer.recorder import (
    PartialEpoch,
    Recorder,
    has_state,
    load_position,
    remaining_batches,
)
from pinfeed.devices import torch_device
from pinfeed.errors import ArgumentError, ClosedError
from pinfeed.feeders.base_feeder import BaseFeeder
from pinfeed.feeders.restartable import Restartable
from pinfeed.feeders.wrap_loader import wrap_loader
from pinfeed.memory import limits
from pinfeed.pipeline.sources.loader_source import check_loader
from pinfeed.training.large_batch.batches import as_tensors, n_samples
from pinfeed.training.large_batch.big_batch import BigBatch, StrategyOptions, check_step
from pinfeed.training.large_batch.strategy_selector import StrategyChoice
from pinfeed.training.memory_model.training_step import autocast_context
from pinfeed.validation.arguments import check_flag, explain_arguments, whole_number

_HINTS = {
    "epochs n_epochs num_epochs max_epochs": "give it to train(): trainer.train(n_epochs)",
    "batch_size": "give batch_size to the loader; chunk_size= is the number of samples that are "
    "computed at a time",
    "dataset data train_loader train_dataloader": "give a loader of batches: DataLoader(dataset, "
    "batch_size=...)",
    "lr learning_rate weight_decay": "give it to the optimizer: "
    "torch.optim.SGD(model.parameters(), lr=...)",
    "metrics val_loader eval_loader": "give it to evaluate(): trainer.evaluate(loader, metrics)",
    "amp precision dtype": "give autocast=torch.bfloat16",
    "lr_scheduler schedulers": "give it as scheduler=",
    "gpu_memory_limit cpu_memory_limit": "give both limits in a Config: config=pinfeed.Config(...)",
    "max_norm grad_clip max_grad_norm gradient_clip_val": "give it as clip_norm=",
}
"""Hints for names that other trainers use."""


class Trainer:
    """Training loop for a model: in one call, epoch by epoch, or in the user's own loop.

    Examples:
        >>> from pinfeed.compat.trainer import Trainer
        >>> model = torch.nn.Linear(8, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = [(torch.randn(32, 8), torch.randn(32, 1)) for _ in range(5)]
        >>> with Trainer(model, torch.nn.MSELoss(), sgd, loader) as trainer:
        ...     history = trainer.train(2)
        >>> len(history.epochs)
        2

    ``trainer.train(1)`` does the same as ``trainer.epoch()`` and as this loop, apart from the
    callbacks ``on_train_begin`` and ``on_train_end``:

        for inputs, targets in trainer.batches():
            trainer.backward(inputs, targets)
            trainer.step()
            trainer.zero_grad()

    A BigBatch computes the gradients of whole batches. Without ``config`` and ``chunk_size``, it
    runs the plain step, and batches are prefetched to the device. With one of them, batches stay
    in the memory in which the loader yields them, and their chunks are prefetched.

    ``history`` has the measurements of an epoch when the epoch has ended; taking them never makes
    a batch wait for the device. The model stays in its training or eval mode.

    Args:
        model: The model.
        loss: Function of outputs and targets, called with None for a batch without targets.
        optimizer: A torch optimizer or a RowOptimizer; or several that have different parameters.
        loader: A DataLoader, a Feeder, or another iterable of batches: pairs of inputs and targets,
            or inputs alone, in any structure.
        config: A ``pinfeed.Config`` with memory limits, as for BigBatch.
        chunk_size: Samples per chunk; None for the largest chunk that fits ``config``, or for
            whole batches without ``config``. The strategies ``"plain"``, ``"checkpoint"`` and
            ``"offload"`` ignore ``chunk_size`` in training; ``evaluate`` always uses it.
        strategy: Strategy, as for BigBatch.
        verify: Whether to compare strategies with the plain step before use, as for BigBatch.
        device: Device to which the Trainer moves the model; None for the model's current device.
        callbacks: Objects with some of the methods that ``Callbacks`` names.
        progress: Whether to show a progress bar.
        scheduler: One scheduler or several. The Trainer steps them after every epoch, and gives
            the mean loss of the epoch to ReduceLROnPlateau. Step a scheduler that counts batches
            in a callback.
        clip_norm: Largest norm of all gradients together; larger gradients are scaled down before
            a step. None does not clip.
        scaler: A ``torch.amp.GradScaler``; None does not scale the loss.
        autocast: Dtype of autocast for forward passes and losses; None uses no autocast.

    Attributes:
        model: The model.
        loader: The loader.

    Raises:
        ArgumentError: If an argument is invalid, or two arguments conflict.
        DeviceError: If the device does not exist.
    """

    # It is one class because its methods are the steps of one loop, which all three forms share.

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
        verify: bool = True,
        device: Any = None,
        callbacks: Iterable[Any] = (),
        progress: bool = False,
        scheduler: Any = None,
        clip_norm: float | None = None,
        scaler: Any = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._optimizers = OptimizerGroup(optimizer, scheduler, clip_norm, scaler)
        self._callbacks = Callbacks(callbacks)
        check_flag(progress, "progress")
        check_loader(loader)
        self._is_plain_by_default = strategy == "auto" and config is None and chunk_size is None
        strategy = "plain" if self._is_plain_by_default else strategy
        strategy_options = StrategyOptions(config, chunk_size, strategy, autocast, verify)
        check_step(model, loss, strategy_options, scaler)
        if device is not None:
            model.to(torch_device(device, exists=True))
        self._big_batch = BigBatch(model, loss, scaler=scaler, **vars(strategy_options))
        self.model = model
        self._loss = loss
        self.loader = loader
        self._optimizers.check_steps(model, loss)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._strategy_options = strategy_options
        self._progress = progress
        # With a memory limit, chunks are prefetched instead of batches. A feeder prefetches its own
        # batches.
        is_prefetched = strategy_options.has_limit or _is_feeder(loader)
        self._feeder = None if is_prefetched else wrap_loader(loader, device=self._device)
        self._source = loader if self._feeder is None else self._feeder
        self._loop_check = MissingStepCheck(
            self._optimizers.optimizers, has_scaler=scaler is not None
        )
        self._recorder = Recorder(self._device)
        self._is_training = False
        self._is_stopped = False
        self._is_closed = False

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End threads, free pinned memory, and remove hooks from the optimizers.

        ``history`` stays readable. Further calls do nothing.
        """
        self._is_closed = True
        with contextlib.ExitStack() as stack:
            stack.callback(self._loop_check.close)
            stack.callback(self._big_batch.close)
            if self._feeder is not None:
                stack.callback(self._feeder.close)

    @property
    def history(self) -> History:
        """Measurements of the training run."""
        return self._recorder.history

    @property
    def n_epochs(self) -> int:
        """Number of epochs that have begun.

        After ``load_state_dict``, an epoch that will be continued does not count. Therefore
        ``train(10 - trainer.n_epochs)`` completes ten epochs.
        """
        return self._recorder.n_epochs

    @property
    def chosen(self) -> StrategyChoice | None:
        """Strategy of the last batch; None before the first batch."""
        chosen = self._big_batch.chosen
        if chosen is None or not self._is_plain_by_default:
            return chosen
        return dataclasses.replace(chosen, why="neither config nor chunk_size was given")

    def train(self, n_epochs: int) -> History:
        """Train for ``n_epochs`` epochs, or until ``stop``, and return the history.

        Raises:
            ArgumentError: If ``n_epochs`` is not a whole number, or the loader yields no batch.
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
        """Train for one epoch and return the mean of its losses, weighted by samples."""
        # Without closing, an error that the user keeps would keep the loop running.
        with contextlib.closing(self.batches()) as batches:
            for batch in batches:
                self.backward(*batch)
                self.step()
                self.zero_grad()
        return self.history.epochs[-1].loss

    def batches(self) -> Generator[tuple[Any, Any], None, None]:
        """Yield inputs and targets of an epoch, for the user's own loop.

        The loop clears existing gradients when it begins.

        Raises:
            ArgumentError: If the loader yields no batch, or a batch that is not a pair.
            ClosedError: If the trainer is closed, or another loop over it is running.
        """
        self._require_open()
        self._require_idle("batches() again")
        self._is_stopped = self._is_training and self._is_stopped
        epoch = self._recorder.begin()
        try:
            self._optimizers.zero_grad()
            self._loop_check.epoch_begins()
            self._callbacks("on_epoch_begin", self, epoch)
            yield from self._epoch_batches(epoch, self._recorder.done)
            if not self._recorder.done.n_batches and not self._is_stopped:
                raise ArgumentError(
                    f"loader={self.loader!r} yielded no batch; expected at least one; give a "
                    "loader that can be iterated again (an iterator is exhausted after one epoch), "
                    "and no drop_last=True for fewer samples than one batch"
                )
            self._loop_check.epoch_ends()
        finally:
            self._recorder.end()
        record = self._recorder.summary()
        self._optimizers.step_schedulers(record.loss)
        self._callbacks("on_epoch_end", self, record)

    def backward(self, inputs: Any, targets: Any = None) -> torch.Tensor:
        """Add the gradients of a batch, and return its loss, a tensor of shape () on the device.

        In a loop over ``batches``, the history records the loss.
        """
        self._require_open()
        n = n_samples(as_tensors(inputs))
        self._loop_check.backward_begins()
        loss = self._big_batch.backward(inputs, targets)
        self._recorder.add(loss, n)
        return loss

    def step(self) -> None:
        """Step the optimizers, after unscaling and clipping the gradients as configured."""
        self._optimizers.step()
        self._loop_check.stepped()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self._optimizers.zero_grad()
        self._loop_check.cleared()

    def stop(self) -> None:
        """End the current epoch after the current batch, and end ``train``.

        Callbacks and loops over ``batches`` may call it.
        """
        self._is_stopped = True

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training run, with that of the loader, as plain values.

        Save it in ``on_batch_end`` or ``on_epoch_end`` of the last callback, together with the
        model, optimizers, schedulers and scaler: ``checkpoint.save(path, model=model,
        optimizer=optimizer, trainer=trainer)``. It waits for the losses of the epoch so far. It
        contains neither the history nor a call of ``stop``.

        Raises:
            ArgumentError: If an epoch is running, and the loader has no ``state_dict``.
        """
        recorder = self._recorder
        done = recorder.done
        epoch = recorder.epoch
        if has_state(self._source):
            recorder.read()
        elif not recorder.is_recording:
            # The loader cannot continue an epoch that was left; its next loop is a new epoch.
            done = PartialEpoch()
            epoch = recorder.n_epochs
        elif done.n_batches:
            raise ArgumentError(
                f"state_dict() in the middle of an epoch, after batch {done.n_batches - 1}; "
                f"loader={self.loader!r} has no state_dict(), so the epoch could not be continued; "
                "save in on_epoch_end, or give a StatefulDataLoader, a Feeder or a loop over "
                "train_rows"
            )
        position = self._source.state_dict() if has_state(self._source) else None
        return {"epoch": epoch, "done": dataclasses.asdict(done), "loader": position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next epoch continue at a saved position.

        If the state was saved after the last batch of an epoch, the next epoch has no batches. It
        still steps the schedulers and calls ``on_epoch_end``.

        Args:
            state: Return value of ``state_dict``.

        Raises:
            ArgumentError: If ``state`` is not such a state, or belongs to another kind of loader.
            ClosedError: If a loop over this trainer is running, or the trainer is closed.
        """
        self._require_open()
        self._require_idle("load_state_dict()")
        try:
            epoch = int(state["epoch"])
            done = PartialEpoch(**state["done"])
            position = state["loader"]
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"not a state of a Trainer ({error!r}); expected the return value of state_dict()"
            ) from None
        load_position(self._source, position, done)
        self._recorder.resume(epoch, done)

    def evaluate(self, loader: Any, metrics: Metrics | None = None) -> dict[str, float]:
        """Return loss and metrics of other batches, in eval mode and without gradients.

        Batches are computed in chunks of ``chunk_size`` or of the size that the last training batch
        had, otherwise whole. Afterwards each module is in its previous mode again.

        Args:
            loader: A loader as for the Trainer.
            metrics: Functions of the outputs and targets of a batch of the loader, by name.

        Returns:
            ``"loss"``, the mean weighted by the terms of each batch (or the sum, if the loss is a
            sum), and the mean of each metric, weighted by samples. The history records them too.

        Raises:
            ArgumentError: If the loader yields no batches or no samples, ``metrics`` is not a dict
                of functions, or a metric has the name of a column of the history.
        """
        check_loader(loader)
        check_metrics(metrics)
        metrics = dict(metrics or {})
        if taken_names := set(metrics) & set(Record.__dataclass_fields__):
            raise ArgumentError(
                f"metrics= has {min(taken_names)!r}, which is the name of a column of the history; "
                "give the metric another name"
            )
        begin = time.perf_counter()
        autocast = self._strategy_options.autocast
        context = functools.partial(autocast_context, self._device.type, autocast)
        evaluator = Evaluator(
            self.model, self._loss, self._device, self._evaluation_size(), context
        )
        found, n = evaluator.run(loader, metrics, _is_feeder(loader))
        seconds = time.perf_counter() - begin
        values = {name: found[name] for name in metrics}
        self._recorder.evaluation(found["loss"], n, seconds, values)
        return found

    def _evaluation_size(self) -> int | None:
        """Return how many samples are evaluated at a time; None for whole batches."""
        if self._strategy_options.chunk_size is not None:
            return self._strategy_options.chunk_size
        if self.chosen is not None and self.chosen.strategy in ("accumulate", "two_pass"):
            return self.chosen.chunk_size
        return None

    def _epoch_batches(
        self, epoch: int, done: PartialEpoch
    ) -> Generator[tuple[Any, Any], None, None]:
        """Yield the remaining batches of an epoch."""
        with (
            progress_bar(self._progress, self._source, epoch, done.n_batches) as update,
            contextlib.ExitStack() as stack,
        ):
            batches = remaining_batches(self._source, done)
            if hasattr(batches, "close"):
                # The reader thread ends with the loop, also after a break.
                stack.callback(batches.close)
            for number, batch in enumerate(batches, done.n_batches):
                done.n_batches = number + 1
                yield pair_of(batch)
                update(self._recorder.loss)
                self._callbacks("on_batch_end", self, number, self._recorder.loss)
                self._recorder.loss = None
                if self._is_stopped:
                    break

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the trainer is closed; make a new one")

    def _require_idle(self, call: str) -> None:
        if self._recorder.is_recording:
            raise ClosedError(
                "another loop over this trainer is running; end that loop, or close() its "
                f"iterator, before calling {call}"
            )


def _is_feeder(loader: Any) -> bool:
    """Return whether a loader yields batches on the device already."""
    return isinstance(loader, (BaseFeeder, Restartable))

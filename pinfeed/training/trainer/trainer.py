"""Trainer: trains a model at once, epoch by epoch, or in a loop of the user's own."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pinfeed.devices import torch_device
from pinfeed.errors import ArgumentError, ClosedError
from pinfeed.feeders.dataloader import LoaderFeeder
from pinfeed.feeders.feeder import Feeder
from pinfeed.feeders.wrap_loader import wrap_loader
from pinfeed.memory import limits
from pinfeed.pipeline.sources.dataloader import check_loader
from pinfeed.training.large_batch.big_batch import BigBatch
from pinfeed.training.large_batch.select import StrategyChoice
from pinfeed.training.large_batch.strategies.micro_batches import as_tensors, n_samples
from pinfeed.training.large_batch.strategy_options import StrategyOptions, check_step
from pinfeed.training.trainer.callbacks import Callbacks, progress_bar
from pinfeed.training.trainer.evaluate import Evaluator, Metrics, check_metrics, pair_of
from pinfeed.training.trainer.history import History
from pinfeed.training.trainer.optimizers import OptimizerGroup
from pinfeed.training.trainer.record import Record
from pinfeed.training.trainer.recorder import Recorder
from pinfeed.training.trainer.step_options import StepOptions
from pinfeed.validation.arguments import check_flag, explain_arguments, whole_number

if TYPE_CHECKING:
    from typing_extensions import Unpack

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
"""Hints for names that other trainers use."""


class Trainer:
    """Trains a model at once, epoch by epoch, or in a loop of the user's own.

    These three are the same:

        trainer.train(1)

        trainer.epoch()

        for inputs, targets in trainer.batches():
            trainer.backward(inputs, targets)
            trainer.step()
            trainer.zero_grad()

    Gradients are those of whole batches, computed by a BigBatch. Without ``config`` and
    ``chunk_size`` that is the plain step, and batches are prefetched to the device. With them,
    batches stay where the loader has them, and their chunks are prefetched.

    The measurements of an epoch are in ``history`` when it has ended; no batch waits for the
    device. The model stays in its training or eval mode.

    This is one class because its methods are the steps of one loop, which all three forms share.

    Args:
        model: The model.
        loss: Function of outputs and targets; targets are None if there are none.
        optimizer: A torch optimizer, or several of different parameters; RowOptimizer too.
        loader: A DataLoader, a Feeder, or another iterable of batches: pairs of inputs and targets,
            or inputs alone, in any structure.
        config: Memory limits, as for BigBatch.
        chunk_size: Samples of a chunk, instead of a limit.
        strategy: Strategy, as for BigBatch.
        prove: Whether strategies are compared with the plain step, as for BigBatch.
        device: Device to which the model is moved; None for its current device.
        callbacks: Objects with some of the methods that ``Callbacks`` names.
        progress: Whether to show a progress bar.
        scheduler: One scheduler, or several. They are stepped after every epoch,
            ReduceLROnPlateau with its mean loss. Step schedulers of batches in a callback.
        clip_norm: Largest norm of all gradients together; larger ones are scaled down before a
            step. None does not clip.
        scaler: A ``torch.amp.GradScaler``.
        autocast: Dtype of autocast for forward passes and losses; None uses no autocast.

    Attributes:
        model: The model.
        loader: The loader.

    Raises:
        ArgumentError: If an argument is invalid, or two arguments conflict.
        DeviceError: If the device does not exist.
    """

    @explain_arguments(_HINTS, options=StepOptions)
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
        device: Any = None,
        callbacks: Iterable[Any] = (),
        progress: bool = False,
        **options: Unpack[StepOptions],
    ) -> None:
        scaler = options["scaler"]
        self._optimizers = OptimizerGroup(
            optimizer, options["scheduler"], options["clip_norm"], scaler
        )
        self._callbacks = Callbacks(callbacks)
        check_flag(progress, "progress")
        check_loader(loader)
        strategy_options = StrategyOptions(config, chunk_size, strategy, options["autocast"], prove)
        if strategy == "auto" and not strategy_options.has_limit:
            strategy_options = dataclasses.replace(strategy_options, strategy="plain")
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
        self._feeder = _prefetched(loader, self._device, strategy_options)
        self._loop_check = self._optimizers.missing_step_check()
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

        The history stays. Further calls do nothing.
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
        """Epochs that have begun."""
        return self._recorder.n_epochs

    @property
    def chosen(self) -> StrategyChoice | None:
        """Strategy of the last batch; None before the first batch."""
        return self._big_batch.chosen

    def train(self, n_epochs: int) -> History:
        """Train for ``n_epochs`` epochs, or until ``stop``, and return the history.

        Raises:
            ArgumentError: If ``n_epochs`` is no whole number, or the loader yields no batch.
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
        # An error that the user keeps would otherwise keep the loop running.
        with contextlib.closing(self.batches()) as batches:
            for batch in batches:
                self.backward(*batch)
                self.step()
                self.zero_grad()
        return self.history.epochs[-1].loss

    def batches(self) -> Generator[tuple[Any, Any], None, None]:
        """Yield inputs and targets of an epoch, for a loop of the user's own.

        Existing gradients are cleared at the beginning.

        Raises:
            ArgumentError: If the loader yields no batch, or one that is no pair.
            ClosedError: If the trainer is closed, or another loop over it is running.
        """
        self._require_open()
        if self._recorder.is_recording:
            raise ClosedError(
                "batches() while another loop over this trainer is running; end it (or close() its "
                "iterator) first"
            )
        self._is_stopped = self._is_training and self._is_stopped
        epoch = self._recorder.begin()
        try:
            self._optimizers.zero_grad()
            self._loop_check.epoch_begins()
            self._callbacks("on_epoch_begin", self, epoch)
            n_batches = yield from self._epoch_batches(epoch)
            if not n_batches and not self._is_stopped:
                raise ArgumentError(
                    f"loader={self.loader!r} gave no batch; expected at least one (an iterator is "
                    "used up after its first epoch, and drop_last leaves nothing of fewer samples "
                    "than a batch)"
                )
            self._loop_check.epoch_ends()
        finally:
            self._recorder.end()
        record = self._recorder.summary()
        self._optimizers.step_schedulers(record.loss)
        self._callbacks("on_epoch_end", self, record)

    def backward(self, inputs: Any, targets: Any = None) -> torch.Tensor:
        """Add the gradients of a batch, and return its loss on the device.

        The loss is recorded in a loop over ``batches``.
        """
        self._require_open()
        n = n_samples(as_tensors(inputs))
        self._loop_check.backward_begins()
        loss = self._big_batch.backward(inputs, targets)
        self._recorder.add(loss, n)
        return loss

    def step(self) -> None:
        """Step the optimizers, with gradients unscaled and clipped if asked for."""
        self._optimizers.step()
        self._loop_check.stepped()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self._optimizers.zero_grad()
        self._loop_check.cleared()

    def stop(self) -> None:
        """End the loop after the current batch, and training with it.

        Callbacks and loops over ``batches`` may call it.
        """
        self._is_stopped = True

    def evaluate(self, loader: Any, metrics: Metrics | None = None) -> dict[str, float]:
        """Return loss and metrics of other batches, in eval mode, without gradients, in chunks.

        Modes are restored afterwards.

        Args:
            loader: A loader as for the Trainer.
            metrics: Functions of the outputs and targets of a batch of the loader, by name.

        Returns:
            ``"loss"``, weighted by the terms of each batch (a sum, if the loss is a sum), and the
            mean of each metric, weighted by samples. They are also in the history.

        Raises:
            ArgumentError: If the loader yields no batches or no samples, ``metrics`` is no dict of
                functions, or a metric has a name of the history's columns.
        """
        check_loader(loader)
        check_metrics(metrics)
        metrics = dict(metrics or {})
        if taken_names := set(metrics) & set(Record.__dataclass_fields__):
            raise ArgumentError(
                f"metrics= has {min(taken_names)!r}, which is a column of the history; give it "
                "another name"
            )
        begin = time.perf_counter()
        evaluator = Evaluator(
            self.model, self._loss, self._device, self._evaluation_size(), self._context
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

    def _epoch_batches(self, epoch: int) -> Generator[tuple[Any, Any], None, int]:
        """Yield the batches of an epoch, and return their number."""
        n_batches = 0
        source = self.loader if self._feeder is None else self._feeder
        with progress_bar(self._progress, source, epoch) as update, contextlib.ExitStack() as stack:
            batches = iter(source)
            if hasattr(batches, "close"):
                # The reader thread ends with the loop, also after a break.
                stack.callback(batches.close)
            for number, batch in enumerate(batches):
                n_batches = number + 1
                yield pair_of(batch)
                update(self._recorder.loss)
                self._callbacks("on_batch_end", self, number, self._recorder.loss)
                self._recorder.loss = None
                if self._is_stopped:
                    break
        return n_batches

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the trainer is closed; make a new one")

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        if self._strategy_options.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._strategy_options.autocast)


def _is_feeder(loader: Any) -> bool:
    """Return whether a loader yields batches on the device already."""
    return isinstance(loader, (Feeder, LoaderFeeder))


def _prefetched(
    loader: Any, device: torch.device, options: StrategyOptions
) -> LoaderFeeder[Any] | None:
    """Return a feeder of the loader's batches; None if batches are prefetched in another way.

    A limit has batches prefetched in chunks, and a feeder prefetches its own batches.
    """
    if options.has_limit or _is_feeder(loader):
        return None
    return wrap_loader(loader, device=device)

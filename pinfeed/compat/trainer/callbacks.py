"""Callbacks: the user's callbacks, and the progress bar."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from pinfeed.errors import ArgumentError

METHODS = ("on_train_begin", "on_epoch_begin", "on_batch_end", "on_epoch_end", "on_train_end")


class Callbacks:
    """Callback objects of a Trainer, called in the order in which the user gave them.

    Pass the objects to ``Trainer(callbacks=...)``. Each object has some of these methods:

    - ``on_train_begin(trainer)``, ``on_train_end(trainer)``: Before and after ``train``; the latter
      is not called after an error.
    - ``on_epoch_begin(trainer, epoch)``: Before an epoch, with its number from 0.
    - ``on_batch_end(trainer, batch, loss)``: After a batch, with its number from 0 and the loss as
      a tensor on the device (None if there was no backward pass).
    - ``on_epoch_end(trainer, row)``: After an epoch, with its Record of the history; not called
      after an error or ``break``.

    Examples:
        >>> from pinfeed.compat.trainer import Trainer
        >>> class PrintLoss:
        ...     def on_epoch_end(self, trainer, row):
        ...         print("epoch", row.epoch, "has ended")
        >>> model = torch.nn.Linear(8, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = [(torch.randn(32, 8), torch.randn(32, 1))]
        >>> loss = torch.nn.MSELoss()
        >>> with Trainer(model, loss, sgd, loader, callbacks=[PrintLoss()]) as trainer:
        ...     history = trainer.train(1)
        epoch 0 has ended

    Args:
        callbacks: The objects.

    Raises:
        ArgumentError: If an object has none of these methods.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        if not isinstance(callbacks, Iterable):
            raise ArgumentError(
                f"callbacks={callbacks!r}: expected a list of objects with some of "
                f"{', '.join(METHODS)}"
            )
        self._callbacks = list(callbacks)
        for callback in self._callbacks:
            methods = [getattr(callback, name, None) for name in METHODS]
            if isinstance(callback, type) or not any(map(callable, methods)):
                raise ArgumentError(
                    f"callbacks= has {callback!r}; expected an object with some of "
                    f"{', '.join(METHODS)}"
                )

    def __call__(self, method: str, *args: Any) -> None:
        """Call a method of each object that has it; errors of the objects propagate."""
        for callback in self._callbacks:
            if (found := getattr(callback, method, None)) is not None:
                found(*args)


@contextlib.contextmanager
def progress_bar(
    shown: bool, source: Any, epoch: int, n_done: int
) -> Iterator[Callable[[torch.Tensor | None], None]]:
    """Show the progress of an epoch.

    The bar shows the loss only on the CPU, because reading it from a GPU would wait for the device.

    Args:
        shown: Whether there is a bar.
        source: The batches; the bar shows their number if ``len(source)`` exists.
        epoch: Number of the epoch.
        n_done: Number of batches of the epoch that are done.

    Yields:
        A function to call after every batch, with its loss.
    """
    if not shown:
        yield lambda loss: None
        return
    from tqdm.auto import tqdm

    try:
        total = len(source)
    except TypeError:
        total = None

    def update(loss: torch.Tensor | None) -> None:
        if loss is not None and loss.device.type == "cpu":
            bar.set_postfix(loss=f"{loss.item():.4g}", refresh=False)
        bar.update()

    with tqdm(total=total, initial=n_done, unit="batch", desc=f"epoch {epoch}") as bar:
        yield update

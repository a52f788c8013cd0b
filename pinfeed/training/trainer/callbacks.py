"""What is called while training goes on: the user's callbacks, and a progress bar."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from pinfeed.errors import ArgumentError

METHODS = ("on_train_begin", "on_epoch_begin", "on_batch_end", "on_epoch_end", "on_train_end")


class Callbacks:
    """Objects that have some of these methods; each is called with the Trainer, in the order in which they were given.

    - ``on_train_begin(trainer)``, ``on_train_end(trainer)``: of ``train``; the latter not after an
      error.
    - ``on_epoch_begin(trainer, epoch)``: with its number.
    - ``on_batch_end(trainer, batch, loss)``: with its number, and the loss as a tensor on the
      device (None if there was no backward pass).
    - ``on_epoch_end(trainer, row)``: with its Row of the history. Not after an error or ``break``.

    Raises:
        ArgumentError: One has none of them.
    """

    def __init__(self, callbacks: Iterable[Any]) -> None:
        if not isinstance(callbacks, Iterable):
            raise ArgumentError(
                f"callbacks={callbacks!r}: expected a list of objects with some of {', '.join(METHODS)}"
            )
        self._callbacks = list(callbacks)
        for callback in self._callbacks:
            if isinstance(callback, type) or not any(
                callable(getattr(callback, name, None)) for name in METHODS
            ):
                raise ArgumentError(
                    f"callbacks= has {callback!r}; expected an object with some of {', '.join(METHODS)}"
                )

    def __call__(self, method: str, *args: Any) -> None:
        """Call a method of each that has it. Their errors are the caller's."""
        for callback in self._callbacks:
            if (found := getattr(callback, method, None)) is not None:
                found(*args)


@contextlib.contextmanager
def progress_bar(
    shown: bool, source: Any, epoch: int
) -> Iterator[Callable[[torch.Tensor | None], None]]:
    """Of an epoch; gives what is called after every batch, with its loss.

    The loss is shown where it is at hand, on the CPU: to read it from a GPU would wait for that.
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

    with tqdm(total=total, unit="batch", desc=f"epoch {epoch}") as bar:
        yield update

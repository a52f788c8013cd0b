"""Containers of an InfinityBatch: the tensors of the last batch and the losses of all batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pinfeed.tensors.pytree import flatten


class LastOnly(list[Any]):
    """A list that keeps only the value that was appended last."""

    def append(self, value: Any) -> None:
        """Replace the value by this one."""
        self[:] = [value]


class Containers:
    """Inputs, outputs and targets of the last batch, and the losses of all batches, by epoch."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.targets: list[Any] = []
        self._losses: list[list[tuple[float, int]]] = []
        self._unread: list[tuple[torch.Tensor, int]] = []

    def clear(self) -> None:
        """Clear all containers. A running loop continues in a new epoch."""
        for container in (self.inputs, self.outputs, self.targets, self._losses, self._unread):
            container.clear()

    def begin_epoch(self) -> None:
        """Begin an epoch, and drop the batch of the previous one."""
        self.read_losses()
        for container in (self.inputs, self.outputs, self.targets):
            for ended in container:
                ended.clear()
            container.append(LastOnly())
        self._losses.append([])

    @property
    def is_fresh(self) -> bool:
        """Whether the current epoch has begun and had no batch yet."""
        return bool(self.inputs) and not (self.inputs[-1] or self._losses[-1] or self._unread)

    def add_loss(self, loss: torch.Tensor, n: int) -> None:
        """Add the loss of a batch of ``n`` samples."""
        self._unread.append((loss.detach().reshape(()), n))

    def read_losses(self) -> list[list[tuple[float, int]]]:
        """Return the losses as numbers, with the sizes of their batches, by epoch.

        Reading a loss waits for its device. Losses are therefore read only here: when the user
        reads ``losses`` or when an epoch ends.
        """
        if self._unread:
            values = torch.stack([loss.double() for loss, _ in self._unread]).tolist()
            self._losses[-1] += [
                (value, n) for value, (_, n) in zip(values, self._unread, strict=True)
            ]
        self._unread = []
        return self._losses

    def detach_outputs(self) -> None:
        """Detach the outputs, to free the graph of the last backward pass."""
        for outputs in self.outputs[-1]:
            leaves, rebuild = flatten(outputs)
            values = [leaf for _, leaf in leaves]
            self.outputs[-1].append(
                rebuild(
                    leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in values
                )
            )


class RecordedLoader:
    """A dataloader whose batches are recorded in the containers."""

    def __init__(self, containers: Containers, loader: Any) -> None:
        self.containers = containers
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        # epochstart_ may have been called for this loop already.
        if not self.containers.is_fresh:
            self.containers.begin_epoch()
        for batch in self.loader:
            # The training step may have cleared the containers.
            if not self.containers.inputs:
                self.containers.begin_epoch()
            is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
            self.containers.inputs[-1].append(batch[0] if is_pair else batch)
            if is_pair:
                self.containers.targets[-1].append(batch[1])
            yield batch

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":
            # The attribute is not set yet, or belongs to a protocol that is not the loader's.
            raise AttributeError(name)
        return getattr(self.loader, name)

"""What an InfinityBatch remembers: the last batch, and all losses, as numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pinfeed.tensors.pytree import flatten


class Last(list[Any]):
    """Keeps what was appended last, and nothing else."""

    def append(self, value: Any) -> None:
        """Keep this."""
        self[:] = [value]


class Containers:
    """By epoch: inputs, outputs and targets of the last batch, and the losses of all batches."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.targets: list[Any] = []
        self._losses: list[list[tuple[float, int]]] = []
        self._unread: list[tuple[torch.Tensor, int]] = []

    def clear(self) -> None:
        """Forget everything; a loop that runs goes on in a new epoch."""
        for container in (self.inputs, self.outputs, self.targets, self._losses, self._unread):
            container.clear()

    def begin_epoch(self) -> None:
        """The batches of the last one are let go."""
        self.read_losses()
        for container in (self.inputs, self.outputs, self.targets):
            for ended in container:
                ended.clear()
            container.append(Last())
        self._losses.append([])

    @property
    def is_fresh(self) -> bool:
        """Whether an epoch has begun that had no batch."""
        return bool(self.inputs) and not (self.inputs[-1] or self._losses[-1] or self._unread)

    def add_loss(self, loss: torch.Tensor, n: int) -> None:
        """Of a batch of so many samples."""
        self._unread.append((loss.detach().reshape(()), n))

    def read_losses(self) -> list[list[tuple[float, int]]]:
        """Losses become numbers when they are asked for, or when the epoch ends: to read one waits for its device."""
        if self._unread:
            values = torch.stack([loss.double() for loss, _ in self._unread]).tolist()
            self._losses[-1] += [
                (value, n) for value, (_, n) in zip(values, self._unread, strict=True)
            ]
        self._unread = []
        return self._losses

    def detach_outputs(self) -> None:
        """Let go of what the last backward pass needed."""
        for outputs in self.outputs[-1]:
            leaves, rebuild = flatten(outputs)
            self.outputs[-1].append(
                rebuild(
                    leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for _, leaf in leaves
                )
            )


class Watched:
    """A dataloader whose batches the containers see."""

    def __init__(self, containers: Containers, loader: Any) -> None:
        self.containers = containers
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        if not self.containers.is_fresh:
            # Else epochstart_ was called for this loop.
            self.containers.begin_epoch()
        for batch in self.loader:
            if not self.containers.inputs:
                # Cleared in the body of the loop.
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
            # Not made yet, or a protocol that the loader must not answer for this object.
            raise AttributeError(name)
        return getattr(self.loader, name)

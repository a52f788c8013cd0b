"""Record: measurements of a backward pass, an epoch, or an evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Record:
    """Measurements of a backward pass, an epoch, or an evaluation.

    Examples:
        >>> model = torch.nn.Linear(8, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = [(torch.randn(32, 8), torch.randn(32, 1)) for _ in range(5)]
        >>> with pinfeed.Trainer(model, torch.nn.MSELoss(), sgd, loader) as trainer:
        ...     record = trainer.train(2).epochs[-1]
        >>> record.epoch, record.samples
        (1, 160)

    Attributes:
        kind: ``"batch"`` for a backward pass, ``"epoch"`` or ``"evaluation"``.
        epoch: Number of the epoch, from 0; for an evaluation, the epochs begun before it.
        batch: Number of the backward pass in its epoch, from 0; None for the other kinds.
        loss: Loss of the batch or of the evaluation; for an epoch, the mean over its batches,
            weighted by samples.
        samples: Number of samples.
        seconds: Time on the host, without work that the device has not finished. The time of a
            backward pass begins at the end of the previous one, or at the beginning of the epoch.
        allocated_bytes: Memory of torch's tensors on the device at the end; None on the CPU.
        peak_bytes: Largest such memory since torch's peak was last reset; None on the CPU.
        host_bytes: Resident memory of the process at the end; None if the system does not
            report it.
        metrics: Metrics of an evaluation, by name.
    """

    kind: Literal["batch", "epoch", "evaluation"]
    epoch: int
    batch: int | None
    loss: float
    samples: int
    seconds: float
    allocated_bytes: int | None
    peak_bytes: int | None
    host_bytes: int | None
    metrics: Mapping[str, float] = field(default_factory=dict)


COLUMNS = tuple(one.name for one in dataclasses.fields(Record) if one.name != "metrics")

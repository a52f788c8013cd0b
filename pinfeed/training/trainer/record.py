"""Record: measurements of a backward pass, an epoch, or an evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Record:
    """Measurements of a backward pass, an epoch, or an evaluation.

    Attributes:
        kind: Which of these it is.
        epoch: Number of the epoch, from 0; for an evaluation, the epochs begun before it.
        batch: Number of the backward pass in its epoch, from 0; None for the others.
        loss: Loss of the batch; for an epoch, the mean over its batches, weighted by samples.
        samples: Number of samples.
        seconds: Time on the host: of a backward pass since the one before it or the beginning of
            the epoch; of an epoch or an evaluation since its beginning. Work that the device has
            not finished is not included.
        allocated_bytes: Memory of torch's tensors on the device at the end; None on the CPU.
        peak_bytes: Largest such memory since torch's peak was last reset; None on the CPU.
        host_bytes: Resident memory of the process at the end; None if the system does not tell it.
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

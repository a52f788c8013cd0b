"""Bottleneck: the part of the pipeline that the others wait for, with one piece of advice each."""

from __future__ import annotations

from typing import Literal

Stage = Literal["reading", "host_transform", "copying", "device_transform"]
"""Work on a batch before the loop receives it."""

Bottleneck = Literal[Stage, "computing", "writing", "overhead", "unevenness", "start"]
"""The part of the pipeline that the others wait for.

``overhead``: batches are ready in time, but pinfeed takes long to hand them over. ``unevenness``:
some batches take longer than others. ``start``: loops are short, and their first batch cannot be
prefetched.
"""

STAGES: dict[Stage, str] = {
    "reading": "read_s",
    "host_transform": "host_transform_s",
    "copying": "copy_wait_s",
    "device_transform": "device_transform_s",
}
"""Field of ``FeederStats`` with the time of each stage."""

NOTABLE = 0.05
"""Share of the time; a loop that waits for less computes as fast as it can."""

CAUSES: dict[Bottleneck, str] = {
    "computing": "computing is the bottleneck",
    "reading": "reading is the bottleneck",
    "host_transform": "host_transform is the bottleneck",
    "copying": "copying to the device is the bottleneck",
    "device_transform": "device_transform is the bottleneck",
    "writing": "writing back is the bottleneck",
    "overhead": "pinfeed's own work on each batch is the bottleneck",
    "unevenness": "some batches are late, although reading is fast enough on average",
    "start": "the first batch of each loop cannot be prefetched",
}

ADVICE: dict[Bottleneck, str] = {
    "computing": "faster data would gain nothing",
    "reading": "read fewer bytes, read files in blocks of rows, or use more threads; threads take "
    "turns in Python code, which holds the interpreter's lock, so use worker processes of a "
    "DataLoader for it",
    "host_transform": "make it cheaper, raise transform_threads, or do its work before training",
    "copying": "copy fewer bytes, for example uint8 that device_transform converts, or make a "
    "device_transform cheaper, because copies wait for it",
    "device_transform": "make it cheaper, or do its work before training",
    "writing": "write fewer values, or keep the rows in memory instead of a file",
    "overhead": "use larger batches",
    "unevenness": "raise depth, which keeps more batches ready",
    "start": "run longer loops, or let the next epoch begin early with continuous=True",
}

WITHOUT_PREFETCHING = "compare depth=2, which does this work during the training step"
"""Advice for a loop with ``depth=0`` that waits for a stage."""

"""``pinfeed plan``: the plan of a feeder over files, made by the feeder itself."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import asdict
from typing import Any

from pinfeed.cli.inspect import Report, source_of
from pinfeed.errors import ArgumentError, StoreError
from pinfeed.feeders.feeder import Feeder
from pinfeed.memory.limits import MemoryLimits
from pinfeed.memory.plan import Plan
from pinfeed.memory.units import human
from pinfeed.rows.blocks import block_shuffled
from pinfeed.stores.chunked_array import ChunkedArray
from pinfeed.stores.formats import Part
from pinfeed.stores.npy_store import NpyStore
from pinfeed.validation.messages import wrapped

_BATCH_BYTES = 16 << 20
_BATCH_ROWS = 1024

Numbers = int | tuple[int, ...]
"""One number, or one for each of several axes."""


def plan(options: argparse.Namespace) -> Report:
    """Report the plan that a feeder over files would have.

    Args:
        options: The options of the command.

    Raises:
        PinfeedError: If a file cannot be read, or the plan does not fit the limits.
    """
    part = source_of(options.files)
    axis, length, batch_size = options.axis or 0, options.length, options.batch_size
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(contextlib.closing(part.open()))
        if length is not None:
            source = stack.enter_context(contextlib.closing(_windows(source, axis, length)))
        elif options.axis is not None:
            raise ArgumentError("--axis needs --length, the number of indices of a window")
        device, remarks = _device(options.gpu_limit)
        size: dict[str, Any] = {"batch_size": batch_size or usual_batch(source)}
        if options.cpu_limit is not None or options.gpu_limit is not None:
            limits = MemoryLimits(
                cpu_memory_limit=options.cpu_limit,
                gpu_memory_limit=options.gpu_limit,
                preferred_batch_size=batch_size,
            )
            size = {"config": limits}
        rows = None
        if options.block_rows is not None:
            rows = block_shuffled(block_rows=options.block_rows)
        feeder = Feeder(source, rows=rows, shuffle=options.shuffle, device=device, **size)
        made = stack.enter_context(feeder).plan
        name = feeder.device
        n_rows = source.n_rows
    if batch_size is not None and made.batch_size < min(batch_size, n_rows):
        remarks.append(f"Batches of {batch_size:,} rows do not fit the limits.")
    values = {"source": part.values, "rows": n_rows, "device": name, "plan": plan_values(made)}
    head = described(part)
    if length is not None:
        head += f"; {n_rows:,} windows of length {length} along axis {axis}"
    lines = [wrapped(head, rest="  "), f"device: {name}", str(made), *map(wrapped, remarks)]
    return Report(values | {"remarks": remarks}, "\n".join(lines))


def usual_batch(store: Any) -> int:
    """Return the rows of a batch if the user gives none: up to 1,024 rows and 16 MiB."""
    row_nbytes = store.mean_row_nbytes if hasattr(store, "mean_row_nbytes") else store.row_nbytes
    return max(1, min(_BATCH_ROWS, int(_BATCH_BYTES / max(1, row_nbytes))))


def described(part: Part) -> str:
    """Describe a source in words."""
    stored = part.stored or part.kind
    if part.kind not in stored:
        stored = f"{part.kind}, {stored}"
    return f"{part}: shape {part.shape}, {part.dtype}, {human(part.nbytes)}, {stored}"


def plan_values(made: Plan) -> dict[str, Any]:
    """Describe a plan for scripts."""
    sums = ("host_bytes", "pinned_bytes", "page_cache_bytes", "device_bytes")
    return {
        **asdict(made),
        "items": [{**asdict(item), "total": item.total} for item in made.items],
        **{name: getattr(made, name) for name in sums},
    }


def _windows(store: Any, axis: Numbers, length: Numbers) -> Any:
    """Return windows along axes of a source, which must stay open."""
    if isinstance(store, ChunkedArray):
        return store.windows(axis, length=length)
    if isinstance(store, NpyStore):
        return NpyStore.windows(store.paths, axis=axis, length=length)
    raise StoreError(
        f"{store.label} has no windows along axes; expected an HDF5, Zarr or local .npy file; "
        "leave out --length"
    )


def _device(gpu_limit: int | None) -> tuple[Any, list[str]]:
    """Return the device to plan for, with remarks; with a limit, a GPU or a stand-in for one."""
    import torch

    if gpu_limit is None:
        return "auto", []
    if torch.cuda.is_available():
        return "cuda", []
    from pinfeed.devices.cpu import PlannedGpu

    remark = "This machine has no GPU. The plan is for one with a GPU, and the same host memory."
    return PlannedGpu(), [remark]

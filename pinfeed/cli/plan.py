"""``pinfeed plan``: the plan of a feeder over files, made by the feeder itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pinfeed.cli.orders import OrderOptions
from pinfeed.cli.planned_rows import planned_rows
from pinfeed.cli.report import Report, facts, sections, table
from pinfeed.cli.sources import usual_batch
from pinfeed.errors import BudgetError
from pinfeed.feeders.feeder import Feeder
from pinfeed.memory.limits import MemoryLimits
from pinfeed.memory.plan import Plan, joined
from pinfeed.memory.units import human
from pinfeed.readahead.select import BLOCKS_ALLOW
from pinfeed.readahead.strategy import usual_block_rows
from pinfeed.validation.wrapping import wrapped

_PLACES = {
    "host": "host",
    "pinned": "host, page-locked",
    "page cache": "page cache",
    "device": "device",
}


def plan(
    files: Sequence[str],
    *,
    others: Sequence[str],
    batch_size: int | None,
    options: OrderOptions,
    gpu_limit: int | None,
    cpu_limit: int | None,
    depth: int | None,
    device: str,
) -> Report:
    """Report the plan that a feeder over files would have.

    The arguments are the options of the command; ``options`` are those for rows and their order.

    Returns: The plan; with a finding if it, or the requested batch size, does not fit.
    """
    target, remarks = _device(device)
    with planned_rows(files, others, batch_size, options) as found:
        values = {**found.values, "order": found.name, "device": None, "plan": None}
        values["remarks"] = remarks
        is_limited = cpu_limit is not None or (gpu_limit is not None and not _is_cpu(target))
        size = found.batch_size
        if not found.makes_batches and (options.world_size is not None or not is_limited):
            # All ranks need a size before the limits of one rank are known.
            size = size or usual_batch(found.row_nbytes)
        arguments: dict[str, Any] = {"batch_size": size}
        if is_limited:
            limits = MemoryLimits(
                cpu_memory_limit=cpu_limit,
                gpu_memory_limit=gpu_limit,
                preferred_batch_size=size,
            )
            arguments = {"config": limits}
        try:
            with Feeder(
                found.source,
                rows=found.rows,
                ranks=options.ranks,
                depth=depth,
                device=target,
                **arguments,
            ) as feeder:
                made = feeder.plan
                name = feeder.device
        except BudgetError as error:
            return Report(values, found.head, (f"the plan does not fit: {error}",))
    if batch_size is None and size is not None:
        remarks.append(
            f"Without --batch-size{'' if is_limited else ' or a limit'}, the plan uses batches of "
            f"{made.batch_size:,} rows."
        )
    # Blocks help only rows that the order reads as they are in the files.
    block_nbytes = None if options.weights or options.by_length else found.longest_nbytes
    remarks += _remarks(made, name, block_nbytes, gpu_limit=gpu_limit)
    values |= {"device": name, "plan": plan_values(made)}
    parts = {
        found.head: _text(made, found.name, found.shares, name),
        "Remarks": "\n".join(wrapped(f"- {remark}", rest="  ") for remark in remarks),
    }
    findings: tuple[str, ...] = ()
    if size is not None and made.batch_size < min(size, found.n_rows // (options.world_size or 1)):
        fit = f"{made.batch_size:,} rows fit"
        findings = (f"batches of {size:,} rows do not fit the limits; {fit}",)
    return Report(values, sections(parts), findings)


def _remarks(
    made: Plan, device: str, row_nbytes: float | None, *, gpu_limit: int | None
) -> list[str]:
    """Say whether the order is slow, or a limit has no effect.

    Args:
        made: The plan.
        device: Name of the device.
        row_nbytes: Bytes of a row that decide the size of blocks; None if blocks do not help.
        gpu_limit: The user's limit of GPU memory.
    """
    remarks = []
    if row_nbytes is not None and any(note.endswith(BLOCKS_ALLOW) for note in made.notes):
        block_rows = usual_block_rows(row_nbytes)
        remarks.append(
            "Random rows of a file that is not in memory are read slowly. With --block-rows "
            f"{block_rows}, the order visits contiguous blocks, which are read in long runs."
        )
    if gpu_limit is not None and not made.device_bytes:
        remarks.append(
            f"Batches stay in host memory ({device}), so --gpu-limit has no effect. Use --device "
            "cuda to plan for a GPU."
        )
    return remarks


def _device(name: str) -> tuple[Any, list[str]]:
    """Return the device to plan for, with remarks; without a GPU, return a stand-in for one."""
    import torch

    if name != "cuda" or torch.cuda.is_available():
        return name, []
    from pinfeed.devices.cpu import PlannedGpu

    remark = (
        "This machine has no GPU. The plan is for a machine with a GPU and the same memory and "
        "cores."
    )
    return PlannedGpu(), [remark]


def _is_cpu(device: Any) -> bool:
    """Return whether batches are in host memory, so a GPU limit must not choose their size."""
    import torch

    if device == "auto":
        return not torch.cuda.is_available()
    return isinstance(device, str) and device.startswith("cpu")


def plan_values(made: Plan) -> dict[str, Any]:
    """Describe a plan for scripts."""
    sums = ("n_slots", "host_bytes", "pinned_bytes", "page_cache_bytes", "device_bytes")
    return {
        **asdict(made),
        "items": [{**asdict(item), "total": item.total} for item in made.items],
        **{name: getattr(made, name) for name in sums},
    }


def _text(made: Plan, order_name: str, shares: Sequence[tuple[str, str]], device: str) -> str:
    items = [
        (_PLACES[item.place], item.what, f"{item.count:,}", human(item.nbytes), human(item.total))
        for item in sorted(joined(made.items), key=lambda item: list(_PLACES).index(item.place))
    ]
    host = human(made.host_bytes) + _limit(made.cpu_memory_limit)
    if made.pinned_bytes:
        host += f", {human(made.pinned_bytes)} of it page-locked (pinned)"
    gpu = human(made.device_bytes) + _limit(made.gpu_memory_limit)
    pairs = [
        ("batches", f"up to {made.batch_size:,} rows, {order_name}, {made.depth_in_words}"),
        *shares,
        ("device", f"{device}, {made.route_in_words}"),
        ("host", host),
        ("GPU", gpu if made.device_bytes else ""),
        *(("rows" if i == 0 else "", note) for i, note in enumerate(made.notes)),
    ]
    shown = table(items, ("where", "what", "count", "each", "total"), "llrrr")
    return f"{facts(pairs)}\n\n{shown}"


def _limit(limit: int | None) -> str:
    return "" if limit is None else f" (limit {human(limit)})"

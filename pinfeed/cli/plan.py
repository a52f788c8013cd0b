"""``pinfeed plan``: the plan of a feeder over files, made by the feeder itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pinfeed.cli.report import Report, facts, sections, table
from pinfeed.cli.sources import (
    all_described,
    open_sources,
    order_of,
    row_nbytes_of,
    source_of,
    sources_values,
    usual_batch,
)
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
    shuffle: bool,
    block_rows: int | None,
    seed: int | None,
    gpu_limit: int | None,
    cpu_limit: int | None,
    depth: int | None,
    device: str,
) -> Report:
    """Report the plan that a feeder over files would have.

    The arguments are the options of the command.

    Returns: The plan; with a finding if it, or the requested batch size, does not fit.
    """
    order, order_name = order_of(shuffle, block_rows, seed)
    target, remarks = _device(device)
    with open_sources(files, others) as stores:
        n_rows = stores[0].n_rows
        head = all_described(stores)
        values = sources_values(stores) | {"order": order_name, "device": None, "plan": None}
        values["remarks"] = remarks
        source = source_of(stores)
        arguments: dict[str, Any]
        if cpu_limit is None and (gpu_limit is None or _is_cpu(target)):
            arguments = {"batch_size": batch_size or usual_batch(row_nbytes_of(stores))}
        else:
            limits = MemoryLimits(
                cpu_memory_limit=cpu_limit,
                gpu_memory_limit=gpu_limit,
                preferred_batch_size=batch_size,
            )
            arguments = {"config": limits}
        try:
            with Feeder(source, rows=order, depth=depth, device=target, **arguments) as feeder:
                made = feeder.plan
                name = feeder.device
        except BudgetError as error:
            return Report(values, head, (f"the plan does not fit: {error}",))
        # Long runs of the largest rows matter most.
        row_nbytes = max(store.row_nbytes for store in stores)
    is_default = batch_size is None and "batch_size" in arguments
    remarks += _remarks(made, name, row_nbytes, is_default=is_default, gpu_limit=gpu_limit)
    values |= {"device": name, "plan": plan_values(made)}
    parts = {
        head: _text(made, order_name, name),
        "Remarks": "\n".join(wrapped(f"- {remark}", rest="  ") for remark in remarks),
    }
    findings: tuple[str, ...] = ()
    if batch_size is not None and made.batch_size < min(batch_size, n_rows):
        fit = f"{made.batch_size:,} rows fit"
        findings = (f"batches of {batch_size:,} rows do not fit the limits; {fit}",)
    return Report(values, sections(parts), findings)


def _remarks(
    made: Plan, device: str, row_nbytes: int, *, is_default: bool, gpu_limit: int | None
) -> list[str]:
    """Say which batch size is the default, whether the order is slow, or a limit has no effect."""
    remarks = []
    if is_default:
        remarks.append(
            f"Without --batch-size or a limit, the plan uses batches of {made.batch_size:,} rows."
        )
    if any(note.endswith(BLOCKS_ALLOW) for note in made.notes):
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


def _text(made: Plan, order_name: str, device: str) -> str:
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
        ("device", f"{device}, {made.route_in_words}"),
        ("host", host),
        ("GPU", gpu if made.device_bytes else ""),
        *(("rows" if i == 0 else "", note) for i, note in enumerate(made.notes)),
    ]
    shown = table(items, ("where", "what", "count", "each", "total"), "llrrr")
    return f"{facts(pairs)}\n\n{shown}"


def _limit(limit: int | None) -> str:
    return "" if limit is None else f" (limit {human(limit)})"

"""``pinfeed plan``: the plan of a feeder over files, made by the feeder itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pinfeed.cli.terminal.options import order_of
from pinfeed.cli.terminal.output import Report, facts, sections, table, wrapped
from pinfeed.cli.terminal.sources import (
    all_described,
    open_sources,
    row_nbytes_of,
    source_of,
    sources_values,
    usual_batch,
)
from pinfeed.errors import BudgetError
from pinfeed.feeders.feeder import Feeder
from pinfeed.memory.limits import MemoryLimits
from pinfeed.memory.plan import Plan
from pinfeed.memory.units import human

_PLACES = {"host": "host", "pinned": "host, page-locked", "device": "device"}


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
    """The plan that a feeder over these files would have; a finding, if it does not fit, or not with the batch that was wanted."""
    order, order_name = order_of(shuffle, block_rows, seed)
    target, remarks = _device(device)
    with open_sources(files, others) as stores:
        values = {
            **sources_values(stores),
            "order": order_name,
            "device": None,
            "plan": None,
            "remarks": remarks,
        }
        head = all_described(stores)
        if cpu_limit is None and gpu_limit is None:
            size = batch_size or usual_batch(row_nbytes_of(stores))
            if batch_size is None:
                remarks.append(
                    f"Neither --batch-size nor a limit was given: {size:,} rows were taken for a batch."
                )
            arguments: dict[str, Any] = {"batch_size": size}
        else:
            config = MemoryLimits(
                cpu_memory_limit=cpu_limit,
                gpu_memory_limit=gpu_limit,
                preferred_batch_size=batch_size,
            )
            arguments = {"config": config}
        try:
            with Feeder(
                source_of(stores), rows=order, depth=depth, device=target, **arguments
            ) as feeder:
                made, name = feeder.plan, feeder.device
        except BudgetError as error:
            return Report(values, head, (f"it does not fit: {error}",))
        if gpu_limit is not None and not made.device_bytes:
            remarks.append(
                f"Batches live in host memory ({name}): --gpu-limit was not needed. --device cuda plans for a GPU."
            )
        findings: tuple[str, ...] = ()
        if batch_size is not None and made.batch_size < min(batch_size, stores[0].n_rows):
            findings = (
                f"batches of {batch_size:,} rows were wanted; the limits hold {made.batch_size:,}",
            )
        values |= {"device": name, "plan": plan_values(made)}
        parts = {
            head: _text(made, order_name, name),
            "Remarks": "\n".join(wrapped(f"- {remark}", rest="  ") for remark in remarks),
        }
        return Report(values, sections(parts), findings)


def _device(name: str) -> tuple[Any, list[str]]:
    """The device to plan for; a description of a GPU where one is wanted and none is here."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        from pinfeed.devices.planned_gpu import PlannedGpu

        return PlannedGpu(), [
            "There is no GPU here: this is the plan for a machine that has one, and otherwise this machine's memory and cores."
        ]
    return name, []


def plan_values(made: Plan) -> dict[str, Any]:
    """A plan for scripts."""
    items = [{**asdict(item), "total": item.total} for item in made.items]
    totals = {
        name: getattr(made, name)
        for name in ("n_slots", "host_bytes", "pinned_bytes", "device_bytes")
    }
    return {**asdict(made), "items": items, **totals}


def _text(made: Plan, order_name: str, device: str) -> str:
    items = [
        (_PLACES[item.place], item.what, f"{item.count:,}", human(item.nbytes), human(item.total))
        for item in sorted(made.items, key=lambda item: list(_PLACES).index(item.place))
    ]
    pairs = [
        ("batches", f"{made.batch_size:,} rows, {order_name}, {made.depth} ahead of the loop"),
        ("device", f"{device}, {made.route} route"),
        ("host", f"{human(made.host_bytes)}{_of(made.cpu_memory_limit)}" + _locked(made)),
        (
            "GPU",
            f"{human(made.device_bytes)}{_of(made.gpu_memory_limit)}" if made.device_bytes else "",
        ),
        *(("rows" if i == 0 else "", note) for i, note in enumerate(made.notes)),
    ]
    return (
        f"{facts(pairs)}\n\n{table(items, ('where', 'what', 'count', 'each', 'in all'), 'llrrr')}"
    )


def _locked(made: Plan) -> str:
    return f", of it page-locked {human(made.pinned_bytes)}" if made.pinned_bytes else ""


def _of(limit: int | None) -> str:
    return "" if limit is None else f" of {human(limit)}"

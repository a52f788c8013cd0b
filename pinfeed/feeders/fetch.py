"""FetchStores: the stores behind ``fetch=`` of ``wrap_loader``, opened, planned and closed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from pinfeed.devices.base import Device
from pinfeed.errors import ArgumentError
from pinfeed.memory.limits import MemoryLimits
from pinfeed.memory.plan import Plan
from pinfeed.pipeline.planner import plan_reads_by_id
from pinfeed.pipeline.schedule import PrefetchSchedule, measured_schedule, n_id_readers
from pinfeed.pipeline.sources.fetch import FetchSpec, RowFetch
from pinfeed.pipeline.sources.ids import ids_function
from pinfeed.pipeline.store_tree import StoreTree
from pinfeed.stores.store import Store


class FetchStores:
    """Stores of the rows whose ids are in the batches of a loader.

    Args:
        fetch: For each key a pair of a source, as for ``Feeder``, and of the ids of a batch: a key
            of the batch or a function of the batch.
        config: Memory limits for the rows of files; None is the free memory.

    Raises:
        ArgumentError: If ``fetch`` is no such mapping, ``config`` is no ``pinfeed.Config``, or a
            source has ragged rows.
        StoreError: If a source cannot be read.
        NotEnoughCPUMemory: If the limits cannot hold the chunks that reading needs.
    """

    def __init__(self, fetch: Any, config: MemoryLimits | None) -> None:
        pairs = _checked_pairs(fetch)
        if config is not None and not isinstance(config, MemoryLimits):
            raise ArgumentError(f"config={config!r}: expected a pinfeed.Config")
        self._limit = None if config is None else config.cpu_memory_limit
        self._route = ""
        with contextlib.ExitStack() as stack:
            trees = []
            for key, (source, _) in pairs.items():
                trees.append(StoreTree(source, f"fetch[{key!r}]"))
                stack.callback(trees[-1].close)
                if trees[-1].ragged:
                    raise ArgumentError(
                        f"fetch[{key!r}] has a RaggedStore; expected rows of one shape; pad the "
                        "rows to one length, or give the RaggedStore to a Feeder"
                    )
            self.stores: list[Store] = [store for tree in trees for store in tree.stores]
            self._read_plan = plan_reads_by_id(self.stores, config)
            for strategy in self._read_plan.strategies:
                stack.callback(strategy.close)
            strategies = iter(self._read_plan.strategies)
            self._specs = [
                FetchSpec(
                    key,
                    ids_function(ids, f"fetch[{key!r}]"),
                    tree.stores,
                    [next(strategies) for _ in tree.stores],
                    tree.rebuild,
                )
                for (key, (_, ids)), tree in zip(pairs.items(), trees, strict=True)
            ]
            self._opened = stack.pop_all()

    @property
    def is_limited(self) -> bool:
        """Whether the host memory has a limit."""
        return self._limit is not None

    def schedule(self, depth: int | None) -> PrefetchSchedule:
        """Return the schedule of a loop, which may measure its depth if ``depth`` is None."""
        schedule = measured_schedule() if depth is None else PrefetchSchedule(depth)
        return dataclasses.replace(schedule, n_readers=n_id_readers(schedule.depth))

    def on(self, device: Device) -> RowFetch:
        """Return the RowFetch that adds the rows to batches on a device.

        Call it before the loop takes streams of the device.
        """
        self._route = device.choose_route(self.stores, 0, None)
        return RowFetch(self._specs, device)

    def plan(self, depth: int, device: Device) -> Plan:
        """Return the memory that the rows of files take, without that of the batches."""
        return Plan(
            0,
            depth,
            "direct" if all(map(device.reaches, self.stores)) else "staged",
            self._read_plan.items,
            self._limit,
            notes=(*[self._route] * bool(self._route), *self._read_plan.notes),
        )

    def close(self) -> None:
        """Close the stores that were opened here. A second call does nothing."""
        self._opened.close()


def _checked_pairs(fetch: Any) -> dict[Any, tuple[Any, Any]]:
    """Return the user's ``fetch`` as a dict, if it maps keys to pairs."""
    expected = (
        "expected a dict such as {'x': (source, ids)}, where ids is a key of the batch or a "
        "function of the batch"
    )
    if not isinstance(fetch, Mapping) or not fetch:
        raise ArgumentError(f"fetch={fetch!r}; {expected}")
    for key, pair in fetch.items():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ArgumentError(f"fetch[{key!r}] is a {type(pair).__name__}; {expected}")
    return {key: (source, ids) for key, (source, ids) in fetch.items()}

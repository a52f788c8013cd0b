"""The caches of a loop's tables: their sizes and their memory."""

from __future__ import annotations

from collections.abc import Sequence

from pinfeed.devices.device import Device
from pinfeed.errors import ArgumentError, BudgetError
from pinfeed.memory.host import free_host_bytes
from pinfeed.memory.limits import MemoryLimits
from pinfeed.memory.plan import Allocation, Place
from pinfeed.memory.units import human
from pinfeed.native.library import library, why_not
from pinfeed.pipeline.row_cache import RowCache
from pinfeed.stores import ArrayStore
from pinfeed.training.embeddings.table_arguments import check_device_cache
from pinfeed.training.memory_model.config import Config
from pinfeed.training.row_loop.loop_table import LoopTable

# Share of the remaining memory for caches of size "auto". The rest is for the rows of the batches,
# because their number is unknown before the loader yields the batches.
_AUTO_SHARE = 0.75


def row_caches(
    tables: Sequence[LoopTable], device: Device, config: MemoryLimits | None
) -> list[RowCache | None]:
    """Return the cache of each table; None for a table without one, or without compiled functions.

    Args:
        tables: The tables.
        device: Device of the loop.
        config: Memory limits; None for the free memory.

    Raises:
        ArgumentError: If a cache is smaller than a row.
        BudgetError: If the caches take more than the limits leave.
    """
    found: list[RowCache | None] = [None] * len(tables)
    # Checked again, because users may have changed the attribute of a table.
    sizes = [check_device_cache(used.table.device_cache) for used in tables]
    if library() is None:
        return found
    for i, size in enumerate(sizes):
        if isinstance(size, (int, float)):
            found[i] = _cache(tables[i], size, device)
    automatic = [
        i for i, used in enumerate(tables) if sizes[i] == "auto" and _gains_from_cache(used, device)
    ]
    made = [cache for cache in found if cache is not None]
    if not automatic and (config is None or not made):
        return found
    left = _left(device, config, made)
    nbytes = {i: tables[i].stores[0].n_rows * tables[i].row_nbytes for i in automatic}
    wanted = sum(nbytes.values())
    for i in automatic:
        share = min(left, wanted) * nbytes[i] // wanted
        if share >= tables[i].row_nbytes:
            found[i] = _cache(tables[i], share, device)
    return found


def cache_allocations(caches: Sequence[RowCache | None], device: Device) -> tuple[Allocation, ...]:
    """Return the memory allocations of the caches."""
    items = []
    for cache in caches:
        if cache is None:
            continue
        n_rows = cache.stores[0].n_rows
        rows = "all" if cache.capacity == n_rows else f"{cache.capacity:,} of {n_rows:,}"
        place: Place = "host" if device.unified else "device"
        use = f"cache of {cache.name}"
        items += [
            Allocation(f"{use}: {rows} rows", place, 1, cache.nbytes),
            Allocation(f"bookkeeping of the {use}", "host", 1, cache.policy.nbytes),
        ]
    return tuple(items)


def cache_notes(
    tables: Sequence[LoopTable], caches: Sequence[RowCache | None], device: Device
) -> tuple[str, ...]:
    """Return notes on the memory and the copies of caches, and on tables that get no cache."""
    notes = []
    for used, cache in zip(tables, caches, strict=True):
        name = used.name
        if cache is not None:
            if cache.capacity == cache.stores[0].n_rows:
                notes.append(
                    f"{name} fits its cache as a whole: a row is copied to the device at most once "
                    "in a loop, and copied back when the loop ends"
                )
        elif used.table.device_cache is not None:
            reason = "the remaining memory is smaller than a row with its optimizer state"
            if problem := why_not():
                reason = f"compiled functions choose its rows, but {problem}"
            elif not _gains_from_cache(used, device):
                reason = "on the CPU, reading rows in memory is as fast as a cache"
            notes.append(f"{name} has no cache: {reason}")
    return tuple(notes)


def _gains_from_cache(used: LoopTable, device: Device) -> bool:
    """Return whether a cache on the device can be faster than the stores of a table.

    The CPU reads rows in memory as fast as a cache.
    """
    return not (device.unified and all(isinstance(store, ArrayStore) for store in used.stores))


def _cache(used: LoopTable, size: int | float, device: Device) -> RowCache:
    """Return the cache of a table, for its weights and its optimizer state.

    Args:
        used: The table.
        size: Bytes as an int, or a share of the rows as a float. A share is at least one row.
        device: Device of the loop.

    Raises:
        ArgumentError: If the size is smaller than a row.
    """
    n_rows = used.stores[0].n_rows
    if isinstance(size, float):
        n = max(1, int(size * n_rows))
    else:
        n = min(n_rows, size // used.row_nbytes)
    if not n:
        raise ArgumentError(
            f"device_cache={size} of {used.name} holds no row: a row with its optimizer state has "
            f"{human(used.row_nbytes)}; expected at least as many bytes, or a share of the rows as "
            "a float (1.0 for all rows)"
        )
    return RowCache(used.name, used.stores, n, device)


def _left(device: Device, config: MemoryLimits | None, made: Sequence[RowCache]) -> int:
    """Return the bytes that remain for caches of size ``"auto"``.

    Args:
        device: Device of the loop.
        config: Memory limits; None for the free memory.
        made: The other caches.

    Raises:
        BudgetError: If the other caches take more than the limits leave.
    """
    taken = sum(cache.nbytes for cache in made)
    planned = config.device_cache if isinstance(config, Config) else None
    limits = config.for_feeder() if config is not None else MemoryLimits()
    if planned is not None:
        limit_name = "device_cache"
        limit = planned
    elif device.unified:
        limit_name = "cpu_memory_limit"
        limit = limits.host_limit(free_host_bytes())
    else:
        limit_name = "gpu_memory_limit"
        limit = limits.device_limit(device.free_bytes())
    if config is not None and taken > limit:
        sizes = ", ".join(f"{human(cache.nbytes)} of {cache.name}" for cache in made)
        raise BudgetError(
            f"device_cache: the caches take {human(taken)} with optimizer state ({sizes}), but "
            f"config leaves {human(max(0, limit))} for them; lower device_cache of the tables, or "
            f"raise {limit_name} of the config"
        )
    return max(0, (limit if planned is not None else int(_AUTO_SHARE * limit)) - taken)

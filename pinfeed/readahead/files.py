"""What to change where a loop waits for the rows of a file."""

from __future__ import annotations

from pinfeed.memory.units import human
from pinfeed.stores.sharded_file import AnyShardedStore

AS_FAST = "as fast as the disk gives it: a smaller dtype leaves less to read."


def whole_file(store: AnyShardedStore) -> str:
    """What memory for all of it would do."""
    if store.writable:
        return "Opened for reading only, it could be brought into memory."
    needed = human(store.n_rows * store.row_nbytes)
    return f"With {needed} of memory for all of it (cpu_memory_limit of a Config, or more that is free), it is brought there once."

"""A loop that trains a model, with its history and callbacks, and snapshots of memory.

Programs that used the training loop, the history and the memory snapshots of infinitybatch find
here what they need. A Trainer trains a model in one call, epoch by epoch, or in the user's own
loop; its ``config`` is a ``pinfeed.Config``. A MemoryMonitor takes snapshots of the memory of the
device and of the process. Lightning, Accelerate and Transformers have loops for every other
purpose; pinfeed's feeders work in all of them.
"""

from __future__ import annotations

from pinfeed.compat.trainer.callbacks import Callbacks
from pinfeed.compat.trainer.history import History, Record
from pinfeed.compat.trainer.memory_monitor import MemoryMonitor, Snapshot
from pinfeed.compat.trainer.optimizer_group import LoopWarning
from pinfeed.compat.trainer.trainer import Trainer

__all__ = [
    "Callbacks",
    "History",
    "LoopWarning",
    "MemoryMonitor",
    "Record",
    "Snapshot",
    "Trainer",
]


def __dir__() -> list[str]:
    """Return the public names without the modules of this package."""
    return __all__

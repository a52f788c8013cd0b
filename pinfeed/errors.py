"""Exceptions of pinfeed, each a subclass of one that a caller would expect, and its logger.

The built-in class is in brackets, so that existing ``except`` clauses catch the error. ``pinfeed``
itself has the names of the exceptions that programs tell apart by name. The others are here alone.
Programs catch them by their base class or by the built-in class:

    PinfeedError
    ├── ArgumentError       (ValueError)         an invalid argument, or arguments that conflict
    │   └── UnknownArgument (TypeError)          an argument that does not exist
    ├── BudgetError         (ValueError)         a memory limit too small for batches of one row
    │   ├── NotEnoughCPUMemory                   … in host memory
    │   └── NotEnoughGPUMemory                   … in device memory
    ├── EstimateError       (RuntimeError)       a training step whose memory cannot be predicted
    ├── RowIndexError       (IndexError)         row indices out of range, or not integers
    ├── StoreError          (ValueError)         rows that cannot be served: damaged, wrong dtype
    │   └── FileMissing     (FileNotFoundError)  a missing file, or no directory for a new one
    ├── ReadError           (OSError)            a file that failed or shrank during a read
    ├── WriteBackError      (ValueError)         values that cannot be written back
    ├── DeviceError         (RuntimeError)       a missing device, or one that lacks an ability
    ├── MissingDependency   (ImportError)        a missing package, or the hardware it needs
    ├── RankError           (RuntimeError)       a rank of the job that failed, left or diverged
    ├── ClosedError         (RuntimeError)       use after close, or a second loop at a time
    ├── VerificationError   (AssertionError)     a loop that differs from the synchronous one
    ├── CheckpointError     (ValueError)         a checkpoint that is damaged or does not match
    └── WorkerError         (RuntimeError)       StopIteration or SystemExit in user code
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("pinfeed")
"""Logger of what a program should know, but what does not end it."""


def described(error: BaseException) -> str:
    """Return the type and the message of an exception, such as ``KeyError: 'lr'``.

    Without a message, return the type alone, such as ``MemoryError``.
    """
    message = str(error).strip()
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, which Python 3.11 and later show below its message."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]


class PinfeedError(Exception):
    """Base class of all errors that pinfeed itself raises."""


class ArgumentError(PinfeedError, ValueError):
    """An invalid argument, or arguments that conflict."""


class UnknownArgument(ArgumentError, TypeError):
    """An argument that a function does not have.

    The message names the argument to give instead.
    """


class BudgetError(PinfeedError, ValueError):
    """A memory limit that is too small for batches of one row."""


class NotEnoughCPUMemory(BudgetError):
    """A ``cpu_memory_limit`` that is too small for the smallest batch."""


class NotEnoughGPUMemory(BudgetError):
    """A ``gpu_memory_limit`` that is too small for the smallest batch."""


class EstimateError(PinfeedError, RuntimeError):
    """A training step whose memory pinfeed cannot predict, because it needs data or fails."""


class RowIndexError(PinfeedError, IndexError):
    """Row indices that are out of range, negative or not integers."""


class StoreError(PinfeedError, ValueError):
    """A source whose rows pinfeed cannot serve."""


class FileMissing(StoreError, FileNotFoundError):
    """A file that does not exist, or the directory of a new file that does not exist."""


class ReadError(PinfeedError, OSError):
    """A file that failed, or shrank, during a read."""


class WriteBackError(PinfeedError, ValueError):
    """Values that cannot be written back, or that are written back too late."""


class DeviceError(PinfeedError, RuntimeError):
    """A device that does not exist or does not support the request."""


class MissingDependency(PinfeedError, ImportError):
    """A missing package, or missing hardware that the package needs."""


class ClosedError(PinfeedError, RuntimeError):
    """Use after close, or a second loop while the first one still runs."""


class RankError(PinfeedError, RuntimeError):
    """Another rank of the job that failed, left its loop, or made a different call.

    The message names the rank and the reason.
    """


class VerificationError(PinfeedError, AssertionError):
    """A prefetching loop whose results differ from those of the synchronous loop."""


class CheckpointError(PinfeedError, ValueError):
    """A checkpoint that is damaged, or that does not match the objects to resume."""


class WorkerError(PinfeedError, RuntimeError):
    """The error that replaces ``StopIteration``, ``SystemExit`` and the like from user code.

    These would end the loop or the program without an error.
    """


def __dir__() -> list[str]:
    """Return the names of the exceptions, without the helpers of this module."""
    return sorted(name for name, value in globals().items() if isinstance(value, type))

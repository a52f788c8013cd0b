"""What can go wrong, each kind under the built-in exception that a caller would expect.

In brackets what each is besides, so that ``except`` clauses that are there already catch it:

    PinfeedError
    ├── ArgumentError      (ValueError)         an argument that cannot be
    │   └── UnknownArgument (TypeError)         an argument that does not exist
    ├── BudgetError        (ValueError)         a memory limit that cannot hold one row a slot
    │   ├── NotEnoughCPUMemory                  … on the host
    │   └── NotEnoughGPUMemory                  … on the device
    ├── EstimateError      (RuntimeError)       a training step whose memory cannot be predicted
    ├── RowIndexError      (IndexError)         row numbers out of range, negative or not integers
    ├── StoreError         (ValueError)         rows that pinfeed cannot serve: damaged file, wrong dtype
    │   └── FileMissing    (FileNotFoundError)  no such file, or no directory to make it in
    ├── ReadError          (OSError)            a file that failed or shrank while it was read
    ├── WriteBackError     (ValueError)         values that cannot be written back
    ├── DeviceError        (RuntimeError)       a device that does not exist or cannot do what was asked
    ├── MissingDependency  (ImportError)        a package, or the hardware behind it, that is not here
    ├── RankError          (RuntimeError)       another process of the job failed, left, or does something else
    ├── ClosedError        (RuntimeError)       use after close, or a second loop at the same time
    ├── CopyError          (TypeError)          what belongs to one process and cannot be pickled or copied
    ├── VerificationError  (AssertionError)     a prefetching loop that differs from the synchronous one
    ├── CheckpointError    (ValueError)         a checkpoint that is damaged, or of something else
    └── WorkerError        (RuntimeError)       user code raised what would have ended the loop in silence
"""

from __future__ import annotations


def described(error: BaseException) -> str:
    """Return the type of an exception with its message: ``KeyError: 'lr'``, or ``MemoryError`` where the message is empty."""
    message = str(error).strip()
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


class PinfeedError(Exception):
    """Base of every error that pinfeed raises on its own account."""


class ArgumentError(PinfeedError, ValueError):
    """An argument, or a combination of arguments, that cannot be."""


class UnknownArgument(ArgumentError, TypeError):
    """An argument that a function does not have. The message names the one that does the same."""


class BudgetError(PinfeedError, ValueError):
    """A memory limit that cannot hold even one row in every slot."""


class NotEnoughCPUMemory(BudgetError):
    """``cpu_memory_limit`` cannot hold what is needed."""


class NotEnoughGPUMemory(BudgetError):
    """``gpu_memory_limit`` cannot hold what is needed."""


class EstimateError(PinfeedError, RuntimeError):
    """A training step whose memory cannot be predicted: it needs data, or fails."""


class RowIndexError(PinfeedError, IndexError):
    """Row numbers that are out of range, negative or not integers."""


class StoreError(PinfeedError, ValueError):
    """Rows that pinfeed cannot serve."""


class FileMissing(StoreError, FileNotFoundError):
    """A file that is not there, or the directory in which one is to be made."""


class ReadError(PinfeedError, OSError):
    """A file that failed, or shrank, while it was read."""


class WriteBackError(PinfeedError, ValueError):
    """Values that cannot be written back, or not any more."""


class DeviceError(PinfeedError, RuntimeError):
    """A device that does not exist or cannot do what was asked."""


class MissingDependency(PinfeedError, ImportError):
    """A package, or the hardware behind it, that is needed and not here."""


class ClosedError(PinfeedError, RuntimeError):
    """Use after close, or a second loop while one is running."""


class RankError(PinfeedError, RuntimeError):
    """Another process of the job failed, left its loop, or does something else; the message has which and what."""


class CopyError(PinfeedError, TypeError):
    """An object that belongs to the process which made it, and cannot be pickled or copied."""


class VerificationError(PinfeedError, AssertionError):
    """A prefetching loop differs from the synchronous one."""


class CheckpointError(PinfeedError, ValueError):
    """A checkpoint that is damaged, or of something else."""


class WorkerError(PinfeedError, RuntimeError):
    """User code raised an exception that would have ended the loop, or the program, in silence."""

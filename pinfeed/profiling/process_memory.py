"""ProcessMemory: resident memory of the process, by kind."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pinfeed.memory.host import resident_bytes
from pinfeed.memory.page_locked import locked_bytes
from pinfeed.memory.units import human


@dataclass(frozen=True, repr=False)
class ProcessMemory:
    """Resident memory of the process in bytes, by kind, for pinfeed and all other code together.

    A kind that the system does not report is None.

    Examples:
        >>> feeder = pinfeed.Feeder(np.zeros((1000, 8)), batch_size=100)
        >>> memory = feeder.stats.memory
        >>> memory.pinned >= 0
        True

    Attributes:
        anonymous: Bytes that are neither mapped from a file, nor shared, nor page-locked by
            pinfeed.
        file: Bytes mapped from files: libraries, and touched pages of memory maps, including
            pinfeed's. The kernel may drop such pages at any time.
        shared: Bytes of shared memory, mostly batches from the worker processes of a DataLoader.
            The kernel also counts memory that CUDA allocates page-locked (torch's ``pin_memory``).
        pinned: Bytes that pinfeed page-locked (pinned).
        peak: Largest sum of all kinds since the process began, in bytes.
    """

    anonymous: int | None
    file: int | None
    shared: int | None
    pinned: int
    peak: int | None

    @classmethod
    def now(cls) -> ProcessMemory:
        """Return the current memory of this process."""
        resident = resident_bytes()
        locked = locked_bytes()
        anonymous = resident["anonymous"]
        if anonymous is not None:
            anonymous = max(0, anonymous - locked)
        return cls(anonymous, resident["file"], resident["shared"], locked, resident["peak"])

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        kinds = dataclasses.asdict(self).items()
        return ", ".join(
            f"{name} {'unknown' if nbytes is None else human(nbytes)}" for name, nbytes in kinds
        )

"""The best rates of the disk, measured on a file of the user or on a scratch file."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pinfeed.cli.measure.bandwidth import random_rate, sequential_rate
from pinfeed.cli.measure.page_cache import PIECE_BYTES, cached_share, drop
from pinfeed.cli.terminal.output import saying
from pinfeed.errors import described
from pinfeed.memory.units import human

# Bytes of the file that are read.
_SPAN_BYTES = 256 << 20
# Longest time of a measurement, and of writing a scratch file.
_READ_S = 0.7
_WRITE_S = 1.5
# Rows that a feeder reads at a time.
_N_RANDOM = 16


@dataclass(frozen=True)
class Disk:
    """The rates that reads of a file reached, in GB/s."""

    what: str
    nbytes: int
    sequential: float
    random: float | None
    """Rate of reading rows of ``row_nbytes`` in random order, 16 at a time."""
    row_nbytes: int
    cached: float | None
    """Share that stayed in the page cache; None if the kernel does not report it."""

    @property
    def cold(self) -> bool:
        """Whether the disk was measured and not the page cache."""
        return self.cached is not None and self.cached < 0.01

    def __str__(self) -> str:
        if self.cold:
            state = "which was dropped from the page cache first"
        elif self.cached is None:
            state = "but the kernel does not report whether the reads were served by the page cache"
        else:
            state = (
                f"but {self.cached:.0%} stayed in the page cache, so the rates are not those of "
                "the disk alone"
            )
        return f"The disk was measured with {self.what} ({human(self.nbytes)}), {state}."


def look_at_disk(
    path: str | None, start: int, row_nbytes: int, directory: str | None
) -> tuple[Disk | None, str]:
    """Measure the disk on a file or on a scratch file.

    Args:
        path: The file; None, or a very small file, measures a scratch file.
        start: Offset of its first row, in bytes.
        row_nbytes: Bytes of a row.
        directory: Folder of a scratch file, which is then measured in any case; None prefers
            ``path``.

    Returns:
        The rates, or None and the reason why they could not be measured.
    """
    try:
        if directory is None and path is not None and os.stat(path).st_size >= PIECE_BYTES:
            with saying(f"reading {path}"):
                return _measured(path, path, start, row_nbytes), ""
    except OSError as error:
        return None, f"the disk could not be measured: {described(error)}"
    folder = os.path.abspath(directory or (os.path.dirname(path) if path else ""))
    try:
        with saying(f"writing and reading a scratch file in {folder}"), _scratch(folder) as scratch:
            return _measured(scratch, f"a scratch file in {folder}", 0, row_nbytes), ""
    except OSError as error:
        why = error.strerror or described(error)
        return None, (
            f"the disk could not be measured: no scratch file in {folder} ({why}); give a "
            "writable folder with --dir"
        )


@contextlib.contextmanager
def _scratch(folder: str) -> Iterator[str]:
    """Write a file for a short time; yield its name, and remove it in the end."""
    # Some file systems do not store zeros.
    piece = np.random.default_rng(0).bytes(PIECE_BYTES)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".pinfeed-", buffering=0) as file:
        deadline = time.perf_counter() + _WRITE_S
        while file.tell() < _SPAN_BYTES and time.perf_counter() < deadline:
            file.write(piece)
        os.fsync(file.fileno())
        yield file.name


def _measured(path: str, what: str, start: int, row_nbytes: int) -> Disk:
    """Measure reads of the beginning of a file, after dropping it from the page cache.

    A file that was not in the cache is dropped again in the end.
    """
    span = min(os.stat(path).st_size, _SPAN_BYTES)
    before = cached_share([path], span)
    sequential = 0.0
    left = []
    for n_threads in (1, 4):
        drop([path], span)
        left.append(cached_share([path], span))
        sequential = max(sequential, sequential_rate(path, n_threads, stop=span, seconds=_READ_S))
    n_rows = (span - start) // max(1, row_nbytes)
    at_random = None
    if row_nbytes and n_rows >= 4 * _N_RANDOM:
        drop([path], span)
        rows = np.random.default_rng(0).permutation(n_rows)
        batches = np.array_split(rows, max(1, n_rows // 1024))
        at_random = random_rate(path, start, row_nbytes, batches, _N_RANDOM, seconds=_READ_S)
    if before is not None and before < 0.5:
        drop([path], span)
    cached = None if None in left else max(share or 0.0 for share in left)
    return Disk(what, span, sequential, at_random, row_nbytes, cached)

"""Advice on whether pinfeed would help, from the size of the data and the rates of the machine.

This module is arithmetic only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pinfeed.memory.units import human
from pinfeed.readahead.strategy import usual_block_rows

# Share of the free memory that data may use; a model, or a feeder, needs the rest.
_ENOUGH = 0.5


class Data(NamedTuple):
    """The data of a training loop."""

    n_rows: int
    row_nbytes: int
    batch_size: int
    words: str = ""
    """Description of the data."""
    path: str | None = None
    """A local file of the data; None if there is none."""
    start: int = 0
    """Offset of the first row in that file, in bytes."""
    is_decoded: bool = False
    """Whether the rows are decoded from chunks."""
    order: str = ""
    """The random order of large files; empty for ``block_shuffled``."""

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.n_rows * self.row_nbytes

    @property
    def batch_nbytes(self) -> int:
        """Bytes of a batch."""
        return min(self.batch_size, self.n_rows) * self.row_nbytes


class Ceilings(NamedTuple):
    """The best rates of the machine, in GB/s; None for one that was not measured."""

    memory: float
    sequential: float | None = None
    random: float | None = None
    link: float | None = None
    """Rate of copies from page-locked memory to the GPU."""

    def batch_ms(self, nbytes: int) -> dict[str, float]:
        """Return the least milliseconds of a batch, for each rate that was measured."""
        ways = {
            "memory": self.memory,
            "disk in sequence": self.sequential,
            "disk at random": self.random,
            "link": self.link,
        }
        return {way: nbytes / rate / 1e6 for way, rate in ways.items() if rate}


class Advice(NamedTuple):
    """The answer to whether pinfeed would help.

    Attributes:
        helps: ``no``, ``perhaps`` or ``yes``.
        why: The reasons, in paragraphs.
    """

    helps: str
    why: tuple[str, ...]


def advise(data: Data, ceilings: Ceilings, *, free_host: int, gpu: str, free_gpu: int) -> Advice:
    """Say whether pinfeed helps.

    Args:
        data: The data of the loop.
        ceilings: The rates of the machine.
        free_host: Host memory that may be used, in bytes.
        gpu: Name of the GPU; empty if there is none.
        free_gpu: Free memory of the GPU, in bytes.
    """
    times = ceilings.batch_ms(data.batch_nbytes)
    size = human(data.nbytes)
    if gpu and data.nbytes <= _ENOUGH * free_gpu:
        limits = "Use pinfeed if the model needs that memory."
        return Advice("no", (_on_the_gpu(data, free_gpu), limits))
    almost = ""
    if gpu and data.nbytes <= free_gpu:
        almost = (
            f"The data ({size}) would fit on the GPU ({human(free_gpu)} free) if the model fits "
            "in the rest. Then copy the data there once. "
        )
    if data.nbytes <= _ENOUGH * free_host:
        worth = _worth(times["memory"] + times.get("link", 0.0))
        return Advice("perhaps", (almost + _in_memory(data, free_host, gpu), worth))
    read = _from_disk(times, data)
    return Advice("yes", (almost + _larger(size, free_host, bool(gpu)), *read))


def spelled(ms: float) -> str:
    """Return milliseconds as text."""
    if ms >= 9.95:
        return f"{ms:,.0f} ms"
    return f"{ms:.2g} ms" if ms >= 0.001 else "less than 0.001 ms"


def _on_the_gpu(data: Data, free_gpu: int) -> str:
    code = "" if data.is_decoded else ", x = torch.from_numpy(numpy.load(path)).to('cuda'),"
    return (
        f"The data ({human(data.nbytes)}) fits on the GPU, which has {human(free_gpu)} free. Copy "
        f"it there once{code} and index it there. This is faster than any prefetching."
    )


def _in_memory(data: Data, free_host: int, gpu: str) -> str:
    load = "loading the whole file" if data.is_decoded else "numpy.load"
    fits = f"The data ({human(data.nbytes)}) fits in memory ({human(free_host)} free)"
    if gpu:
        return (
            f"{fits}, but not on the GPU. pinfeed gathers batches and copies them to the GPU "
            "while your training step computes."
        )
    return (
        f"{fits}, and this machine has no GPU. If {load} and indexing are fast enough, keep "
        "them. pinfeed would gather batches in the background, but on the same cores as your "
        "training step. It adds prefetching, row orders that can be resumed, and memory limits."
    )


def _worth(batch_ms: float) -> str:
    """Say when it is worth hiding the time of gathering a batch."""
    return (
        f"Prefetching can hide the time to gather a batch: at least {spelled(batch_ms)}, and more "
        "if your loop reads row by row. If a training step takes more than "
        f"{spelled(20 * batch_ms)}, the gain is less than 5%. feeder.stats shows how long your "
        "loop waits."
    )


def _larger(size: str, free_host: int, gpu: bool) -> str:
    way = "and copies batches to the GPU while your step computes" if gpu else "in the background"
    return (
        f"The data ({size}) is too large for host memory ({human(free_host)} free). pinfeed "
        f"streams it from the disk {way}, within the memory limits that you set."
    )


def _from_disk(times: Mapping[str, float], data: Data) -> tuple[str, ...]:
    if "disk in sequence" not in times:
        return ("The disk was not measured; give a FILE, or --dir.",)
    in_sequence = times["disk in sequence"]
    at_random = times.get("disk at random", 0.0)
    order = data.order or f"block_shuffled(block_rows={usual_block_rows(data.row_nbytes)})"
    sequential = (
        f"Reading a batch from the disk takes at least {spelled(in_sequence)} in sequential or "
        f"pinfeed.rows.{order.partition('(')[0]} order. A longer training step need not wait."
    )
    if data.is_decoded:
        random = (
            "In fully random order (shuffle=True), pinfeed decodes whole chunks for single rows. "
            f"Use {order}."
        )
        return sequential, random
    if at_random < 1.5 * in_sequence:
        return (sequential,)
    random = (
        f"In fully random order (shuffle=True), a batch takes {spelled(at_random)}, because the "
        f"disk seeks for each row. Use {order}."
    )
    return sequential, random

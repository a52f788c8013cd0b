"""Budget: what a training step and the feeder beside it take, beside the limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tabulate import tabulate

from pinfeed.errors import BudgetError, NotEnoughCPUMemory, NotEnoughGPUMemory
from pinfeed.memory.limits import Allocation, Plan, human
from pinfeed.training.memory_model.report import Estimate


@dataclass(frozen=True)
class Budget:
    """What a training step and the feeder beside it take.

    ``str(budget)`` is a table of where each byte goes.

    Attributes:
        batch_size: Samples.
        step: The estimate of the step.
        feeder: The plan of the feeder.
        margin: Bytes left for what the estimate does not see; or, after ``probe``, what was seen
            beyond it, which may be less than none.
        seen: What steps took when they ran, in estimates; None if they did not.
        cpu_memory_limit: In bytes.
        gpu_memory_limit: In bytes; None where training is on the CPU.
    """

    batch_size: int
    step: Estimate
    feeder: Plan
    margin: int
    seen: float | None
    cpu_memory_limit: int
    gpu_memory_limit: int | None

    @property
    def items(self) -> tuple[Allocation, ...]:
        """Everything, once each: the step's own batch is one of the feeder's."""
        place = "host" if self.gpu_memory_limit is None else "device"
        step = [
            (what, nbytes)
            for what, nbytes in self.step.breakdown.items()
            if what != "batch" and nbytes
        ]
        step += [
            ("left for what is not seen" if self.seen is None else "seen beyond that", self.margin)
        ] * bool(self.margin)
        return (*(Allocation(what, place, 1, nbytes) for what, nbytes in step), *self.feeder.items)  # type: ignore[arg-type]

    @property
    def cpu_bytes(self) -> int:
        """Host memory in all, page-locked or not."""
        return sum(item.total for item in self.items if item.place != "device")

    @property
    def gpu_bytes(self) -> int:
        """Memory of the GPU in all."""
        return sum(item.total for item in self.items if item.place == "device")

    @property
    def fits(self) -> bool:
        """Whether it is within the limits."""
        return self.cpu_bytes <= self.cpu_memory_limit and (
            self.gpu_memory_limit is None or self.gpu_bytes <= self.gpu_memory_limit
        )

    @property
    def step_bytes(self) -> int:
        """What the step takes beside its batch."""
        return self.step.reserved_bytes - self.step.breakdown["batch"] + self.margin

    def __str__(self) -> str:
        rows = [
            (item.place, item.what, item.count, human(item.nbytes), human(item.total))
            for item in self.items
        ]
        table = tabulate(
            rows,
            headers=("where", "what", "count", "each", "in all"),
            colalign=("left", "left", "right", "right", "right"),
        )
        lines = [
            f"batches of {self.batch_size} samples",
            table,
            f"host: {human(self.cpu_bytes)} of {human(self.cpu_memory_limit)}",
        ]
        if self.gpu_memory_limit is not None:
            lines.append(f"device: {human(self.gpu_bytes)} of {human(self.gpu_memory_limit)}")
        if self.seen is not None:
            return "\n".join([*lines, f"probed: steps took {self.seen:.2f} x the estimate"])
        return "\n".join([*lines, f"confidence: {self.step.confidence}", *self.step.notes])


def refusal(least: Budget, n_samples: int) -> BudgetError:
    """The error that says why not even so many samples fit."""
    on_device = least.gpu_memory_limit is not None and least.gpu_bytes > least.gpu_memory_limit
    need, limit = (
        (least.gpu_bytes, least.gpu_memory_limit)
        if on_device
        else (least.cpu_bytes, least.cpu_memory_limit)
    )
    name, kind = (
        ("gpu_memory_limit", NotEnoughGPUMemory)
        if on_device
        else ("cpu_memory_limit", NotEnoughCPUMemory)
    )
    uses = ", ".join(
        f"{human(item.total)} {item.what}"
        for item in least.items
        if (item.place == "device") == on_device
    )
    return kind(
        f"a batch of {n_samples} needs {human(need)} ({need} bytes): {uses}; {name} is {human(limit or 0)} ({limit} bytes); "
        f"raise {name}, lower depth (now {least.feeder.depth}), or train in chunks"
    )


def largest_that_fits(need: Callable[[int], float], limit: float, most: int | None) -> int:
    """Return the largest ``n`` from 1 to ``most`` with ``need(n) <= limit``; 0 if there is none.

    ``need`` grows with ``n``, nearly linearly beyond some size. Interpolation finds the place in a
    few calls, and halving the interval bounds their number.

    Args:
        need: Function that returns bytes or a share for ``n``; it may be called again for the same
            ``n``.
        limit: Limit of the result of ``need``.
        most: Largest ``n`` to try; None for no bound.
    """
    at_fits = need(1)
    if at_fits > limit or most == 0:
        return 0
    fits = 1
    if most is not None:
        if most == 1 or need(most) <= limit:
            return most
        too_many = most
        at_too_many = need(most)
    else:
        too_many = 2
        at_too_many = need(2)
        while at_too_many <= limit:
            fits = too_many
            at_fits = at_too_many
            too_many *= 4
            at_too_many = need(too_many)
    halve = False
    while too_many - fits > 1:
        share = 0.5 if halve else (limit - at_fits) / (at_too_many - at_fits)
        guess = min(max(fits + int(share * (too_many - fits)), fits + 1), too_many - 1)
        nbytes = need(guess)
        if nbytes <= limit:
            halve = not halve and (too_many - guess) > (guess - fits)
            fits = guess
            at_fits = nbytes
        else:
            halve = not halve and (guess - fits) > (too_many - guess)
            too_many = guess
            at_too_many = nbytes
    return fits

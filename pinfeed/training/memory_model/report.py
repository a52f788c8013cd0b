"""Estimate and Budget: memory of a training step by purpose, and with its feeder in the limits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tabulate import tabulate
from torch import nn

from pinfeed.errors import BudgetError, NotEnoughCPUMemory, NotEnoughGPUMemory
from pinfeed.memory.plan import Allocation, Plan, joined
from pinfeed.memory.units import human

Confidence = Literal["exact", "close", "low"]
Kind = Literal["cuda", "cpu"]


@dataclass(frozen=True, repr=False)
class Estimate:
    """Peak memory of a training step; ``str(estimate)`` is a table.

    Examples:
        >>> model = torch.nn.Linear(1000, 10)
        >>> estimate = pinfeed.estimate(model, 64, input_shape=(1000,))
        >>> estimate.breakdown["parameters"]
        40960
        >>> print(estimate)
        step of 64 samples...

    Attributes:
        batch_size: Samples in the batch.
        allocated_bytes: Peak memory of tensors, in bytes.
        reserved_bytes: Peak memory that torch's allocator takes from the device for these tensors,
            in bytes; on the CPU the same as ``allocated_bytes``.
        breakdown: Bytes at the peak by purpose: ``"parameters"``, ``"gradients"``,
            ``"activations"``, …; ``"reserve"`` is the memory that the allocator holds in addition.
        phases: Peak memory of tensors in the ``"forward"`` pass, the ``"backward"`` pass and the
            ``"optimizer"`` step, in bytes.
        n_parameters: Number of elements of the parameters that require gradients, and of the other
            ones.
        confidence: ``"exact"``: no operation is known to take more memory. Measured steps took up
            to 3% more on a GPU, and one took 22% more. ``"close"``: on the CPU, temporary memory
            was measured in a step of fewer samples; on a GPU, the workspace of convolutions is not
            counted, and measured steps took up to 36% more. ``"low"``: the estimate may be far off,
            and measured steps took up to 2.3 times as much. On a GPU, run ``Config.probe``.
        notes: Assumptions, and reasons why the estimate is not exact.
    """

    batch_size: int
    allocated_bytes: int
    reserved_bytes: int
    breakdown: Mapping[str, int]
    phases: Mapping[str, int]
    n_parameters: tuple[int, int]
    confidence: Confidence
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        rows = [
            (what, human(nbytes), f"{nbytes / max(1, self.reserved_bytes):.1%}")
            for what, nbytes in self.breakdown.items()
            if nbytes
        ]
        rows.append(("total", human(self.reserved_bytes), "100.0%"))
        table = tabulate(
            rows,
            headers=(f"step of {self.batch_size} samples", "memory", "share"),
            colalign=("left", "right", "right"),
        )
        phases = ", ".join(f"{phase} {human(nbytes)}" for phase, nbytes in self.phases.items())
        n_trainable, n_frozen = self.n_parameters
        lines = [
            table,
            f"peak by phase: {phases}",
            f"parameters: {n_trainable:,} trainable, {n_frozen:,} frozen",
            f"confidence: {self.confidence}",
        ]
        return "\n".join([*lines, *self.notes])


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the elements of the parameters that require gradients, and of the other ones.

    A parameter that several modules share counts once.
    """
    counts = {True: 0, False: 0}
    for parameter in model.parameters():
        counts[parameter.requires_grad] += parameter.numel()
    return counts[True], counts[False]


CACHES = "caches of tables"
"""Use of the memory that ``Config(device_cache=...)`` reserves."""


@dataclass(frozen=True, repr=False)
class Budget:
    """Memory of a training step and its feeder; ``str(budget)`` is a table.

    Examples:
        >>> model = torch.nn.Linear(1000, 10)
        >>> limit = pinfeed.GiB(8)
        >>> config = pinfeed.Config(gpu_memory_limit=limit, model=model, input_shape=(1000,))
        >>> budget = config.budget
        >>> budget.fits, budget.gpu_bytes <= limit
        (True, True)

    Attributes:
        batch_size: Samples in the batch.
        step: Estimate of the step.
        feeder: Plan of the feeder.
        margin: Bytes reserved for memory that the estimate misses. After ``probe``, the measured
            excess over the estimate, which may be negative.
        seen: Measured memory of a step, relative to the estimate; None if it was not measured.
        cpu_memory_limit: Limit of host memory, in bytes.
        gpu_memory_limit: Limit of device memory, in bytes; None if training is on the CPU.
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
        """All allocations; the batch of the step counts once, as a batch buffer of the feeder."""
        place = "host" if self.gpu_memory_limit is None else "device"
        step = {name: nbytes for name, nbytes in self.step.breakdown.items() if name != "batch"}
        step["safety margin" if self.seen is None else "measured above estimate"] = self.margin
        own = [Allocation(name, place, 1, nbytes) for name, nbytes in step.items() if nbytes]  # type: ignore[arg-type]
        return (*own, *self.feeder.items)

    @property
    def cpu_bytes(self) -> int:
        """Total host memory in bytes, pinned and unpinned."""
        return sum(item.total for item in self.items if item.place != "device")

    @property
    def gpu_bytes(self) -> int:
        """Total device memory in bytes."""
        return sum(item.total for item in self.items if item.place == "device")

    @property
    def fits(self) -> bool:
        """Whether the memory is within the limits."""
        if self.gpu_memory_limit is not None and self.gpu_bytes > self.gpu_memory_limit:
            return False
        return self.cpu_bytes <= self.cpu_memory_limit

    @property
    def step_bytes(self) -> int:
        """Memory of the step without its batch, in bytes."""
        return self.step.reserved_bytes - self.step.breakdown["batch"] + self.margin

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        rows = [
            (item.place, item.what, item.count, human(item.nbytes), human(item.total))
            for item in joined(self.items)
        ]
        table = tabulate(
            rows,
            headers=("where", "what", "count", "each", "total"),
            colalign=("left", "left", "right", "right", "right"),
        )
        lines = [
            f"batches of {self.batch_size} samples",
            table,
            f"host memory: {human(self.cpu_bytes)} (limit {human(self.cpu_memory_limit)})",
        ]
        if self.gpu_memory_limit is not None:
            gpu_limit = human(self.gpu_memory_limit)
            lines.append(f"GPU memory: {human(self.gpu_bytes)} (limit {gpu_limit})")
        if self.seen is not None:
            times = f"{self.seen:.2f} times the estimate"
            return "\n".join([*lines, f"probe: the measured memory of a step is {times}"])
        return "\n".join([*lines, f"confidence: {self.step.confidence}", *self.step.notes])


def refusal(least: Budget, n_samples: int) -> BudgetError:
    """Return the error that says why not even ``n_samples`` samples fit."""
    on_device = least.gpu_memory_limit is not None and least.gpu_bytes > least.gpu_memory_limit
    error: type[BudgetError] = NotEnoughCPUMemory
    name = "cpu_memory_limit"
    need = least.cpu_bytes
    limit: int | None = least.cpu_memory_limit
    if on_device:
        error = NotEnoughGPUMemory
        name = "gpu_memory_limit"
        need = least.gpu_bytes
        limit = least.gpu_memory_limit
    items = [item for item in least.items if (item.place == "device") == on_device]
    uses = ", ".join(f"{human(item.total)} {item.what}" for item in items)
    excess = need - (limit or 0)
    advice = [f"raise {name}", *_savings(least, items, excess)]
    if n_samples > 1:
        advice.append("train in chunks (BigBatch)")
    elif sum(item.total for item in items if item.what == "activations") >= excess:
        # One sample cannot be cut, but these strategies need less memory for activations.
        strategies = "'checkpoint' or 'offload'" if on_device else "'checkpoint'"
        advice.append(f"give strategy={strategies} to a BigBatch")
    if len(advice) > 1:
        advice[-1] = f"or {advice[-1]}"
    samples = "1 sample" if n_samples == 1 else f"{n_samples} samples"
    return error(
        f"a batch of {samples} needs {human(need)} ({need} bytes): {uses}; {name} is "
        f"{human(limit or 0)} ({limit} bytes); {', '.join(advice)}"
    )


def _savings(least: Budget, items: Sequence[Allocation], excess: int) -> list[str]:
    """Return advice to lower depth and caches, if together they can save ``excess`` bytes."""
    depth = least.feeder.depth
    caches = [item for item in items if item.what == CACHES]
    # The synchronous loop needs at least one buffer of each kind, so depth=0 saves at most this.
    prefetched = sum((item.count - 1) * item.nbytes for item in items) if depth else 0
    if prefetched + sum(item.total for item in caches) < excess:
        return []
    advice = [f"lower depth (now {depth})"] if depth else []
    return [*advice, "lower device_cache"] if caches else advice


def largest_that_fits(need: Callable[[int], float], limit: float, most: int | None) -> int:
    """Return the largest ``n`` from 1 to ``most`` with ``need(n) <= limit``; 0 if there is none.

    ``need`` grows with ``n``, nearly linearly beyond some size. Interpolation finds the result in
    a few calls, and halving the interval bounds the number of calls.

    Args:
        need: Function that returns bytes or a share for ``n``. It is called once for each ``n``.
        limit: Largest result of ``need`` that fits.
        most: Largest ``n`` to try; None for no bound.
    """
    need = functools.cache(need)
    if need(1) > limit or most == 0:
        return 0
    fits = 1
    too_many = most or 2
    while need(too_many) <= limit:
        if too_many == most:
            return most
        fits = too_many
        too_many *= 4
    halve = False
    while too_many - fits > 1:
        share = 0.5 if halve else (limit - need(fits)) / (need(too_many) - need(fits))
        guess = min(max(fits + int(share * (too_many - fits)), fits + 1), too_many - 1)
        has_space = need(guess) <= limit
        excluded = guess - fits if has_space else too_many - guess
        # If the guess excluded less than half of the interval, the next guess halves it.
        halve = not halve and 2 * excluded < too_many - fits
        if has_space:
            fits = guess
        else:
            too_many = guess
    return fits

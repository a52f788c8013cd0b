"""StepMemory and Budget: memory of a training step, and of the step with its feeder in limits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tabulate import tabulate
from torch import nn

from pinfeed.errors import BudgetError, NotEnoughCPUMemory, NotEnoughGPUMemory
from pinfeed.memory.plan import Allocation, Plan, joined
from pinfeed.memory.units import human

Kind = Literal["cuda", "cpu"]


@dataclass(frozen=True, repr=False)
class StepMemory:
    """Peak memory of a training step, estimated or measured; ``print`` shows a table.

    Examples:
        >>> model = torch.nn.Linear(1000, 10)
        >>> step = pinfeed.estimate(model, 64, input_shape=(1000,))
        >>> step.breakdown["parameters"]
        40960
        >>> print(step)
        step of 64 samples...

    Attributes:
        batch_size: Samples in the batch.
        breakdown: Bytes at the peak by purpose: ``"parameters"``, ``"gradients"``,
            ``"activations"``, … In a step that was measured on a GPU, ``"activations"`` includes
            workspaces of libraries and what torch's allocator keeps for reuse.
        phases: Peak memory of tensors in the ``"forward"`` pass, the ``"backward"`` pass and the
            ``"optimizer"`` step, in bytes; if the step was measured on a GPU, the memory after the
            forward pass, the peak of both passes, and that of the optimizer step.
        n_parameters: Number of elements of the parameters that require gradients, and of the other
            ones.
        notes: Assumptions, and what was measured.
    """

    batch_size: int
    breakdown: Mapping[str, int]
    phases: Mapping[str, int]
    n_parameters: tuple[int, int]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Peak memory of the step, in bytes."""
        return sum(self.breakdown.values())

    def __repr__(self) -> str:
        rows = [
            (what, human(nbytes), f"{nbytes / max(1, self.nbytes):.1%}")
            for what, nbytes in self.breakdown.items()
            if nbytes
        ]
        rows.append(("total", human(self.nbytes), "100.0%"))
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
        ]
        return "\n".join([*lines, *self.notes])


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the elements of the parameters that require gradients, and of the other ones.

    A parameter that several modules share counts once.
    """
    n_trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return n_trainable, sum(p.numel() for p in model.parameters()) - n_trainable


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
        step: Memory of the step: measured on a GPU that is present, estimated otherwise.
        feeder: Plan of the feeder.
        other_bytes: Memory of the process besides step and feeder, in bytes. On a GPU, it was
            measured: CUDA's context, libraries, and other tensors. On the CPU, it is a share of the
            step, for freed memory that malloc keeps.
        cpu_memory_limit: Limit of host memory, in bytes.
        gpu_memory_limit: Limit of device memory, in bytes; None if training is on the CPU.
    """

    batch_size: int
    step: StepMemory
    feeder: Plan
    other_bytes: int
    cpu_memory_limit: int
    gpu_memory_limit: int | None

    @property
    def items(self) -> tuple[Allocation, ...]:
        """All allocations; the batch of the step counts once, as a batch buffer of the feeder."""
        place = "host" if self.gpu_memory_limit is None else "device"
        step = {name: nbytes for name, nbytes in self.step.breakdown.items() if name != "batch"}
        step["freed memory" if place == "host" else "context and others"] = self.other_bytes
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
        """Memory that is left neither for batches nor for other buffers of the feeder, in bytes."""
        return self.step.nbytes - self.step.breakdown["batch"] + self.other_bytes

    def __repr__(self) -> str:
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
        return "\n".join([*lines, *self.step.notes])


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
    advice = [f"raise {name}"]
    if sum(item.total for item in items if item not in least.feeder.items) < (limit or 0):
        # Without prefetched batches and caches, the batch may fit.
        advice += [f"lower depth (now {least.feeder.depth})"] if least.feeder.depth else []
        advice += ["lower device_cache"] if any(item.what == CACHES for item in items) else []
    if on_device or least.gpu_memory_limit is None:
        # The limit includes the training step.
        advice.append("train in chunks or with checkpoints (BigBatch)")
    return error(
        f"a batch of {counted(n_samples, 'sample')} needs {human(need)} ({need} bytes): {uses}; "
        f"{name} is {human(limit or 0)} ({limit} bytes); {', or '.join(advice)}"
    )


def counted(n: int, what: str) -> str:
    """Return a number of things as text: ``1 size``, ``2 sizes``."""
    return f"1 {what}" if n == 1 else f"{n} {what}s"


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

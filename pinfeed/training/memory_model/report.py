"""Estimate and Layer: memory of a training step by purpose, and the parameters of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tabulate import tabulate
from torch import nn

from pinfeed.memory.units import human
from pinfeed.validation.safe_repr import safe_repr

Confidence = Literal["exact", "close", "low"]
Kind = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Layer:
    """Parameters of one module, without those of its children.

    A parameter that several modules share counts for the first of these modules.

    Examples:
        >>> estimate = pinfeed.estimate(torch.nn.Linear(1000, 10), 64, input_shape=(1000,))
        >>> layer = estimate.layers[0]
        >>> layer.kind, layer.n_trainable
        ('Linear', 10010)

    Attributes:
        name: Name of the module; "" for the model.
        kind: Class of the module.
        n_trainable: Number of elements of parameters that require gradients.
        n_frozen: Number of elements of the other parameters.
        nbytes: Size of all parameters in bytes.
    """

    name: str
    kind: str
    n_trainable: int
    n_frozen: int
    nbytes: int


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
        layers: Parameters of each layer.
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
    layers: tuple[Layer, ...]
    confidence: Confidence
    notes: tuple[str, ...]

    @safe_repr
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
        n_trainable = sum(layer.n_trainable for layer in self.layers)
        n_frozen = sum(layer.n_frozen for layer in self.layers)
        lines = [
            table,
            f"peak by phase: {phases}",
            f"parameters: {n_trainable:,} trainable, {n_frozen:,} frozen",
            f"confidence: {self.confidence}",
        ]
        return "\n".join([*lines, *self.notes])

    def layer_table(self) -> str:
        """Return the parameters of each layer as a table."""
        rows = [
            (
                layer.name or "(model)",
                layer.kind,
                layer.n_trainable,
                layer.n_frozen,
                human(layer.nbytes),
            )
            for layer in self.layers
        ]
        return tabulate(
            rows, headers=("layer", "class", "trainable", "frozen", "memory"), intfmt=","
        )


def layers_of(model: nn.Module) -> tuple[Layer, ...]:
    """Return the layers that have parameters of their own; a shared parameter counts once."""
    seen: set[int] = set()
    found = []
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen |= {id(p) for p in own}
        if own:
            n_trainable = sum(p.numel() for p in own if p.requires_grad)
            n_frozen = sum(p.numel() for p in own if not p.requires_grad)
            nbytes = sum(p.numel() * p.element_size() for p in own)
            found.append(Layer(name, type(module).__name__, n_trainable, n_frozen, nbytes))
    return tuple(found)

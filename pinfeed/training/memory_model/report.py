"""Estimate and Layer: memory of a training step by purpose, and parameters of each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tabulate import tabulate
from torch import nn

from pinfeed.memory.units import human

Confidence = Literal["exact", "close", "low"]
Kind = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Layer:
    """Parameters of one module, without those of its children.

    A parameter that several modules share belongs to the first one.

    Attributes:
        name: Name of the module; "" for the model.
        kind: Class of the module.
        n_trainable: Elements of parameters that require gradients.
        n_frozen: Elements of the other parameters.
        nbytes: Bytes of all parameters.
    """

    name: str
    kind: str
    n_trainable: int
    n_frozen: int
    nbytes: int


@dataclass(frozen=True)
class Estimate:
    """Peak memory of a training step; ``str(estimate)`` is a table.

    Attributes:
        batch_size: Samples of the batch.
        allocated_bytes: Most bytes of tensors at a time.
        reserved_bytes: Most bytes that torch's allocator takes from the device for them; on the CPU
            the same as ``allocated_bytes``.
        breakdown: Bytes at the peak by purpose: ``"parameters"``, ``"gradients"``,
            ``"activations"``, …; ``"reserve"`` is the memory that the allocator holds beyond that.
        phases: Most bytes of tensors at a time in the ``"forward"`` and ``"backward"`` pass and in
            the ``"optimizer"``.
        layers: Parameters of each layer.
        confidence: ``"exact"``: no operation is known to take other memory.
            ``"close"``: within 5 % on the CPU; on a GPU, without the workspace of convolutions.
            ``"low"``: run ``probe``.
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

    def __str__(self) -> str:
        rows = [
            (what, human(nbytes), f"{nbytes / max(1, self.reserved_bytes):.1%}")
            for what, nbytes in self.breakdown.items()
            if nbytes
        ]
        rows.append(("in all", human(self.reserved_bytes), "100.0%"))
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
            f"most at a time: {phases}",
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
    """Return the layers that have parameters of their own, each parameter once."""
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

"""What an estimate says: where each byte of a training step goes, and which parameters a model has."""

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
    """Parameters that a module has itself, not those of the modules in it; a parameter that several have is the first one's.

    Attributes:
        name: Of the module; "" for the model.
        kind: Its class.
        n_trainable: Elements of parameters that want a gradient.
        n_frozen: Elements of the others.
        nbytes: Bytes of all of them.
    """

    name: str
    kind: str
    n_trainable: int
    n_frozen: int
    nbytes: int


@dataclass(frozen=True)
class Estimate:
    """What a training step takes. ``str(estimate)`` is a table.

    Attributes:
        batch_size: Samples in the batch.
        allocated_bytes: Most bytes of tensors at a time.
        reserved_bytes: Most bytes that torch's allocator takes from the device for them; on the CPU
            the same as ``allocated_bytes``.
        breakdown: Where each byte goes when most are taken, in bytes: ``"parameters"``,
            ``"gradients"``, ``"activations"``, …; ``"reserve"`` is what the allocator holds beyond
            that.
        phases: Most bytes of tensors at a time in the ``"forward"`` and ``"backward"`` pass and in
            the ``"optimizer"``.
        layers: Parameters, layer by layer.
        confidence: ``"exact"``: no operation is known to take anything else.
            ``"close"``: within 5 % on the CPU; on a GPU, without the workspace of convolutions.
            ``"low"``: ask ``probe``.
        notes: Why it is not exact, and what was assumed.
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
        n, frozen = (
            sum(getattr(layer, which) for layer in self.layers)
            for which in ("n_trainable", "n_frozen")
        )
        lines = [
            table,
            f"most at a time: {phases}",
            f"parameters: {n:,} trainable, {frozen:,} frozen",
            f"confidence: {self.confidence}",
        ]
        return "\n".join([*lines, *self.notes])

    def layer_table(self) -> str:
        """Parameters of each layer, as a table."""
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
    """The layers that have parameters, each parameter once."""
    seen: set[int] = set()
    found = []
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen |= {id(p) for p in own}
        if own:
            trainable, frozen = (
                sum(p.numel() for p in own if p.requires_grad == wanted) for wanted in (True, False)
            )
            found.append(
                Layer(
                    name,
                    type(module).__name__,
                    trainable,
                    frozen,
                    sum(p.numel() * p.element_size() for p in own),
                )
            )
    return tuple(found)

"""How far an estimate is to be trusted: what its model and its operations take that is not known exactly."""

from __future__ import annotations

import torch
from torch import nn

from .report import Confidence, Kind
from .tracking import Tracker

_RANKS: tuple[Confidence, ...] = ("exact", "close", "low")


def confidence_in(model: nn.Module, tracker: Tracker, device: Kind, autocast: torch.dtype | None) -> tuple[Confidence, list[str]]:
    """The confidence in a step that was tracked, and the reasons for it."""
    found: list[tuple[Confidence, str]] = []
    convolutions = {type(module).__name__ for module in model.modules() if isinstance(module, nn.modules.conv._ConvNd)}
    if convolutions:
        found.append(_of_convolutions(", ".join(sorted(convolutions)), device))
    if autocast is not None:
        found.append(("close", "autocast: which operations run in which dtype was taken from the CPU's list"))
    found += _of_recurrent({type(module) for module in model.modules() if isinstance(module, nn.RNNBase)}, device, autocast)
    if tracker.foreign:
        names = ", ".join(sorted(tracker.foreign))
        found.append(("low", f"{names}: what these operations take while they run is not seen; run probe()"))
    confidence = max((rank for rank, _ in found), key=_RANKS.index, default="exact")
    return confidence, [note for _, note in found]


def _of_convolutions(names: str, device: Kind) -> tuple[Confidence, str]:
    if device == "cuda":
        return "close", f"{names}: what a convolution takes while it runs is not seen; up to some percent more"
    if "AVX" not in torch.backends.cpu.get_cpu_capability():
        return "low", f"{names}: what a convolution takes while it runs is known of CPUs with AVX2 or AVX-512 only; run probe()"
    return "close", f"{names}: what a convolution takes while it runs follows oneDNN's layouts; measured within 5 %"


def _of_recurrent(kinds: set[type], device: Kind, autocast: torch.dtype | None) -> list[tuple[Confidence, str]]:
    unsure = device == "cuda" or autocast is not None
    names = ", ".join(sorted(kind.__name__ for kind in kinds if unsure or issubclass(kind, nn.LSTM)))
    if not names:
        # On the CPU other recurrent layers are made of operations that are seen.
        return []
    if unsure:
        return [("low", f"{names}: its kernels keep more than is seen here; run probe()")]
    return [("close", f"{names}: what its layers keep follows oneDNN's layouts; measured within 3 %")]

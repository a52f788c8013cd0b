"""How far an estimate is to be trusted: what its model takes that is not known exactly."""

from __future__ import annotations

import torch
from torch import nn

from .report import Confidence, Kind
from .tracking import Tracker

_RANKS: tuple[Confidence, ...] = ("exact", "close", "low")


def confidence_in(
    model: nn.Module,
    tracker: Tracker,
    device: Kind,
    autocast: torch.dtype | None,
) -> tuple[Confidence, list[str]]:
    """The confidence in a step that was tracked, and the reasons for it."""
    found: list[tuple[Confidence, str]] = []
    kinds = {type(module) for module in model.modules()}
    convolutions = [kind for kind in kinds if issubclass(kind, nn.modules.conv._ConvNd)]
    found += _of_convolutions(convolutions, device)
    if autocast is not None:
        note = "autocast: which operations run in which dtype was taken from the CPU's list"
        found.append(("close", note))
    recurrent = [kind for kind in kinds if issubclass(kind, nn.RNNBase)]
    found += _of_recurrent(recurrent, is_known=device == "cpu" and autocast is None)
    if tracker.foreign:
        names = ", ".join(sorted(tracker.foreign))
        note = "what these operations take while they run is not seen; run probe()"
        found.append(("low", f"{names}: {note}"))
    worst = max((_RANKS.index(rank) for rank, _ in found), default=0)
    return _RANKS[worst], [note for _, note in found]


def _of_convolutions(kinds: list[type], device: Kind) -> list[tuple[Confidence, str]]:
    if not kinds:
        return []
    taken = f"{_names(kinds)}: what a convolution takes while it runs"
    if device == "cuda":
        return [("close", f"{taken} is not seen; up to some percent more")]
    if "AVX" not in torch.backends.cpu.get_cpu_capability():
        return [("low", f"{taken} is known of CPUs with AVX2 or AVX-512 only; run probe()")]
    return [("close", f"{taken} follows oneDNN's layouts; measured within 5 %")]


def _of_recurrent(kinds: list[type], *, is_known: bool) -> list[tuple[Confidence, str]]:
    if kinds and not is_known:
        return [("low", f"{_names(kinds)}: its kernels keep more than is seen here; run probe()")]
    # On the CPU other recurrent layers are made of operations that are seen.
    lstms = [kind for kind in kinds if issubclass(kind, nn.LSTM)]
    if not lstms:
        return []
    note = "what its layers keep follows oneDNN's layouts; measured within 3 %"
    return [("close", f"{_names(lstms)}: {note}")]


def _names(kinds: list[type]) -> str:
    return ", ".join(sorted(kind.__name__ for kind in kinds))

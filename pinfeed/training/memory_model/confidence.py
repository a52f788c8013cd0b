"""Confidence in an estimate, determined by the layers and operations of the model."""

from __future__ import annotations

import os

import torch
from torch import nn

from pinfeed.training.memory_model.report import Confidence, Kind
from pinfeed.training.memory_model.storage_tracker import StorageTracker

_RANKS: tuple[Confidence, ...] = ("exact", "close", "low")
_MOST_THREADS = 2
"""Most threads of the measured layouts; with more threads, weight gradients take much more."""
_VARIABLES = ("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA")
"""Environment variables that make torch or oneDNN compute as on another CPU."""
_NOT_MEASURED = (
    f"was measured only in float32, with AVX2 or AVX-512 and up to {_MOST_THREADS} threads; this "
    "step may take much more; run probe()"
)


def confidence_in(
    model: nn.Module,
    tracker: StorageTracker,
    device: Kind,
    autocast: torch.dtype | None,
) -> tuple[Confidence, list[str]]:
    """Return the confidence in the estimate of a tracked step, and the reasons for it."""
    found: list[tuple[Confidence, str]] = []
    kinds = {type(module) for module in model.modules()}
    convolutions = [kind for kind in kinds if issubclass(kind, nn.modules.conv._ConvNd)]
    measured = _were_measured(model, autocast)
    found += _convolution_confidence(convolutions, device, are_measured=measured)
    if autocast is not None:
        note = "autocast: the dtype of each operation follows the CPU's list of autocast operations"
        found.append(("close", note))
    recurrent = [kind for kind in kinds if issubclass(kind, nn.RNNBase)]
    found += _recurrent_confidence(recurrent, device, are_measured=measured)
    halves = {p.dtype for p in model.parameters()} | {autocast}
    if device == "cpu" and not halves.isdisjoint({torch.float16, torch.bfloat16}):
        note = "half precision: CPU operations take an unknown amount of temporary memory"
        found.append(("low", f"{note}; run probe()"))
    if tracker.foreign:
        names = ", ".join(sorted(tracker.foreign))
        note = "the temporary memory of these operations is unknown; run probe()"
        found.append(("low", f"{names}: {note}"))
    worst = max((_RANKS.index(rank) for rank, _ in found), default=0)
    return _RANKS[worst], [note for _, note in found]


def _were_measured(model: nn.Module, autocast: torch.dtype | None) -> bool:
    """Return whether oneDNN's layouts were measured with this CPU, these threads and dtypes."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return (
        torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        and os.environ.keys().isdisjoint(_VARIABLES)
        and torch.get_num_threads() <= _MOST_THREADS
        and autocast is None
        and dtypes <= {torch.float32}
    )


def _convolution_confidence(
    kinds: list[type],
    device: Kind,
    *,
    are_measured: bool,
) -> list[tuple[Confidence, str]]:
    if not kinds:
        return []
    taken = f"{_names(kinds)}: the temporary memory of convolutions"
    if device == "cuda":
        return [("close", f"{taken} is unknown; the step may take a few percent more")]
    if not are_measured:
        return [("low", f"{taken} {_NOT_MEASURED}")]
    return [("close", f"{taken} follows oneDNN's layouts; measured within 5 %")]


def _recurrent_confidence(
    kinds: list[type],
    device: Kind,
    *,
    are_measured: bool,
) -> list[tuple[Confidence, str]]:
    if kinds and device == "cuda":
        names = _names(kinds)
        return [("low", f"{names}: CUDA kernels keep an unknown amount of memory; run probe()")]
    # On the CPU, other recurrent layers consist of operations that the tracker knows.
    lstms = [kind for kind in kinds if issubclass(kind, nn.LSTM)]
    if not lstms:
        return []
    kept = f"{_names(lstms)}: the memory that LSTM layers keep for the backward pass"
    if not are_measured:
        return [("low", f"{kept} {_NOT_MEASURED}")]
    return [("close", f"{kept} follows oneDNN's layouts; measured within 5 %")]


def _names(kinds: list[type]) -> str:
    return ", ".join(sorted(kind.__name__ for kind in kinds))

"""Precision of comparisons: float32 without TF32, or float64."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pinfeed.tensors.pytree import flatten
from pinfeed.training.large_batch.equivalence.conditions import StepSamples
from pinfeed.training.large_batch.strategies.step_spec import StepSpec


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute in float32 without TF32, because TF32's rounding depends on the batch size."""
    if device.type != "cuda":
        yield
        return
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = []
    # If the program has used newer settings, torch refuses these, and the newer ones stay.
    with contextlib.suppress(RuntimeError):
        for setting in settings:
            before.append((setting, setting.allow_tf32))
            setting.allow_tf32 = False
    try:
        yield
    finally:
        for setting, is_allowed in before:
            setting.allow_tf32 = is_allowed


def spec_in_float64(spec: StepSpec) -> StepSpec:
    """Return the spec with copies of its modules in float64."""
    modules = [module.double() for module in copy.deepcopy(list(spec.modules))]
    loss = spec.loss
    if isinstance(loss, nn.Module):
        loss = modules[list(spec.modules).index(loss)]
    return replace(spec, model=modules[0], modules=modules, loss=loss)


def samples_in_float64(samples: StepSamples) -> StepSamples:
    """Return the samples with their floating-point tensors in float64."""
    targets = None if samples.targets is None else _in_float64(samples.targets)
    return replace(samples, inputs=_in_float64(samples.inputs), targets=targets)


def _in_float64(batch: Any) -> Any:
    leaves, rebuild = flatten(batch)
    return rebuild(_as_double(leaf) for _, leaf in leaves)


def _as_double(leaf: Any) -> Any:
    is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.double() if is_float else leaf

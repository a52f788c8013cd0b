"""Modules that normalize over the batch."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norms(model: nn.Module) -> list[str]:
    """Return the modules that normalize over the batch, such as ``module '1' (BatchNorm1d)``.

    Their output for a sample depends on the other samples of its chunk.
    """
    modules = model.named_modules()
    norms = [(name, module) for name, module in modules if isinstance(module, _BatchNorm)]
    return [
        f"module {name!r} ({type(norm).__name__})" if name else f"the model ({type(norm).__name__})"
        for name, norm in norms
        if norm.training or norm.running_mean is None
    ]

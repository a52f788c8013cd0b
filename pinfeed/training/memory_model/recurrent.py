"""LSTMs on the CPU: oneDNN computes a layer at a time and keeps a workspace for the backward pass.

On tensors without data torch decomposes them. The decomposition keeps other tensors, and the
operation itself reports an empty workspace there. Its size was read from the allocations of single
layers; its parts are those that oneDNN lays out in ``rnn_utils.cpp``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pinfeed.training.memory_model.convolutions import Stage

_LSTM = 2
"""The number by which torch identifies an LSTM among its kinds of recurrent layers."""


@contextlib.contextmanager
def as_on_cpu() -> Iterator[None]:
    """Have LSTMs on tensors without data run the operations that they run with data."""
    from torch._subclasses.fake_tensor import FakeTensor

    decomposed = torch._VF.lstm

    def lstm(x: Any, hx: Any, *rest: Any) -> Any:
        # A packed sequence has its batch sizes, a tensor, in the place of the states.
        is_packed = isinstance(hx, torch.Tensor)
        is_plain = isinstance(x, FakeTensor) and x.dtype == torch.float32 and not is_packed
        has_onednn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
        if has_onednn and is_plain and _has_no_projection(rest[0], rest[1], rest[2], rest[5]):
            return _by_layers(x, hx, *rest)
        return decomposed(x, hx, *rest)

    torch._VF.lstm = lstm  # type: ignore[assignment]
    try:
        yield
    finally:
        torch._VF.lstm = decomposed


def _has_no_projection(
    weights: Sequence[Any],
    has_biases: bool,
    n_layers: int,
    both_ways: bool,
) -> bool:
    return len(weights) == (4 if has_biases else 2) * n_layers * (2 if both_ways else 1)


def _by_layers(
    x: torch.Tensor,
    hx: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    n_layers: int,
    dropout: float,
    train: bool,
    both_ways: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Do as ``mkldnn_rnn`` does in torch's ``aten/src/ATen/native/mkldnn/RNN.cpp``."""
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    n_ways, n_each = 1 + both_ways, 4 if has_biases else 2
    last: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in range(n_layers):
        outputs = []
        for way in range(n_ways):
            i = layer * n_ways + way
            own = list(weights[i * n_each : (i + 1) * n_each])
            # Biases that are not there are zeros in the shape of the weights.
            own += [] if has_biases else [torch.zeros_like(weight) for weight in own]
            state = hx[0][i], hx[1][i]
            size = hx[0].shape[2]
            how: Any = way == 1, [], _LSTM, size, n_layers, has_biases, both_ways, False, train
            y, h, c, _ = torch.ops.aten.mkldnn_rnn_layer(x, *own, *state, *how)
            outputs.append(y)
            last.append((h, c))
        x = outputs[0] if n_ways == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < n_layers - 1:
            x = torch.dropout(x, dropout, True)
    h, c = (torch.stack(states) for states in zip(*last, strict=True))
    return x.transpose(0, 1) if batch_first else x, h, c


def with_workspace(args: Sequence[Any], out: Any) -> Any:
    """The results of ``aten.mkldnn_rnn_layer``, with a workspace of the size that it has."""
    if not torch.is_grad_enabled():
        return out
    x, hidden = args[0], args[10]
    length, n, n_in = x.shape
    wide, tall = _leading(max(n_in, hidden)), _leading(hidden)
    floats = length * (_leading(4 * hidden) + tall) + (length + 1) * (6 * wide + 4 * tall)
    return *out[:3], torch.empty(4 * n * floats, dtype=torch.uint8)


def stages(args: Sequence[Any], _: Any) -> list[Stage]:
    """The forward pass takes the weights in another layout, and the gates."""
    return [(_weights(args) + _gates(args[0], args[10]), 4)]


def stages_backward(args: Sequence[Any], _: Any) -> list[Stage]:
    """The backward pass takes weights and their gradients in other layouts, and the gates."""
    return [(2 * _weights(args) + _gates(args[0], args[15]), 7)]


def _weights(args: Sequence[Any]) -> int:
    return 4 * sum(int(weight.numel()) for weight in args[1:3])


def _gates(x: torch.Tensor, hidden: int) -> int:
    length, n, _ = x.shape
    return 16 * length * n * hidden


def _leading(n: int) -> int:
    """Elements of a row, as oneDNN pads them."""
    padded = -(-n // 16) * 16
    return padded + 16 if padded % 256 == 0 else padded

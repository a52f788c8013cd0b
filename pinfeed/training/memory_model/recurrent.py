"""LSTMs on the CPU: oneDNN computes a layer at a time and keeps a workspace for the backward pass.

On tensors without data, torch decomposes LSTMs. The decomposition keeps other tensors, and the
operation itself reports an empty workspace. The size of the workspace was read from the allocations
of single layers; its parts are those that oneDNN lays out in ``rnn_utils.cpp``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pinfeed.training.memory_model.convolutions import Stage

_LSTM = 2
"""The number by which torch identifies an LSTM among its kinds of recurrent layers."""


@contextlib.contextmanager
def as_on_cpu() -> Iterator[None]:
    """Make LSTMs on tensors without data run the operations that they run with data."""
    from torch._subclasses.fake_tensor import FakeTensor

    decomposed = torch._VF.lstm

    def lstm(x: Any, hx: Any, *rest: Any) -> Any:
        # For a packed sequence the second argument is a tensor, its batch sizes.
        is_packed = isinstance(hx, torch.Tensor)
        is_plain = isinstance(x, FakeTensor) and x.dtype == torch.float32 and not is_packed
        has_onednn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
        if has_onednn and is_plain and _has_no_projection(rest[0], rest[1], rest[2], rest[5]):
            return _lstm_by_layers(x, hx, _LstmArguments(*rest))
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


@dataclass(frozen=True)
class _LstmArguments:
    """Arguments of torch's ``lstm`` after the input and the states, in its order."""

    weights: Sequence[torch.Tensor]
    has_biases: bool
    n_layers: int
    dropout: float
    train: bool
    both_ways: bool
    batch_first: bool


def _lstm_by_layers(
    x: torch.Tensor, hx: Sequence[torch.Tensor], lstm: _LstmArguments
) -> tuple[torch.Tensor, ...]:
    """Compute an LSTM as ``mkldnn_rnn`` does in torch's ``aten/src/ATen/native/mkldnn/RNN.cpp``."""
    x = (x.transpose(0, 1) if lstm.batch_first else x).contiguous()
    n_ways = 2 if lstm.both_ways else 1
    last: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in range(lstm.n_layers):
        outputs = []
        for way in range(n_ways):
            y, h, c = _direction(x, hx, lstm, layer * n_ways + way, is_reverse=way == 1)
            outputs.append(y)
            last.append((h, c))
        x = outputs[0] if n_ways == 1 else torch.cat(outputs, -1)
        if lstm.dropout and lstm.train and layer < lstm.n_layers - 1:
            x = torch.dropout(x, lstm.dropout, True)
    h, c = (torch.stack(states) for states in zip(*last, strict=True))
    return x.transpose(0, 1) if lstm.batch_first else x, h, c


def _direction(
    x: torch.Tensor, hx: Sequence[torch.Tensor], lstm: _LstmArguments, i: int, *, is_reverse: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute one direction of a layer, with weights and states number ``i``."""
    n_each = 4 if lstm.has_biases else 2
    own = list(lstm.weights[i * n_each : (i + 1) * n_each])
    # Missing biases are zeros in the shape of the weights.
    own += [] if lstm.has_biases else [torch.zeros_like(weight) for weight in own]
    size = hx[0].shape[2]
    options: tuple[Any, ...] = (
        is_reverse,
        [],
        _LSTM,
        size,
        lstm.n_layers,
        lstm.has_biases,
        lstm.both_ways,
        False,
        lstm.train,
    )
    y, h, c, _ = torch.ops.aten.mkldnn_rnn_layer(x, *own, hx[0][i], hx[1][i], *options)
    return y, h, c


def with_workspace(args: Sequence[Any], out: Any) -> Any:
    """Return the results of ``aten.mkldnn_rnn_layer`` with a workspace of its real size."""
    if not torch.is_grad_enabled():
        return out
    x, hidden = args[0], args[10]
    length, n, n_in = x.shape
    wide = _leading(max(n_in, hidden))
    tall = _leading(hidden)
    floats = length * (_leading(4 * hidden) + tall) + (length + 1) * (6 * wide + 4 * tall)
    return *out[:3], torch.empty(4 * n * floats, dtype=torch.uint8)


def stages(args: Sequence[Any], _: Any) -> list[Stage]:
    """Return the stages of the forward pass: weights in another layout, and the gates."""
    return [(_weights(args) + _gates(args[0], args[10]), 4)]


def stages_backward(args: Sequence[Any], _: Any) -> list[Stage]:
    """Return the stages of the backward pass: weights, their gradients, and the gates."""
    return [(2 * _weights(args) + _gates(args[0], args[15]), 7)]


def _weights(args: Sequence[Any]) -> int:
    return 4 * sum(int(weight.numel()) for weight in args[1:3])


def _gates(x: torch.Tensor, hidden: int) -> int:
    length, n, _ = x.shape
    return 16 * length * n * hidden


def _leading(n: int) -> int:
    """Return the elements of a row of ``n`` elements as oneDNN pads it."""
    padded = -(-n // 16) * 16
    return padded + 16 if padded % 256 == 0 else padded

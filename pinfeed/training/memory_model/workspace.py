"""Workspace of torch's operations on the CPU: memory that they hold only while they run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._python_dispatch import _disable_current_modes

from pinfeed.training.memory_model import recurrent
from pinfeed.training.memory_model.convolutions import Convolution, Stage

_SMALL_IMAGE = 128
"""Largest sum of height and width of images that upsampling copies to channels last."""


def results_of(func: Any, args: Sequence[Any], out: Any) -> Any:
    """Return the results of an operation, with the memory that they have on the CPU."""
    found = _RESULTS.get(str(func))
    return found(args, out) if found is not None else out


def stages_of(func: Any, args: Sequence[Any], out: Any) -> list[Stage]:
    """Return the stages of the operation that returned ``out``; empty if no workspace is known."""
    found = _STAGES.get(str(func))
    return found(args, out) if found is not None else []


def _convolution(args: Sequence[Any], y: torch.Tensor) -> list[Stage]:
    x, w, bias, *how = args[:9]
    return _convolved(x, w, y, how, None, has_bias=bias is not None)


def _convolution_backward(args: Sequence[Any], _out: Any) -> list[Stage]:
    grad, x, w, _, *how, mask = args[:11]
    return _convolved(x, w, grad, how, mask, has_bias=False)


def _convolved(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    how: Sequence[Any],
    mask: Sequence[bool] | None,
    *,
    has_bias: bool,
) -> list[Stage]:
    stride, padding, dilation, transposed, _, groups = how
    first, last = (y, x) if transposed else (x, y)
    n = x.dim() - 2
    one = Convolution(
        x=tuple(first.shape),
        w=tuple(w.shape),
        y=tuple(last.shape),
        stride=_each(stride, n),
        padding=_each(padding, n),
        dilation=_each(dilation, n),
        groups=groups,
        itemsize=x.element_size(),
        n_threads=torch.get_num_threads(),
        block=16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8,
    )
    formats = [suggest_memory_format(tensor) for tensor in (x, w)]
    form = formats[0] if formats[1] == torch.contiguous_format else formats[1]
    # An operand in another format is copied first.
    ends = [tensor for tensor in (x, y) if not tensor.is_contiguous(memory_format=form)]
    copied = _nbytes(*ends)
    backend = _backend(x, w, how)
    if "Slow" in backend:
        stages = _columns(backend, one, mask)
    elif form != torch.contiguous_format:
        # The kernels read channels-last images directly, but copy the weight and its gradient.
        stages = [(2 * one.plain[1], 1)]
    else:
        stages = _copies(one, mask, transposed=transposed, has_bias=has_bias)
    return [(nbytes + copied, n_there) for nbytes, n_there in stages]


def _copies(
    one: Convolution,
    mask: Sequence[bool] | None,
    *,
    transposed: bool,
    has_bias: bool,
) -> list[Stage]:
    if mask is None:
        return one.input_stages(has_bias=has_bias) if transposed else one.forward_stages()
    ends = (one.forward_stages() if transposed else one.input_stages()) if mask[0] else []
    return [*ends, *(one.weight_stages(int(mask[0])) if mask[1] else [])]


def _each(value: Sequence[int], n: int) -> tuple[int, ...]:
    """Return one number for each dimension; a single number applies to all dimensions."""
    return tuple(value) if len(value) == n else tuple(value) * n


def _columns(backend: str, one: Convolution, mask: Sequence[bool] | None) -> list[Stage]:
    """Return the stages of torch's kernels: columns of all samples, or of one sample at a time."""
    if one.groups > 1:
        # Groups are computed one after another and their results are copied together.
        return [(one.plain[2], 1)] if mask is None else [(one.plain[0], int(mask[0]))]
    if "Slow2d" in backend and math.prod(one.w[2:]) == 1 and max(one.stride) == 1:
        return []
    in_turn = "Dilated" in backend or "Transpose" in backend
    depth = math.prod(one.y[2:-2])
    columns = one.columns * depth * (1 if in_turn else one.x[0])
    if mask is None:
        return [(columns, 1)]
    return [(columns, int(mask[0])), (columns, int(mask[0]) + int(mask[1]))]


def _backend(x: torch.Tensor, w: torch.Tensor, how: Sequence[Any]) -> str:
    """Return the kernel that torch picks for tensors of these shapes."""
    with _disable_current_modes():
        whole = [torch.empty((), dtype=tensor.dtype).expand(tensor.shape) for tensor in (x, w)]
        return str(torch._C._select_conv_backend(*whole, None, *how))


def _upsampled(args: Sequence[Any], y: torch.Tensor) -> list[Stage]:
    """Return the stages of upsampling: small images are copied to channels last and back."""
    is_small = sum(y.shape[2:]) <= _SMALL_IMAGE and args[0].is_contiguous()
    return [(_nbytes(args[0], y), 1)] if is_small else []


def _loss(args: Sequence[Any], _: Any) -> list[Stage]:
    """Return the stages of a loss: a loss of each element, before the reduction."""
    is_reduced = len(args) < 3 or args[2] != 0
    return [(_nbytes(args[0]), 1)] if is_reduced else []


def _whole(args: Sequence[Any], out: Any) -> Any:
    """Return a reduced loss in memory that could hold the losses of all elements."""
    return torch.empty_like(args[0]).as_strided((), ()) if out.dim() == 0 else out


def _binary_loss(args: Sequence[Any], _: Any) -> list[Stage]:
    """Return the stages of binary cross entropy: two losses of each element."""
    return [(2 * _nbytes(args[0]), 0)]


def _group_norm_backward(args: Sequence[Any], _: Any) -> list[Stage]:
    """Return the stages of group norm's backward: two sums per channel and sample."""
    _, x, _, _, _, n, n_channels = args[:7]
    return [(2 * n * n_channels * x.element_size(), 3)]


def _attention(args: Sequence[Any], _: Any) -> list[Stage]:
    """Return the stages of attention: scores and results of a tile, in each thread."""
    query, key = args[:2]
    rows, columns = _tile(query, key)
    floats = rows * (columns + query.shape[3] + 2)
    return [(4 * floats * torch.get_num_threads(), 1)]


def _attention_backward(args: Sequence[Any], _: Any) -> list[Stage]:
    """Return the stages of attention's backward: scores of a tile and gradients, in each thread.

    The kernel needs the heads of a position next to each other in memory, and copies a gradient
    with another layout.
    """
    rows, columns = _tile(*args[1:3])
    copied = 0 if args[0].transpose(1, 2).is_contiguous() else _nbytes(args[0])
    return [(8 * rows * columns * torch.get_num_threads() + copied, 3)]


def _tile(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    n = query.shape[2]
    return min(n, 256 if n >= 768 else 64 if n >= 192 else 32), min(512, key.shape[2])


def _nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


_STAGES: dict[str, Callable[[Sequence[Any], Any], list[Stage]]] = {
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten.native_batch_norm_backward.default": lambda args, _: [(_nbytes(args[1]), 1)],
    "aten.upsample_nearest2d.default": _upsampled,
    "aten.upsample_bilinear2d.default": _upsampled,
    "aten.mse_loss.default": _loss,
    "aten.smooth_l1_loss.default": _loss,
    "aten.huber_loss.default": _loss,
    "aten.binary_cross_entropy_with_logits.default": _binary_loss,
    "aten.logsumexp.default": lambda args, _: [(_nbytes(args[0]), 0)],
    # A mask of bytes marks rows that are masked as a whole.
    "aten._safe_softmax.default": lambda args, _: [(args[0].numel(), 1)],
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    "aten.mkldnn_rnn_layer.default": recurrent.stages,
    "aten.mkldnn_rnn_layer_backward.default": recurrent.stages_backward,
}
_RESULTS: dict[str, Callable[[Sequence[Any], Any], Any]] = {
    "aten.mkldnn_rnn_layer.default": recurrent.with_workspace,
    "aten.binary_cross_entropy.default": _whole,
    "aten.mse_loss.default": _whole,
    "aten.smooth_l1_loss.default": _whole,
}

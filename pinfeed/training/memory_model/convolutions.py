"""Temporary memory of a convolution on the CPU: copies of its operands, or columns.

oneDNN computes on copies in which the channels are in blocks of a vector's length, so each operand
is in memory twice for a while. The rules for choosing the kernel were derived from the allocations
of single convolutions, over sizes of kernels, strides, dilations, groups and channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Stage = tuple[int, int]
"""Bytes that an operation holds for itself, and how many of its results exist at that time."""

_FEW = 3
"""Largest number of input channels that the gradient of the weight reads without a copy."""

_CHUNK = 3 << 19
"""Bytes of columns that a forward pass by matrices makes at a time; they fit in a core's cache."""


@dataclass(frozen=True)
class Convolution:
    """A convolution. A transposed one is the gradient of a plain one, and reads its result ``y``.

    Attributes:
        x: The shape of the input.
        w: The shape of the weight.
        y: The shape of the result.
        stride: One number for each dimension.
        padding: One number for each dimension.
        dilation: One number for each dimension.
        groups: Number of groups of channels.
        itemsize: Bytes of an element.
        n_threads: Number of threads, each with columns of its own.
        block: Channels of a block, the floats in the longest vector of the CPU.
    """

    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    itemsize: int
    n_threads: int
    block: int

    @property
    def plain(self) -> tuple[int, int, int]:
        """Bytes of x, w and y in torch's layout."""
        x, w, y = (math.prod(shape) * self.itemsize for shape in (self.x, self.w, self.y))
        return x, w, y

    @property
    def channels(self) -> tuple[int, int]:
        """Channels of a group in x and in y."""
        return self.x[1] // self.groups, self.y[1] // self.groups

    @property
    def is_depthwise(self) -> bool:
        return self.groups > 1 and self.channels == (1, 1)

    @property
    def is_dilated(self) -> bool:
        return max(self.dilation) > 1

    @property
    def reaches(self) -> list[int]:
        """Distance from the first element of the kernel to the last one, in each dimension."""
        return [d * (k - 1) for d, k in zip(self.dilation, self.w[2:], strict=True)]

    @property
    def columns(self) -> int:
        """Bytes of the columns of one sample, group and slice in depth."""
        taps = math.prod(self.w[2:])
        return taps * self.channels[0] * math.prod(self.y[2:][-2:]) * self.itemsize

    def forward_stages(self) -> list[Stage]:
        """Return the stages of computing y from x and w."""
        far = 31 // (1 + min(4, -(-self.channels[1] // self.block)))
        if not self._in_groups_of(4) or (not self.is_depthwise and max(self.padding) > far):
            return self._by_matrices(min(self.columns, _CHUNK) * self.n_threads, self.plain[2], 0)
        x, w, y = self._blocked(self.block)
        copies = 2 if self.is_depthwise and len(self.w) == 5 else 1
        if self.groups == 1 and self.x[1] < self.block and math.prod(self.w[2:]) > 1:
            x, w = 0, self._narrow_weight
        return [(x + w + y, 0), (copies * y, 1)]

    def input_stages(self, *, has_bias: bool = False) -> list[Stage]:
        """Return the stages of computing x from y and w; transposed ones may have a bias."""
        is_strided = max(self.stride) > 1
        beyond = max(reach - p for reach, p in zip(self.reaches, self.padding, strict=True))
        far = beyond > (7 if len(self.w) == 3 else 16)
        special = is_strided and self.is_dilated
        special |= self.is_depthwise and (self.is_dilated or len(self.w) == 5)
        is_wide = self.groups == 1 or max(self.channels) >= 16
        if is_strided and is_wide and not special:
            # Strided kernels write channels last, from which torch makes two more copies.
            x, w, y = self.plain
            is_even = all(n % s == 0 for n, s in zip(self.x[2:], self.stride, strict=True))
            n_copies = 2 if self.x[1] > 1 else 1
            return [(x + w + y + (0 if is_even else x), 0), (n_copies * x, 1)]
        if not self._in_groups_of(4) or special or far:
            return self._by_matrices(self.columns * self.n_threads, self.plain[0], 0)
        x, w, y = self._blocked(self.block)
        # A kernel of blocks adds the bias afterwards, from memory of its own.
        return [(x + w + y + (x if has_bias else 0), 0), (x, 1)]

    def weight_stages(self, n_before: int) -> list[Stage]:
        """Return the stages of computing w from x and y, after ``n_before`` results."""
        few = self.groups == 1 and _FEW < self.x[1] < self.block
        most = [min(16, (reach + 1) // 2) for reach in self.reaches]
        wide = any(p > bound for p, bound in zip(self.padding, most, strict=True))
        special = few and (self.is_dilated or len(self.w) == 5)
        special |= self.is_dilated and (max(self.stride) > 1 or len(self.w) == 5)
        is_large = max(self.w[2:]) > 3 or self.is_dilated or len(self.w) == 5
        special |= self.is_depthwise and is_large
        # The kernel of AVX2 computes neither dilated weights nor padded volumes.
        is_volume = len(self.w) == 5 and max(self.padding) > 0
        special |= self.block == 8 and not self.is_depthwise and (self.is_dilated or is_volume)
        if not self._in_groups_of(8) or special or wide:
            return self._by_matrices(self.columns + 4 * self.plain[1], self.plain[1], n_before)
        x, w, y = self._blocked(8 if few else self.block)
        if self.groups == 1 and self.x[1] <= _FEW:
            x, w = 0, self._narrow_weight
        return [(x + w + y, n_before), (w, n_before + 1)]

    @property
    def _narrow_weight(self) -> int:
        """Bytes of a weight in blocks of y's channels only."""
        return self.plain[1] // self.y[1] * _padded(self.y[1], self.block)

    def _in_groups_of(self, n: int) -> bool:
        """Return whether groups are convolved in blocks: each has a multiple of ``n`` channels."""
        fits = all(found % n == 0 for found in self.channels)
        return self.groups == 1 or self.is_depthwise or fits

    def _by_matrices(self, columns: int, nbytes: int, n_before: int) -> list[Stage]:
        return [(columns + nbytes, n_before), (nbytes, n_before + 1)]

    def _blocked(self, block: int) -> tuple[int, int, int]:
        """Return the bytes of x, w and y in blocks of channels."""
        x, w, y = self.plain
        if self.is_depthwise:
            padded = _padded(self.groups, block)
            return x // self.groups * padded, w // self.groups * padded, y // self.groups * padded
        if self.groups > 1:
            return x, w, y
        n_in, n_out = self.channels
        wide, tall = _padded(n_in, block), _padded(n_out, block)
        return x // n_in * wide, w // (n_in * n_out) * wide * tall, y // n_out * tall


def _padded(n: int, block: int) -> int:
    return -(-n // block) * block

"""HostEmbeddingBag: an embedding table that reduces the rows of each bag to one row."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from pinfeed.errors import ArgumentError
from pinfeed.tensors.argument_types import Ids
from pinfeed.training.embeddings.table import HostEmbedding
from pinfeed.training.embeddings.table_arguments import integer_tensor
from pinfeed.validation.arguments import check_flag


class HostEmbeddingBag(HostEmbedding):
    """A ``HostEmbedding`` that reduces the rows of each bag, like ``torch.nn.EmbeddingBag``.

    If the rows of a batch do not include the padding row, torch sums weighted bags in another
    order. The last bit may then differ from ``nn.EmbeddingBag``.

    Examples:
        >>> words = pinfeed.HostEmbeddingBag(1_000, 16, mode="sum", name="words")
        >>> with torch.no_grad():
        ...     sums = words(torch.tensor([1, 2, 3, 4]), offsets=torch.tensor([0, 3]))
        >>> sums.shape
        torch.Size([2, 16])

    Args:
        num_embeddings: As for ``HostEmbedding``.
        embedding_dim: As for ``HostEmbedding``.
        mode: Reduction of a bag: ``"sum"``, ``"mean"`` or ``"max"``.
        include_last_offset: Whether ``offsets`` has one more entry, the number of ids, as in
            ``nn.EmbeddingBag``.
        options: As for ``HostEmbedding``.

    Raises:
        ArgumentError: If ``mode`` is another value, or an option is invalid.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        **options: Any,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ArgumentError(f"mode={mode!r}: expected 'sum', 'mean' or 'max'")
        check_flag(include_last_offset, "include_last_offset")
        super().__init__(num_embeddings, embedding_dim, **options)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self, ids: Ids, offsets: Ids | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Look up the rows of bags and reduce each bag to one row.

        Args:
            ids: Integers in a tensor, an array or a list, shape (bags, ids of a bag), or (n,) with
                ``offsets``.
            offsets: Index in ``ids`` at which each bag begins, shape (bags,), in a tensor, an array
                or a list.
            per_sample_weights: Factors of the rows, in the shape of ``ids``; for mode ``"sum"``
                only.

        Returns:
            The reduced rows, shape (bags, embedding_dim), in the dtype of the table.

        Raises:
            RowIndexError: As for ``HostEmbedding``.
            ClosedError: As for ``HostEmbedding``.
        """
        positions, weight, padding = self._look_up(integer_tensor(ids, f"{self.name}: ids"))
        if offsets is not None:
            offsets = integer_tensor(offsets, f"{self.name}: offsets").to(positions)
        return functional.embedding_bag(
            positions,
            weight,
            offsets,
            max_norm=self.max_norm,
            norm_type=self.norm_type,
            scale_grad_by_freq=self.scale_grad_by_freq,
            mode=self.mode,
            sparse=self._gives_sparse,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

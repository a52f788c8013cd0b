"""HostEmbeddingBag: an embedding table whose rows are reduced bag by bag."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from pinfeed.errors import ArgumentError
from pinfeed.training.embeddings.arguments import HINTS, integer_tensor
from pinfeed.training.embeddings.table import HostEmbedding
from pinfeed.validation.arguments import check_flag, explain_arguments


class HostEmbeddingBag(HostEmbedding):
    """A ``HostEmbedding`` that reduces the rows of each bag, like ``torch.nn.EmbeddingBag``.

    If the padding row is not among the rows of a batch, torch sums weighted bags in another order
    than if it is. The last bit may therefore differ from ``nn.EmbeddingBag``.

    Args:
        num_embeddings: As for ``HostEmbedding``.
        embedding_dim: As for ``HostEmbedding``.
        mode: Reduction of a bag: ``"sum"``, ``"mean"`` or ``"max"``.
        include_last_offset: As in ``nn.EmbeddingBag``.
        options: As for ``HostEmbedding``.

    Raises:
        ArgumentError: If the mode is another one.
    """

    @explain_arguments(HINTS)
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
        self, ids: Any, offsets: Any = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Look up the rows of bags and reduce each bag to one row.

        Args:
            ids: Integers in a tensor, an array or a list, shape (bags, ids of a bag), or (n,) with
                ``offsets``.
            offsets: Index in ``ids`` at which each bag begins, shape (bags,), likewise.
            per_sample_weights: Factors of the rows, in the shape of ``ids``; for mode ``"sum"``
                only.

        Returns:
            The reduced rows, shape (bags, embedding_dim).

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

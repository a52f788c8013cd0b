"""Training steps on rows of a table by FBGEMM's table-batched embedding, on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.rowcells import LR, Body, RowCell, start


@functools.cache
def why_no_fbgemm(device: str) -> str:
    """Return why FBGEMM cannot take part on a device; an empty string if it can."""
    if device != "cpu":
        return "it is measured on the CPU only"
    try:
        import fbgemm_gpu.split_table_batched_embeddings_ops_training  # noqa: F401
    except (ImportError, OSError) as error:
        # A build for another release of torch fails with an OSError.
        return f"{type(error).__name__}: {error}; make .venv/peers installs fbgemm-gpu-cpu"
    return ""


def fbgemm(cell: RowCell, body: Body, ids: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Train the whole table with FBGEMM's Adagrad, which updates rows in the backward pass.

    Bags of one id were faster than the mode without bags.
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(cell.n_rows, cell.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ADAGRAD,
        learning_rate=LR,
        eps=1e-10,
        pooling_mode=PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    table.split_embedding_weights()[0].data.copy_(start(cell))
    for batch in ids:
        bags = torch.arange(len(batch) + 1)
        loss = body.loss(table(batch, bags))
        loss.backward()
        # The weight can only be resized after its autograd graph has been freed.
        loss = loss.detach()
        yield loss

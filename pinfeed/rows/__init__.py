"""Row orders: the rows of an epoch's batches, their order, and each rank's part."""

from pinfeed.rows.blocks import block_shuffled, chunk_shuffled
from pinfeed.rows.bucketed import bucketed
from pinfeed.rows.mixtures import mixed
from pinfeed.rows.orders import Order, drawn, sequential, shuffled
from pinfeed.rows.packed import packed
from pinfeed.rows.ragged_batches import element_batches
from pinfeed.rows.ranks import per_rank
from pinfeed.rows.subsets import split, where

__all__ = [
    "Order",
    "block_shuffled",
    "bucketed",
    "chunk_shuffled",
    "drawn",
    "element_batches",
    "mixed",
    "packed",
    "per_rank",
    "sequential",
    "shuffled",
    "split",
    "where",
]


def __dir__() -> list[str]:
    """Return the public names without the modules of this package."""
    return __all__

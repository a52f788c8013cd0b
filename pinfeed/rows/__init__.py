"""Row orders: the rows of an epoch's batches, their order, and each rank's part."""

# Pickled orders name their classes by this package.
from pinfeed.rows.orders import BlockShuffled as BlockShuffled
from pinfeed.rows.orders import Drawn as Drawn
from pinfeed.rows.orders import Order, block_shuffled, drawn, per_rank, sequential, shuffled
from pinfeed.rows.orders import PerRank as PerRank
from pinfeed.rows.orders import Sequential as Sequential
from pinfeed.rows.orders import Shuffled as Shuffled
from pinfeed.rows.ragged_batches import element_batches

__all__ = [
    "Order",
    "block_shuffled",
    "drawn",
    "element_batches",
    "per_rank",
    "sequential",
    "shuffled",
]

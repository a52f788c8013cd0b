"""Row orders: the rows of an epoch's batches, their order, and each rank's part.

An order is a function from positions of an epoch to row indices. It computes any position without
the earlier ones, so an epoch needs no memory, and resumes anywhere. Orders can be combined.
"""

# The classes of the package:
#
# - sequential, shuffled and drawn return the rows of the store, a permutation of them, or random
#   rows with replacement (orders.py). weighted draws rows by weight (weighted.py).
# - block_shuffled and chunk_shuffled visit blocks in random order, and mix the rows within windows
#   of several blocks (BlockOrder in blocks.py).
# - where and split number some of the rows, and take these numbers in any order (Subset in
#   subsets.py).
# - mixed takes the next rows from one of several orders in turn (Mixed in mixtures.py, with the
#   turns in interleaving.py).
# - bucketed sorts the rows of an order by length, within windows of several batches (Bucketed).
# - per_rank and Ranks take one rank's share of an order (PerRank in ranks.py).
# - An order of the user is wrapped in UserOrder, which checks its rows (orders.py).
#
# KnownOrder, their base class, has what a feeder must know besides the rows: the windows to read
# ahead (windows.py), how often a row may occur in an epoch, and the memory that the order keeps. An
# order that is made of others has their properties, except for those that it changes.
#
# element_batches and packed cut the rows of an order into units of limited elements
# (length_batches.py). The numbers of rows of their batches differ, so they are not orders.
#
# A feeder draws RowBatches (order_batches.py), which also save and resume positions:
#
# - OrderBatches and RankBatches are those of an order, in one process or in one rank. A state has
#   the rows that all ranks have read, so any number of ranks continues with the rest, with any size
#   of batches.
# - SharedBatches are made of units, with or without ranks. A state counts units.
# - SamplerBatches are those of a sampler, an array or a list. A state has a checksum of the rows.

from pinfeed.rows.blocks import block_shuffled, chunk_shuffled
from pinfeed.rows.bucketed import bucketed
from pinfeed.rows.mixtures import mixed
from pinfeed.rows.orders import Order, drawn, sequential, shuffled
from pinfeed.rows.packed import packed
from pinfeed.rows.ragged_batches import element_batches
from pinfeed.rows.ranks import per_rank
from pinfeed.rows.subsets import split, where
from pinfeed.rows.weighted import weighted

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
    "weighted",
    "where",
]


def __dir__() -> list[str]:
    """Return the public names without the modules of this package."""
    return __all__

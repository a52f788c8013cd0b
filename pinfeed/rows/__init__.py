"""Which rows make up the batches of an epoch, in which order, and for which rank."""

from pinfeed.rows.orders import Order, block_shuffled, per_rank, sequential, shuffled

__all__ = ["Order", "block_shuffled", "per_rank", "sequential", "shuffled"]

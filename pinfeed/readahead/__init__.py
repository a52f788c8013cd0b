"""Strategies that read the rows of a store: directly, or ahead into memory."""

from pinfeed.readahead.base import ReadStrategy, RowPart, StoreRows
from pinfeed.readahead.select import ReadPlan, choose, window_sizes

__all__ = ["ReadPlan", "ReadStrategy", "RowPart", "StoreRows", "choose", "window_sizes"]

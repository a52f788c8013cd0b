"""Strategies for reading rows of stores: directly from the store, or ahead of the training loop."""

from pinfeed.readahead.base import HostRows, ReadStrategy, StoreRows
from pinfeed.readahead.select import ReadPlan, choose, window_sizes

__all__ = ["HostRows", "ReadPlan", "ReadStrategy", "StoreRows", "choose", "window_sizes"]

"""Strategies that read the rows of a store: directly, or ahead into memory."""

from pinfeed.readahead.base import HostRows, ReadStrategy
from pinfeed.readahead.select import FreeMemory, ReadPlan, choose, window_sizes

__all__ = ["FreeMemory", "HostRows", "ReadPlan", "ReadStrategy", "choose", "window_sizes"]

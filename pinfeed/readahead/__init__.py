"""Strategies that read the rows of a store: directly, or ahead into memory."""

from pinfeed.readahead.base import HostRows, ReadStrategy
from pinfeed.readahead.select import FreeMemory, ReadPlan, choose, file_of, window_sizes

__all__ = [
    "FreeMemory",
    "HostRows",
    "ReadPlan",
    "ReadStrategy",
    "choose",
    "file_of",
    "window_sizes",
]

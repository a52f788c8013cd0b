"""Strategies that read the rows of a store: directly, or ahead into memory or the page cache."""

from pinfeed.readahead.base import AnyBatch, FreeMemory, HostRows, ReadStrategy
from pinfeed.readahead.ragged import RaggedReads
from pinfeed.readahead.select import ReadPlan, choose, file_of, windows_ahead
from pinfeed.readahead.select_ragged import choose_ragged

__all__ = [
    "AnyBatch",
    "FreeMemory",
    "HostRows",
    "RaggedReads",
    "ReadPlan",
    "ReadStrategy",
    "choose",
    "choose_ragged",
    "file_of",
    "windows_ahead",
]

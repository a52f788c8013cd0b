"""How the rows of a store come to where they are gathered: directly, or read ahead into memory."""

from pinfeed.readahead.base import HostRows, ReadStrategy, StoreRows
from pinfeed.readahead.select import ReadPlan, choose, window_sizes

__all__ = ["HostRows", "ReadPlan", "ReadStrategy", "StoreRows", "choose", "window_sizes"]

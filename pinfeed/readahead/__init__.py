"""How the rows of a store come to where they are gathered: directly, or read ahead into memory."""

from pinfeed.readahead.base import Access, RowPart, StoreRows
from pinfeed.readahead.select import Choice, choose, window_sizes

__all__ = ["Access", "Choice", "RowPart", "StoreRows", "choose", "window_sizes"]

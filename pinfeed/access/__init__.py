"""How the rows of a store come to where they are gathered: directly, or read ahead into memory."""

from .base import Access, RowPart, StoreRows
from .choice import Choice, choose, window_sizes

__all__ = ["Access", "Choice", "RowPart", "StoreRows", "choose", "window_sizes"]

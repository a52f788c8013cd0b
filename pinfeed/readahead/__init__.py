"""Strategies that read the rows of a store: directly, or ahead into memory or the page cache."""

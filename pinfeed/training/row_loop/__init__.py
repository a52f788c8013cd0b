"""Training loops that prefetch the rows of tables."""

"""Training loops that prefetch the rows of embedding tables."""

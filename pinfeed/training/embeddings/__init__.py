"""Embedding tables in host memory, and their optimizers."""

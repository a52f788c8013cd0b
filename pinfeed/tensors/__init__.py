"""Dtypes, conversion between numpy arrays and torch tensors, and nested batches."""

"""Dtypes, numpy arrays and torch tensors as each other, and the nested structure of a batch."""

"""Strategies that compute the gradients of a batch: whole, in chunks, in two passes, recomputed."""

"""Comparison of each strategy with the plain training step on a few samples."""

"""Predicted memory of a training step, and the largest batch that fits."""

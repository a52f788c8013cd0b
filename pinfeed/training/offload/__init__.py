"""Activations in pinned host memory between the forward and the backward pass."""

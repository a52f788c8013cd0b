"""Embedding tables, checkpoints, large batches, offloaded activations, memory estimates."""

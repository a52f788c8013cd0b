"""Embedding tables, checkpoints, large batches, memory estimates and the trainer."""

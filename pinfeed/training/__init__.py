"""Training on top of feeders: tables in host memory, checkpoints, memory, large batches."""

"""What a training loop adds on top of the feeder: tables in host memory, their optimizer, checkpoints."""

"""What a training step takes, and the largest batch that fits."""

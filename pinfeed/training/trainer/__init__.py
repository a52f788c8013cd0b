"""The training loop, its measurements, and checks for forgotten calls."""

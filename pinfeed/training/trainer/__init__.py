"""Training as a whole: the loop, what it measured, and what it may have forgotten."""

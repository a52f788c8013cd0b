"""Gradients of a batch computed whole, in chunks, in two passes, with recomputation."""

"""Gradients of batches that do not fit on the device."""

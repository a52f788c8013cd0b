"""Saved activations in host memory."""

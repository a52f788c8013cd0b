"""Offloading of saved activations to host memory."""

"""Tests and measurements for a machine with a CUDA device: ``python -m benchmarks.gpu``."""

"""Measured bandwidth of disks and memory, shared with the benchmarks."""

"""Programs of others that were moved to pinfeed, each as it was and as it is now.

Every module has the two programs as functions. ``python -m benchmarks.programs`` compares their
batches and losses, and then their times and their memory.
"""

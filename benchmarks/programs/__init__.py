"""Programs by others, each in its original form and with pinfeed.

Every module contains both versions as functions. ``python -m benchmarks.programs`` compares their
batches and losses, and then their times and their memory.
"""

"""Prefetching engine: sources, draws, fillers, movers to the device, lent batches, write queue."""

"""Prefetching engine: sources, prefetcher, transfer to the device, lent batches, write queue."""

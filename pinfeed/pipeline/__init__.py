"""The engine of every feeder: sources, a prefetcher, transfers to the device, lent batches and a queue of writes."""

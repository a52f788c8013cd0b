"""The command ``pinfeed bench``: throughput of a file's batches, compared with a DataLoader."""

"""Where the batches of an epoch come from: rows of stores, a torch DataLoader, functions that read samples."""

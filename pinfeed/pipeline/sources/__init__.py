"""Sources of batches: rows of stores, a torch DataLoader, functions that read samples."""

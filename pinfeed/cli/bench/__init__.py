"""The command `pinfeed bench`: batches of a file, beside a DataLoader."""

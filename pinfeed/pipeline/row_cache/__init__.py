"""Cache of rows that stay on the device from batch to batch, and its policy."""

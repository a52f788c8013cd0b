"""Cache of table rows on the device: the policy that decides which rows it holds."""

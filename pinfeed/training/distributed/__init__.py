"""Tables sharded by row over ranks."""

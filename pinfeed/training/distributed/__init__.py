"""Embedding tables that are sharded by row over the ranks of a job."""

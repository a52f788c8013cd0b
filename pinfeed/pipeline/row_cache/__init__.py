"""Rows that stay on the device from batch to batch, and the decisions which rows these are."""

"""Feeders, which users iterate: over stores, DataLoaders and reader functions."""

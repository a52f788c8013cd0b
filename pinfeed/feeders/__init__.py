"""What a user iterates: feeders over stores, DataLoaders and reader functions."""

"""Threads that work for a loop, even after the main thread has ended."""

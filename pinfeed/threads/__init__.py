"""Worker threads of a loop, which also run after the main thread has ended."""

"""Reads of local files: system calls, asynchronous reads, and the page cache."""

"""Reads of local files: system calls, many reads in one call, the page cache."""

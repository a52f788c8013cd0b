"""Managed training: the loop, its history, and checks for forgotten steps."""

"""Shared checks of arguments, and suggestions for sources of the wrong kind."""

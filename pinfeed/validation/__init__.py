"""Shared checks of arguments, and suggestions for sources of a wrong kind."""

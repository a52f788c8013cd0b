"""Checks of arguments that several functions share, and what to give instead of a wrong source."""

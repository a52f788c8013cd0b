"""Fixtures for this directory."""

from support.small_disk import small_disk

__all__ = ["small_disk"]

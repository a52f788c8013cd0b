"""Fixtures of the tests of checkpoints."""

from support.without_fsync import without_fsync

__all__ = ["without_fsync"]

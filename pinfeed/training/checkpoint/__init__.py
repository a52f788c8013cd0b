"""Atomic checkpoints: save, resume, check."""

from pinfeed.training.checkpoint.writer import check, exists, resume, save

__all__ = ["check", "exists", "resume", "save"]

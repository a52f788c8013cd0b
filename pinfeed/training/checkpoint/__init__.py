"""Checkpoints that are complete at any moment: save and resume."""

from pinfeed.training.checkpoint.writer import check, exists, resume, save

__all__ = ["check", "exists", "resume", "save"]

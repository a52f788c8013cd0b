"""Saves of a whole run: files, manifest, writer and reader. ``pinfeed.checkpoint`` is public."""

from pinfeed.training.checkpoint.reader import check, exists, resume
from pinfeed.training.checkpoint.writer import save

__all__ = ["check", "exists", "resume", "save"]

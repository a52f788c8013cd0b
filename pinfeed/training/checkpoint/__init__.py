"""Saves of a whole run: files, manifest, writer and reader. ``pinfeed.checkpoint`` is public."""

"""Save and resume, in the middle of an epoch."""

"""The ``pinfeed`` command: ``doctor``, ``plan``, ``bench`` and ``inspect``."""

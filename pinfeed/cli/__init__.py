"""The ``pinfeed`` command: ``doctor``, ``inspect`` and ``plan``."""

"""The ``pinfeed`` command: what this machine can do, what a feeder would do with a file, and what is wrong with one."""

"""The command ``pinfeed doctor``: what the machine can do, and whether pinfeed helps."""

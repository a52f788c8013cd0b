"""Documented APIs of earlier systems on top of pinfeed, and pinfeed's own old module paths."""

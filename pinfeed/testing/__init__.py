"""For tests: a simulated asynchronous device, and the contracts of stores and devices as test classes."""

from pinfeed.testing.sim import SimDevice, favour, lazy

__all__ = ["SimDevice", "favour", "lazy"]

"""Test tools: a simulated asynchronous device, and test suites for stores and devices."""

from pinfeed.testing.sim import SimDevice, favour, lazy

__all__ = ["SimDevice", "favour", "lazy"]

"""Test tools: a simulated asynchronous device, and test suites for stores and devices."""

from pinfeed.testing.sim import SimDevice, favour, lazy

__all__ = ["SimDevice", "favour", "lazy"]


def __dir__() -> list[str]:
    """Return the public names without the modules of this package."""
    return __all__

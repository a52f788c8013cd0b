"""Test suites that every Store and every Device must pass.

Subclass a suite in a test file, and override ``make``. The suites need pytest.

    class TestMyStore(StoreTests):
        def make(self, array, tmp_path):
            return MyStore(array)
"""

from pinfeed.testing.device_tests import DeviceTests
from pinfeed.testing.store_tests import (
    BAD_ROWS,
    ROW_SHAPES,
    ReadOnlyStoreTests,
    StoreTests,
    sample,
)

__all__ = ["BAD_ROWS", "ROW_SHAPES", "DeviceTests", "ReadOnlyStoreTests", "StoreTests", "sample"]

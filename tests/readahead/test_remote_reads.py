"""Remote rows are read in few large requests, in sequence and in random order."""

from collections.abc import Iterator

import numpy as np
import pytest
from support.remote_files import Shaky, fresh_file_systems, put

from pinfeed import Config, Feeder, RemoteStore, rows
from pinfeed.readahead import buffers, resident_file
from pinfeed.readahead.read_plan import plan_reads
from pinfeed.readahead.source_reads import FreeMemory
from pinfeed.readahead.strategy import DirectReads

ARRAY = np.arange(4000 * 256, dtype=np.int32).reshape(4000, 256)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with fresh_file_systems():
        put(ARRAY, "shaky://x.npy")
        yield


def test_shuffled_rows_that_fit_are_never_requested_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Without this, only a slow server shows whether rows are requested one by one.
    monkeypatch.setattr(resident_file, "_REST_BYTES", 0)
    order = rows.shuffled(0).bind(4000, 0)(np.arange(4000))
    with Feeder("shaky://x.npy", batch_size=100, shuffle=True, device="cpu") as feeder:
        found = np.concatenate([batch.numpy() for batch in feeder])
    np.testing.assert_array_equal(found, ARRAY[order])
    assert len(Shaky.requests) == 2, "4 MB are two ranges"


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_rows_in_sequence_are_read_ahead_into_buffers(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A buffer has 650 rows, so most batches of 100 rows end within a buffer, and some do not.
    monkeypatch.setattr(buffers, "_SEQUENCE_BYTES", 650 << 10)
    # The requests of a single epoch are counted.
    options = {"batch_size": 100, "depth": depth, "continuous": False}
    with Feeder("shaky://x.npy", device="cpu", **options) as feeder:
        assert "read ahead in sequence" in str(feeder.plan)
        batches = iter(feeder)
        found = [next(batches).numpy().copy() for _ in range(13)]
        state = feeder.state_dict()
        feeder.load_state_dict(state)
        found += [batch.numpy().copy() for batch in feeder]
        np.testing.assert_array_equal(np.concatenate(found), ARRAY)
        Shaky.requests.clear()
        np.testing.assert_array_equal(np.concatenate([b.numpy().copy() for b in feeder]), ARRAY)
    assert len(Shaky.requests) <= 16, "two parts of each of seven buffers"


def test_no_page_cache_is_said_to_hold_remote_rows() -> None:
    order = rows.block_shuffled(1, block_rows=500, window_blocks=2)
    with RemoteStore("shaky://x.npy") as store:
        plan = plan_reads([store], order, 100, FreeMemory(1000, 1 << 30))
        assert [type(one) for one in plan.strategies] == [DirectReads]
    assert plan.items == ()
    (note,) = plan.notes
    assert note == (
        "x.npy, 3.9 MiB: read row by row, with many reads at a time; read-ahead buffers need "
        "2.9 MiB, but 1000 B remain; a larger limit or a smaller window_blocks allows read-ahead"
    )


def test_without_memory_for_buffers_rows_are_read_in_sequence() -> None:
    config = Config(cpu_memory_limit=64 << 20, preferred_batch_size=100)
    with Feeder("shaky://x.npy", config=config, device="cpu") as feeder:
        assert "read ahead" not in str(feeder.plan)
        np.testing.assert_array_equal(np.concatenate([b.numpy() for b in feeder]), ARRAY)

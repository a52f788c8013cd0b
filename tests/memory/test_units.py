"""Sizes and rates as text."""

import dataclasses
import pickle
import re
from typing import Any

import pytest

from pinfeed import Config, GiB, HostEmbedding, KiB, MiB, Offload
from pinfeed.errors import ArgumentError
from pinfeed.memory.units import human, human_rate, parse_size


def test_units() -> None:
    assert (KiB(), MiB(), GiB()) == (1 << 10, 1 << 20, 1 << 30)
    assert (KiB(2), MiB(3), GiB(4)) == (2048, 3 << 20, 4 << 30)
    assert GiB(1.5) == 1_610_612_736
    assert KiB(0.1) == 102, "rounded down"
    assert (KiB(0), MiB(0.0)) == (0, 0)
    assert all(type(unit(1.5)) is int for unit in (KiB, MiB, GiB))


@pytest.mark.parametrize("text", ["128MiB", " 128 mib", "134217728", "134217728B"])
def test_sizes_may_be_text_everywhere(text: str) -> None:
    config = Config(cpu_memory_limit=text, gpu_memory_limit=text, device_cache=text)
    sizes = config.cpu_memory_limit, config.gpu_memory_limit, config.device_cache
    assert sizes == (MiB(128),) * 3
    assert Config(cpu_memory_limit=text) == Config(cpu_memory_limit=MiB(128))
    assert pickle.loads(pickle.dumps(config)) == config == dataclasses.replace(config)
    assert HostEmbedding(2, 2, device_cache=text).device_cache == MiB(128)
    Offload("cpu", host_limit=text, threshold=text, device_limit=text).close()


@pytest.mark.parametrize("text", ["2G", "0", "-1", "GiB", "1e999", "half"])
def test_text_that_is_no_size_is_refused(text: str) -> None:
    expected = re.escape(
        f"={text!r}: expected a whole number, at least 1 (bytes: pinfeed.GiB(2)), or text such as "
        "'2GiB', '512MiB' or '1.5e9', or "
    )
    with pytest.raises(ArgumentError, match="^cpu_memory_limit" + expected):
        Config(cpu_memory_limit=text)
    with pytest.raises(ArgumentError, match="^device_cache" + expected):
        HostEmbedding(2, 2, device_cache=text)
    if text != "0":
        with pytest.raises(ArgumentError, match=f"^device_limit={text!r}: expected a whole number"):
            Offload("cpu", device_limit=text)


@pytest.mark.parametrize("value", [True, 1.0, None])
def test_other_objects_are_no_sizes(value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^limit={value}: expected a whole number"):
        parse_size(value, "limit")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (MiB(1), "1.0 MiB"),
        (GiB(1.5), "1.5 GiB"),
        (GiB(5000), "4.9 TiB"),
        (GiB(3814.7), "3.7 TiB"),
        (GiB(3 << 20), "3.0 PiB"),
        (GiB(5000 << 20), "5,000.0 PiB"),
        (MiB(1) - 1, "1.0 MiB"),
        (MiB(1023.96), "1.0 GiB"),
        (MiB(1023.94), "1023.9 MiB"),
        (GiB(1) - 1, "1.0 GiB"),
        (1023.7, "1.0 KiB"),
        (-MiB(1023.96), "-1.0 GiB"),
    ],
)
def test_bytes_as_people_read_them(nbytes: int, text: str) -> None:
    assert human(nbytes) == text


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [
        (0, "0 B/s"),
        (999.4, "999 B/s"),
        (999.6, "1.00 KB/s"),
        (4_100, "4.10 KB/s"),
        (850_000, "850 KB/s"),
        (999_499_000, "999 MB/s"),
        (999_600_000, "1.00 GB/s"),
        (2.4e6, "2.40 MB/s"),
        (1.25e9, "1.25 GB/s"),
        (9.996e9, "10.0 GB/s"),
        (33e9, "33.0 GB/s"),
        (99.96e9, "100 GB/s"),
        (4_800e9, "4,800 GB/s"),
    ],
)
def test_rates_as_people_read_them(bytes_per_s: float, text: str) -> None:
    assert human_rate(bytes_per_s) == text

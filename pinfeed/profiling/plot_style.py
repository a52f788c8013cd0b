"""Colours and labels of the timeline's picture."""

from __future__ import annotations

from pinfeed.profiling.spans import WAITING, Lane, Span

COLOURS: dict[Lane, str] = {
    "read": "#5b8db8",
    "host_transform": "#3f6f9c",
    "copy": "#6bb0a6",
    "device_transform": "#3f8f7d",
    "wait": "#d7263d",
    "lend": "#3d3d3d",
    "compute": "#e9b44c",
    "write_wait": "#8c1c2b",
    "device": "#cf8a3a",
    "write": "#9a7fb8",
}
LANE_NAMES: dict[Lane, str] = {
    "read": "reading",
    "host_transform": "host_transform",
    "copy": "copying to the device",
    "device_transform": "device_transform",
    "wait": "the loop waits for a batch",
    "lend": "receives a batch (overhead)",
    "compute": "training step",
    "write_wait": "waits for write-backs",
    "device": "the device computes",
    "write": "writing back",
}
SIGNAL = COLOURS["wait"]
"""Colour of time in which the watched thread waits."""
BAND = "#fbe3e6"
"""Background colour of that time in the rows of the other threads."""
QUIET = "#d9d9d9"
"""Colour of waits that cost nothing, because the device computes."""
INK = "#222222"
FAINT = "#777777"


def colour_of(span: Span, by_device: bool) -> str:
    """Return the colour of a span; adjacent batches differ in shade.

    Args:
        span: The span.
        by_device: Whether the picture shows waits of the device. Waits of the loop are grey then.
    """
    if span.lane == "wait" and by_device:
        return QUIET
    colour = COLOURS[span.lane]
    is_even = span.batch // span.n_batches % 2 == 0
    if span.lane in WAITING or not is_even:
        return colour
    channels = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{255 - round(0.7 * (255 - channel)):02x}" for channel in channels)

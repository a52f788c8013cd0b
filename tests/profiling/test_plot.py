"""Pictures of timelines, and the values that are computed from spans to draw them."""

import itertools
from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes
from support.simulated_loops import a_run

from pinfeed import errors
from pinfeed.profiling import plot
from pinfeed.profiling.spans import (
    WAITING,
    Span,
    by_thread,
    clipped,
    middle,
    ready,
    stalled,
    starved,
)
from pinfeed.profiling.timeline import Timeline

CASES: dict[str, tuple[Callable[[], Timeline], str]] = {
    "data": (lambda: a_run(0.05, 0.01), "The loop waited 60% of this interval"),
    "compute": (lambda: a_run(0.01, 0.02), "The loop waited 0% of this interval"),
    "link": (lambda: a_run(0.002, 0.01, copy_s=0.02), "The device waited 34% of this interval"),
    "device": (lambda: a_run(0.004, 0.02, copy_s=0.005), "The device waited 0% of this interval"),
    "whole": (lambda: a_run(0.05, 0.01, n=20), "The loop waited 62% of the time"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_picture_says_how_long_the_loop_waited(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, title = CASES[case]
    titles = []
    set_title = Axes.set_title
    monkeypatch.setattr(
        Axes, "set_title", lambda axes, text, **how: titles.append(text) or set_title(axes, text)
    )
    made().save(tmp_path / "t.png")
    assert titles == [title]
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert 20_000 < (tmp_path / "t.png").stat().st_size < 150_000


def test_a_whole_run_can_be_drawn(tmp_path: Path) -> None:
    timeline = a_run(0.05, 0.01, n=1500)
    timeline.save(tmp_path / "all.png", last_s=1e6)
    timeline.save(tmp_path / "first.png", first_s=0.3)
    assert all((tmp_path / f"{name}.png").stat().st_size > 15_000 for name in ("all", "first"))
    with pytest.raises(errors.ArgumentError, match="both first_s and last_s"):
        timeline.save(tmp_path / "t.png", first_s=1, last_s=1)
    with pytest.raises(errors.ArgumentError, match="more than 0 seconds"):
        timeline.save(tmp_path / "t.png", first_s=0)


def short_spans(n: int) -> list[Span]:
    """A loop that computes for 10 ms a batch, in which everything else takes some microseconds."""
    spans = []
    for batch in range(n):
        begin = batch * 0.01
        spans += [
            Span("wait", batch, begin, begin + 1e-6),
            Span("lend", batch, begin + 1e-6, begin + 1e-5, rows=100, bytes=1000),
            Span("read", batch, begin + 2e-3, begin + 2.01e-3),
            Span("copy", batch, begin + 4e-3, begin + 4.002e-3),
            Span("write", batch, begin + 6e-3, begin + 6.005e-3),
            Span("write_wait", batch, begin + 7e-3, begin + 7.005e-3),
            Span("compute", batch, begin + 1e-5, begin + 1e-2),
        ]
    return sorted(spans, key=lambda span: span.start_s)


def lines_of(path: Path, lane: str) -> int:
    """Count vertical lines of at least 20 pixels in one of the two shades of a lane."""
    image = 255 * matplotlib.image.imread(path)[:, :, :3]
    found = np.zeros(image.shape[1], bool)
    for batch in (0, 1):
        shade = np.array(
            [int(plot.colour_of(Span(lane, batch, 0, 1), False)[i : i + 2], 16) for i in (1, 3, 5)]
        )
        alike = np.abs(image - shade).max(2) < 40
        found |= np.lib.stride_tricks.sliding_window_view(alike, 20, axis=0).all(-1).any(0)
    return int((np.diff(found.astype(int)) == 1).sum())


@pytest.mark.parametrize("lane", ["read", "copy", "write_wait", "write"])
def test_spans_shorter_than_a_pixel_are_seen(lane: str, tmp_path: Path) -> None:
    # Only one such lane is drawn at a time, because their colours are similar.
    spans = [span for span in short_spans(30) if span.lane in ("wait", "lend", "compute", lane)]
    plot.draw(spans, 0.0, 0.3, 2, str(tmp_path / "t.png"))
    assert lines_of(tmp_path / "t.png", lane) in (29, 30)


def test_a_stretch_from_the_middle_is_of_one_loop() -> None:
    spans = [
        Span("wait", batch, loop * 10 + batch, loop * 10 + batch + 0.5, loop)
        for loop in range(3)
        for batch in range(10)
    ]
    assert middle(spans, 4) == (13.0, 17.0)
    assert middle(spans, 20) == (10.0, 19.5)
    assert middle(spans, 30) == (0.0, 29.5)


def test_tracks_never_overlap() -> None:
    spans = a_run(0.05, 0.01, n_readers=4, depth=5).spans
    threads = by_thread(spans)
    assert {track for _, track in threads["read"]} == {0, 1, 2, 3}
    for row, track in itertools.product(threads.values(), range(4)):
        of_one = [span for span, on in row if on == track]
        assert all(one.end_s <= following.start_s for one, following in itertools.pairwise(of_one))


def test_stalls_are_those_of_the_host_or_of_the_device() -> None:
    host = a_run(0.05, 0.01).spans
    waiting = [span for span in host if span.lane in WAITING]
    assert starved(host) == [(span.start_s, span.end_s) for span in waiting]
    # The loop waits for batches, but the device has work.
    device = a_run(0.004, 0.02, copy_s=0.005).spans
    assert stalled(clipped(device, 1.0, 3.0)) == 0.0
    assert stalled(host) == pytest.approx(0.6, abs=0.02)
    assert stalled([]) == 0.0
    # The device waits only for the first batch.
    assert starved(device)[0][0] == 0.0


def test_batches_that_are_ready() -> None:
    counts = [count for _, count in ready(a_run(0.01, 0.05).spans)]
    assert max(counts) <= 3
    assert counts[-1] == 0
    assert np.median(counts) >= 1

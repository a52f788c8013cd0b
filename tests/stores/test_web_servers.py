"""Remote files of a web server: versions of files, wrong answers and errors."""

import asyncio
from collections.abc import Iterator

import fsspec
import numpy as np
import pytest
from fsspec.asyn import sync
from support.http_files import HttpFiles
from support.remote_files import fresh_file_systems, npy
from support.stores import gathered

from pinfeed import RemoteStore, errors

pytest.importorskip("aiohttp")

ARRAY = np.arange(50_000)
"""Rows after the first 64 KiB, which are read with the header, are requested."""
ROWS = [40_000, 49_999]


@pytest.fixture
def server() -> Iterator[HttpFiles]:
    with fresh_file_systems(), HttpFiles() as server:
        server.files["x.npy"] = npy(ARRAY)
        yield server
        close_session()


def close_session(**options: str) -> None:
    """Close the connections of fsspec, which would stay open as long as the process."""
    fs = fsspec.filesystem("http", **options)
    session, fs._session = fs._session, None
    if session is not None:
        sync(fs.loop, session.close)
        # Closed connections are freed by the next step of the event loop.
        sync(fs.loop, asyncio.sleep, 0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"ETag": '"1"'}, {"ETag": '"2"'}),
        ({"ETag": 'W/"1"'}, {"ETag": 'W/"2"'}),
        (
            {"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"},
            {"Last-Modified": "Mon, 01 Jan 2024 00:00:01 GMT"},
        ),
    ],
    ids=["ETag", "weak ETag", "Last-Modified"],
)
def test_a_replaced_file_of_the_same_size_is_an_error(
    server: HttpFiles, before: dict[str, str], after: dict[str, str]
) -> None:
    server.headers = before
    store = RemoteStore(server.url("x.npy"))
    assert gathered(store, ROWS).tolist() == ROWS
    server.files["x.npy"] = npy(-ARRAY)
    server.headers = after
    server.requests.clear()
    with pytest.raises(errors.ReadError, match=r"x\.npy: the file was replaced .* is .* now"):
        gathered(store, ROWS[:1])
    assert len(server.requests) == 1
    assert gathered(RemoteStore(server.url("x.npy")), ROWS).tolist() == [-n for n in ROWS]


def test_a_server_without_validators_reports_the_size(server: HttpFiles) -> None:
    store = RemoteStore(server.url("x.npy"))
    assert gathered(store, ROWS).tolist() == ROWS
    server.files["x.npy"] = npy(np.arange(60_000))
    with pytest.raises(errors.ReadError, match=r"the file was replaced .*size was 400128"):
        gathered(store, ROWS)


def test_an_etag_that_a_proxy_makes_weak_is_the_same(server: HttpFiles) -> None:
    server.headers = {"ETag": '"1"'}
    store = RemoteStore(server.url("x.npy"))
    server.headers = {"ETag": 'W/"1"'}
    assert gathered(store, ROWS).tolist() == ROWS


def test_a_partial_answer_of_the_wrong_length_is_retried(server: HttpFiles) -> None:
    store = RemoteStore(server.url("x.npy"), attempts=3)
    server.requests.clear()
    server.short_answers = 2
    assert gathered(store, ROWS[:1]).tolist() == ROWS[:1]
    assert len(server.requests) == 3
    server.short_answers = 3
    with pytest.raises(errors.ReadError, match=r"got 7 of 8 bytes \(attempt 3 of 3"):
        gathered(store, ROWS[:1])


def test_a_server_without_range_requests(server: HttpFiles) -> None:
    store = RemoteStore(server.url("x.npy"))
    server.ignores_ranges = True
    for call in (lambda: gathered(store, ROWS), lambda: RemoteStore(server.url("x.npy"))):
        with pytest.raises(errors.ReadError, match="does not support range requests; copy"):
            call()


def test_a_missing_file_of_a_web_server(server: HttpFiles) -> None:
    with pytest.raises(errors.FileMissing, match=r"y\.npy: no such file"):
        RemoteStore(server.url("y.npy"))


def test_a_server_that_refuses_connections_is_asked_once() -> None:
    with HttpFiles() as stopped:
        pass
    try:
        with pytest.raises(errors.ReadError, match=r"no connection to the server .*check the addr"):
            RemoteStore(stopped.url("x.npy"))
    finally:
        close_session()


def test_an_unknown_option_of_the_file_system_is_named(server: HttpFiles) -> None:
    options = {"colour": "red"}
    try:
        with pytest.raises(errors.ReadError, match="'colour'; check the names in storage_options"):
            RemoteStore(server.url("x.npy"), storage_options=options)
    finally:
        close_session(**options)

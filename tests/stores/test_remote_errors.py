"""Remote files that fail, and requests that are repeated."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec.core
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.remote_files import Shaky, fresh_file_systems, npy, put
from support.stores import gathered

from pinfeed import Feeder, NpyStore, PinnedStore, RemoteStore, errors
from pinfeed.readahead import buffers
from pinfeed.stores.paths import has_protocol
from pinfeed.testing.suites import sample


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with fresh_file_systems():
        yield


@pytest.mark.parametrize(
    "fault",
    [
        OSError(5, "I/O"),
        TimeoutError(),
        ConnectionResetError(),
        RuntimeError("of a client library"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("n", [1, 4])
def test_temporary_faults_are_retried(fault: Exception, n: int) -> None:
    array = sample(100, (64, 1024), np.dtype(np.uint8))
    put(array, "shaky://x.npy")
    Shaky.faults.extend([fault] * n)
    store = RemoteStore("shaky://x.npy")
    wanted = [90, 3, 40]
    # One of three requests fails n times.
    Shaky.faults.extend([None, fault, None, *[fault] * (n - 1)])
    np.testing.assert_array_equal(gathered(store, wanted), array[wanted])
    assert len(Shaky.requests) == 3 + n
    assert len(set(Shaky.requests[3:])) == 1, "only failed requests are repeated"


def test_a_file_system_that_fails_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    store = RemoteStore(put(np.arange(100), "shaky://x.npy"))
    faults = [ConnectionError("gone"), TimeoutError()]

    def cat_ranges(self: Any, *args: Any, **options: Any) -> list[Any]:
        if faults:
            raise faults.pop()
        return MemoryFileSystem.cat_ranges(self, *args, **options)

    monkeypatch.setattr(Shaky, "cat_ranges", cat_ranges)
    assert gathered(store, [5, 50]).tolist() == [5, 50]


def test_a_fault_that_outlasts_all_attempts_is_raised() -> None:
    store = RemoteStore(put(np.arange(100), "shaky://x.npy"), attempts=3)
    Shaky.faults.extend([ConnectionError("no route")] * 3)
    message = (
        r"shaky://x\.npy, bytes 168 to 176: ConnectionError: no route "
        r"\(attempt 3 of 3; use RemoteStore\(\.\.\., attempts=6\)"
    )
    with pytest.raises(errors.ReadError, match=message) as caught:
        gathered(store, [5])
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert gathered(store, [5]).tolist() == [5], "the next gather is a new one"
    Shaky.faults.extend([ConnectionError("no route")] * 5)
    with pytest.raises(
        errors.ReadError, match=r"shaky://x\.npy: ConnectionError: no route \(attempt 5 of 5"
    ):
        RemoteStore("shaky://x.npy")


class HttpError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class NoCredentialsError(Exception):
    """Error of a class of botocore."""


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (PermissionError("not yours"), errors.ReadError),
        (ValueError("cannot be"), errors.ReadError),
        (NotImplementedError("no ranges"), errors.ReadError),
        (HttpError(403), errors.ReadError),
        (NoCredentialsError("Unable to locate credentials"), errors.ReadError),
        (TypeError("unexpected keyword argument 'colour'"), errors.ReadError),
        (FileNotFoundError("x.npy"), errors.FileMissing),
    ],
    ids=repr,
)
def test_permanent_faults_are_not_retried(fault: Exception, error: type[Exception]) -> None:
    store = RemoteStore(put(np.arange(100), "shaky://x.npy"))
    Shaky.faults.append(fault)
    with pytest.raises(error, match=r"shaky://x\.npy"):
        gathered(store, [5])
    assert len(Shaky.requests) == 1
    Shaky.faults.append(fault)
    with pytest.raises(error, match=r"shaky://x\.npy"):
        RemoteStore("shaky://x.npy")


@pytest.mark.parametrize(
    ("fault", "advice"),
    [
        (NoCredentialsError("none"), "NoCredentialsError: none; give credentials by .*anon"),
        (PermissionError("not yours"), "give credentials by .*storage_options"),
        (HttpError(401), "give credentials"),
        (TypeError("unexpected 'colour'"), "check the names in storage_options"),
    ],
    ids=repr,
)
def test_a_permanent_fault_advises_no_more_attempts(fault: Exception, advice: str) -> None:
    put(np.arange(100), "shaky://x.npy")
    Shaky.faults.append(fault)
    with pytest.raises(errors.ReadError, match=advice) as caught:
        RemoteStore("shaky://x.npy")
    assert "attempt" not in str(caught.value)


@pytest.mark.parametrize(
    "fault",
    [ConnectionRefusedError(111, "refused"), socket.gaierror(socket.EAI_NONAME, "unknown name")],
    ids=repr,
)
def test_an_unreachable_server_is_refused_only_at_first(fault: Exception) -> None:
    store = RemoteStore(put(np.arange(100), "shaky://x.npy"))
    Shaky.faults.append(fault)
    assert gathered(store, [5]).tolist() == [5], "a server may be started again"
    Shaky.faults.append(fault)
    with pytest.raises(errors.ReadError, match=r"no connection to the server .*check the address"):
        RemoteStore("shaky://x.npy")


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_busy_web_server_is_asked_again(status: int) -> None:
    store = RemoteStore(put(np.arange(100), "shaky://x.npy"))
    Shaky.faults.append(HttpError(status))
    assert gathered(store, [5]).tolist() == [5]


@pytest.mark.parametrize("n", [0, 7])
def test_an_answer_that_is_short_is_retried(n: int) -> None:
    store = RemoteStore(put(np.arange(100), "shaky://x.npy"), attempts=3)
    Shaky.faults.extend([n, n])
    assert gathered(store, [5]).tolist() == [5]
    assert len(Shaky.requests) == 3
    Shaky.faults.extend([n] * 3)
    with pytest.raises(errors.ReadError, match=rf"bytes 168 to 176: .*got {n} of 8 bytes"):
        gathered(store, [5])


def test_a_range_after_the_end_means_that_the_file_has_shrunk() -> None:
    store = RemoteStore(put(np.arange(100), "shaky://x.npy"))
    Shaky.faults.append(HttpError(416))
    with pytest.raises(errors.ReadError, match=r"shaky://x\.npy, bytes 168 to 176: .* has shrunk"):
        gathered(store, [5])
    assert len(Shaky.requests) == 1


@pytest.mark.parametrize("n_rows", [50, 100])
def test_a_remote_file_that_is_replaced(n_rows: int) -> None:
    array = np.arange(100)
    store = RemoteStore(put(array, "shaky://x.npy"))
    put(array[:n_rows] + 1, "shaky://x.npy")
    with pytest.raises(errors.ReadError, match=r"shaky://x\.npy: the file was replaced"):
        gathered(store, [3, 49])
    assert len(Shaky.requests) == 1, "the file stays replaced, so there is no second attempt"
    Shaky.store.clear()
    with pytest.raises(errors.FileMissing, match="no longer exists"):
        gathered(store, [49])


def test_a_loop_over_a_file_that_is_replaced_never_mixes_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A window is a batch. Otherwise, all rows are read at once.
    monkeypatch.setattr(buffers, "_SEQUENCE_BYTES", 80)
    array = np.arange(1000)
    seen: list[int] = []
    put(array, "shaky://x.npy")
    with (
        Feeder("shaky://x.npy", batch_size=10, device="cpu") as feeder,
        pytest.raises(errors.ReadError, match="was replaced"),
    ):
        for i, batch in enumerate(feeder):
            seen += batch.tolist()
            if i == 5:
                put(-array, "shaky://x.npy")
    assert seen == array[: len(seen)].tolist()


def test_a_server_that_gives_more_than_a_range() -> None:
    store = RemoteStore(put(np.arange(100), "shaky://x.npy"))
    Shaky.faults.append(50)
    with pytest.raises(
        errors.ReadError, match="because the server does not support range requests"
    ):
        gathered(store, [5])


def test_remote_files_that_cannot_be_served() -> None:
    with pytest.raises(errors.FileMissing, match=r"memory://x\.npy: no such file"):
        RemoteStore("memory://x.npy")
    with pytest.raises(errors.FileMissing, match=r"memory://y\.npy: no such file"):
        RemoteStore([put(np.arange(3)), "memory://y.npy"])
    with pytest.raises(errors.StoreError, match=r"memory://x\.npy is in Fortran order"):
        RemoteStore(put(np.asfortranarray(np.zeros((3, 2)))))
    with pytest.raises(errors.StoreError, match=r"memory://x\.npy has no rows"):
        RemoteStore(put(np.zeros((0, 2))))
    with pytest.raises(errors.StoreError, match="shards do not match"):
        RemoteStore([put(np.zeros(3)), put(np.zeros((3, 2)), "memory://y.npy")])
    fsspec.filesystem("memory").pipe_file("/x.npy", npy(np.arange(100))[:-1])
    with pytest.raises(errors.StoreError, match=r"memory://x\.npy is truncated"):
        RemoteStore("memory://x.npy")
    fsspec.filesystem("memory").pipe_file("/x.npy", b"text")
    with pytest.raises(errors.StoreError, match=r"memory://x\.npy is not a \.npy file"):
        RemoteStore("memory://x.npy")


def test_a_remote_directory(tmp_path: Path) -> None:
    with pytest.raises(errors.StoreError, match="is a directory"):
        RemoteStore(f"file://{tmp_path}")


class Bucket(MemoryFileSystem):
    """Object store, in which a prefix of names is a directory of size 0."""

    protocol = "bucket"

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return {"name": path, "size": 0, "type": "directory"}

    def open(self, path: str, *args: Any, **options: Any) -> Any:
        raise ValueError(f"Attempt to open non key-like path: {path}")


fsspec.register_implementation("bucket", Bucket, clobber=True)


@pytest.mark.parametrize("url", ["bucket://name", "bucket://name/", "bucket://name/prefix/"])
def test_a_bucket_and_a_prefix_are_no_files(url: str) -> None:
    message = rf"{url} is a directory, a bucket or .* such as {url.rstrip('/')}/\*\.npy"
    with pytest.raises(errors.StoreError, match=message):
        RemoteStore(url)


def test_patterns_that_are_not_expanded_have_a_hint(tmp_path: Path) -> None:
    url = put(np.arange(3))
    for pattern in ("x-{0..3}.npy", "x-{0,1}-*.npy"):
        for store, place in ((RemoteStore, "memory://"), (NpyStore, f"{tmp_path}/")):
            with pytest.raises(errors.FileMissing, match="braces are not expanded; give a pattern"):
                store(place + pattern)
    with pytest.raises(errors.FileMissing, match="patterns in a list are not expanded"):
        RemoteStore([url, "memory://x-*.npy"])
    with pytest.raises(errors.FileMissing, match="patterns in a list are not expanded"):
        NpyStore([tmp_path / "x-*.npy"])


@pytest.mark.parametrize("options", ["x", ["key", "secret"], 3], ids=repr)
def test_storage_options_are_a_dict(options: Any) -> None:
    with pytest.raises(errors.ArgumentError, match=r"storage_options=.*expected a dict, such as"):
        RemoteStore(put(np.arange(3)), storage_options=options)


def test_storage_options_of_a_feeder_are_those_of_a_store() -> None:
    with pytest.raises(errors.UnknownArgument, match=r"source.*RemoteStore\(url, storage_options="):
        Feeder("memory://x.npy", batch_size=2, storage_options={})  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("x.npy", "'x.npy' is not a URL"),
        ("C:/data/x.npy", "is not a URL"),
        (Path("s3://bucket/x.npy"), "is not a URL; .*pathlib removes a slash"),
        (["memory://x.npy", "x.npy"], "'x.npy' is not a URL"),
        ([3], "3 is not a URL"),
        (3, "path=3"),
        ([], "an empty list"),
        ("nonsense://x.npy", "nonsense://x.npy: Protocol not known"),
    ],
    ids=str,
)
def test_paths_that_are_no_urls_are_refused(path: Any, message: str) -> None:
    put(np.arange(3))
    with pytest.raises(errors.ArgumentError, match=message):
        RemoteStore(path)


def test_a_number_of_attempts_is_positive() -> None:
    with pytest.raises(errors.ArgumentError, match="attempts=0"):
        RemoteStore("memory://x.npy", attempts=0)


def test_a_file_system_that_is_not_installed() -> None:
    fsspec.register_implementation(
        "absent", "no_such_package.FileSystem", clobber=True, errtxt="Install no_such_package"
    )
    with pytest.raises(errors.MissingDependency, match=r"absent://x\.npy: Install no_such_package"):
        RemoteStore("absent://x.npy")


@pytest.mark.parametrize(
    "path",
    [
        "s3://b/x.npy",
        "https://h/x.npy?a=b",
        "file:///x",
        "simplecache::s3://b/x",
        "zip://x.npy::s3://b/x.zip",
    ],
)
def test_urls(path: str) -> None:
    assert has_protocol(path)
    for store in (NpyStore, PinnedStore):
        with pytest.raises(errors.ArgumentError, match=r"is a URL; .*RemoteStore\('"):
            store(path)
    with pytest.raises(errors.ArgumentError, match=r"is a URL; .*RemoteStore\('"):
        NpyStore(["x.npy", path])


@pytest.mark.parametrize(
    "path",
    [
        "x.npy",
        "/data/x.npy",
        r"C:\x.npy",
        "C://x.npy",
        "a:b",
        "a::b.npy",
        "/mnt/s3://x",
        Path("s3://x"),
        None,
    ],
)
def test_local_paths(path: Any) -> None:
    assert not has_protocol(path)


def test_a_remote_store_is_read_only_and_can_be_closed_twice() -> None:
    store = RemoteStore(put(np.arange(3)), storage_options={})
    assert "memory://x.npy" in repr(store)
    with pytest.raises(errors.WriteBackError, match="read-only"):
        store.scatter(np.array([0]), np.array([1]))
    store.flush()
    store.close()
    store.close()
    with pytest.raises(errors.ClosedError, match="closed"):
        gathered(store, [0])

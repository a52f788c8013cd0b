"""TarIndex: where the samples of a .tar archive are, kept in a file next to the archive."""

from __future__ import annotations

import contextlib
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pinfeed.errors import FileMissing, ReadError, StoreError
from pinfeed.stores.paths import file_size

# The key is the path up to the first dot of the base name, and the rest is the extension.
_NAME = re.compile(r"((?:.*/)?[^/.]+)\.([^/]*)", re.DOTALL)
_METADATA = re.compile(r"__[^/]*__")


@dataclass(frozen=True)
class TarIndex:
    """Samples of an archive: runs of members whose names have the same key, as in WebDataset."""

    path: str
    version: npt.NDArray[np.int64]
    """Size of the archive in bytes, and the time of its last change in nanoseconds."""
    keys: npt.NDArray[np.bytes_]
    """Key of each sample."""
    starts: npt.NDArray[np.int64]
    """First member of each sample, and the number of members, shape (n_samples + 1,)."""
    offsets: npt.NDArray[np.int64]
    """First byte of each member in the archive."""
    sizes: npt.NDArray[np.int64]
    """Bytes of each member."""
    kinds: npt.NDArray[np.int64]
    """Position of the extension of each member in ``extensions``."""
    extensions: npt.NDArray[np.str_]
    """Distinct extensions, in lower case."""
    n_left_out: int = 0
    """Number of files without an extension or with a name of metadata; 0 if it was loaded."""

    @classmethod
    def made(cls, path: str) -> TarIndex:
        """Read the headers of an archive.

        Raises:
            FileMissing: If there is no such archive.
            StoreError: If it is not an archive without compression, is damaged, or has a link or
                another file that is not plain, or a sample with the same extension twice.
        """
        version = _version_of(path)
        keys: list[bytes] = []
        starts: list[int] = []
        members: list[tuple[int, int, int]] = []
        extensions: dict[str, int] = {}
        seen = set[str]()
        n_left_out = 0
        for member in _files(path, int(version[0])):
            found = _NAME.fullmatch(member.name)
            if found is None or _METADATA.fullmatch(member.name):
                n_left_out += 1
                continue
            key = found[1].encode("utf-8", "surrogateescape")
            extension = found[2].lower()
            if not keys or key != keys[-1]:
                keys.append(key)
                starts.append(len(members))
                seen = {"__key__"}
            if extension in seen:
                raise StoreError(
                    f"{path}: {member.name!r} is the second member of its sample with the "
                    f"extension {extension!r}; expected different ones, not '__key__'; rename it"
                )
            seen.add(extension)
            kind = extensions.setdefault(extension, len(extensions))
            members.append((member.offset_data, member.size, kind))
        if not keys:
            raise StoreError(f"{path} has no samples; expected files with names such as 000000.jpg")
        offsets, sizes, kinds = np.array(members, np.int64).T
        bounds = np.array([*starts, len(members)])
        names = np.array(list(extensions))
        return cls(path, version, np.array(keys), bounds, offsets, sizes, kinds, names, n_left_out)

    @classmethod
    def loaded(cls, path: str) -> TarIndex:
        """Load the index of an archive.

        Raises:
            FileMissing: If there is no such archive, or no index of it.
            StoreError: If the index is damaged.
            ReadError: If the archive has changed since the index was made.
        """
        version = _version_of(path)
        todo = f"run: pinfeed index {path}"
        try:
            with open(index_path(path), "rb") as file, np.load(file, allow_pickle=False) as arrays:
                index = cls(path, **arrays)
        except FileNotFoundError:
            raise FileMissing(f"{path} has no index, {index_path(path)}; {todo}") from None
        except Exception as error:
            # The errors of zipfile for damaged bytes have six classes.
            raise StoreError(f"{index_path(path)} is not an index ({error}); {todo}") from None
        index.require(version)
        return index

    @property
    def counts(self) -> dict[str, int | str]:
        """Numbers of samples, members and files that are left out, and the extensions."""
        return {
            "samples": len(self.keys),
            "members": len(self.sizes),
            "left out": self.n_left_out,
            "extensions": " ".join(self.extensions.tolist()),
        }

    def save(self) -> None:
        """Write the index next to the archive; it replaces an older one when it is complete.

        Raises:
            StoreError: If it cannot be written.
        """
        name = index_path(self.path)
        unfinished = f"{name}.{os.getpid()}.writing"
        arrays: dict[str, Any] = {k: v for k, v in vars(self).items() if isinstance(v, np.ndarray)}
        try:
            with open(unfinished, "wb") as file:
                np.savez(file, **arrays)
            os.replace(unfinished, name)
        except OSError as error:
            raise StoreError(
                f"{name} cannot be written: {error.strerror or error}; write to its folder as "
                "another user, or copy the archive to another folder"
            ) from None
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(unfinished)

    def require(self, version: npt.NDArray[np.int64]) -> None:
        """Raise ReadError if the archive is not the one of the index."""
        if not np.array_equal(version, self.version):
            raise ReadError(
                f"{self.path} has another size or time of change than the archive of its index; "
                f"run: pinfeed index {self.path}; to copy archives with their times, use cp -p"
            )

    def read(self, sample: int) -> dict[str, Any]:
        """Return the members of a sample, which are read together. Any thread may call it.

        Raises:
            ReadError: If the archive has changed.
            OSError: If it cannot be read.
        """
        first, last = self.starts[sample : sample + 2].tolist()
        begins = self.offsets[first:last].tolist()
        sizes = self.sizes[first:last].tolist()
        start = begins[0]
        n = begins[-1] + sizes[-1] - start
        # One call of the system would read at most 2 GiB.
        with open(self.path, "rb") as file:
            self.require(_version(os.fstat(file.fileno())))
            file.seek(start)
            data = file.read(n)
        if len(data) != n:
            raise ReadError(f"{self.path}: got {len(data):,} of {n:,} bytes from byte {start:,} on")
        names = self.extensions[self.kinds[first:last]].tolist()
        parts = zip(names, begins, sizes, strict=True)
        key = self.keys.item(sample).decode("utf-8", "surrogateescape")
        files = {name: data[at - start : at - start + size] for name, at, size in parts}
        return {"__key__": key, **files}


def index_path(path: str) -> str:
    """Return the path of the index of an archive."""
    return f"{path}.index"


def _version_of(path: str) -> npt.NDArray[np.int64]:
    """Return the size and the time of change of an archive, if it is a file."""
    file_size(path, ".tar")
    return _version(os.stat(path))


def _version(status: os.stat_result) -> npt.NDArray[np.int64]:
    return np.array([status.st_size, status.st_mtime_ns])


def _files(path: str, size: int) -> Iterator[tarfile.TarInfo]:
    """Yield the files of an archive.

    Raises:
        StoreError: If it is damaged or compressed, or has an entry that is not a file or a folder.
    """
    try:
        with tarfile.open(path, "r:") as archive:
            while (member := archive.next()) is not None:
                # The library would keep an object of each member.
                archive.members.clear()  # type: ignore[attr-defined]
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    raise StoreError(
                        f"{path}: {member.name!r} is a link or a special file; expected plain "
                        "files; write it with tar --dereference --hard-dereference"
                    )
                if member.offset_data + member.size > size:
                    raise StoreError(f"{path} ends within {member.name!r}; copy or write it again")
                yield member
            end = archive.offset
    except tarfile.TarError as error:
        raise StoreError(
            f"{path} is not an intact .tar archive ({error}); decompress it, or write it again"
        ) from None
    with open(path, "rb") as file:
        file.seek(end)
        # The library takes a damaged header, which has 512 bytes, for the end of the archive.
        if file.read(512).strip(b"\0"):
            raise StoreError(f"{path} has a damaged header at byte {end:,}; write it again")

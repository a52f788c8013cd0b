"""RemoteFile: a file of an fsspec file system, and the version of it that a store reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pinfeed.errors import ReadError

# Fields of ``info`` that change when a file is replaced, the most reliable one first. Fields that
# also change with the metadata of a file, such as the time of its last update, are not among them.
_VALIDATORS = (
    "generation",
    "ETag",
    "etag",
    "sha",
    "blob_id",
    "CRC",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "mtime",
    "modified",
    "modify",
    "modificationTime",
    "created",
)


@dataclass(frozen=True)
class RemoteFile:
    """File of an fsspec file system."""

    url: str
    fs: Any
    path: str
    """Path within the file system."""
    version: tuple[tuple[str, str], ...] = ()
    """Size and validator of the file when it was opened; empty before."""

    def __str__(self) -> str:
        return self.url

    @property
    def is_http(self) -> bool:
        """Whether a web server has the file."""
        return "http" in self.fs.protocol

    def check_version(self, found: Mapping[str, Any]) -> None:
        """Check that a file is still the one that was opened.

        Args:
            found: Size and validators, as ``info`` of the file system returns them. Those that are
                missing are not compared.

        Raises:
            ReadError: If the file has been replaced.
        """
        for name, opened in self.version:
            now = _plain(found.get(name))
            if now and now != opened:
                raise ReadError(
                    f"{self}: the file was replaced while it was open ({name} was {opened}, and is "
                    f"{now} now); open it again, and write new data to new files"
                )


def version_of(info: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the size and the most reliable validator of a file, by their names in ``info``."""
    validator = next((name for name in _VALIDATORS if _plain(info.get(name))), None)
    names = ("size",) if validator is None else (validator, "size")
    return tuple((name, _plain(info[name])) for name in names)


def _plain(value: Any) -> str:
    """Return a validator as a string; empty if it is unknown."""
    # A proxy that compresses or forwards answers makes an ETag weak.
    return "" if value is None else str(value).removeprefix("W/")

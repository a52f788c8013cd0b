"""FileFormat: what pinfeed knows about a format of files; Part: one source in such a file.

The module of each format registers it here. Paths, objects of its library, the command line and
advice in errors find it by the table ``FORMATS``, so no other module names a format.
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import IO, Any, ClassVar

import numpy as np

from pinfeed.errors import FileMissing, StoreError
from pinfeed.stores.layouts import read_tensors
from pinfeed.stores.libraries import and_more, is_of
from pinfeed.stores.npy_header import MAGIC, strange
from pinfeed.stores.npy_store import NpyStore
from pinfeed.stores.paths import pattern_hint, require_regular
from pinfeed.stores.store import Store, row_nbytes
from pinfeed.validation import suggestions


@dataclass(frozen=True)
class Part:
    """One source in a file, described by its metadata, or something that cannot be a source.

    Attributes:
        path: Path of the file, a pattern, or the paths of shards.
        kind: Kind of its format, such as ``"hdf5"``.
        name: Name in the file; empty if the file has one source.
        shape: Shape, whose first axis is the rows.
        dtype: Dtype as in the file.
        nbytes: Size of the decoded values, in bytes.
        stored: Layout in the file, such as chunks; empty for plain values.
        problem: The reason why it cannot be a source, and what to do; empty if it can.
    """

    path: str | list[str]
    kind: str
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    nbytes: int = 0
    stored: str = ""
    problem: str = ""

    def __str__(self) -> str:
        paths = [self.path] if isinstance(self.path, str) else self.path
        path = and_more(paths[0], len(paths))
        return f"{path}:{self.name}" if self.name else path

    @property
    def values(self) -> dict[str, Any]:
        """The part for scripts."""
        return {"source": str(self), **asdict(self)}

    def open(self) -> Any:
        """Open its store, which the caller closes."""
        return FORMATS[self.kind].open(self.path, self.name)


class FileFormat:
    """A format of files. A subclass describes one; its module registers the subclass."""

    kind: ClassVar[str]
    """Name of the format in reports, such as ``"hdf5"``."""
    usage: ClassVar[str]
    """Call that opens a source, and what it reads, for ``pinfeed inspect``."""
    advice: ClassVar[str] = ""
    """The kind of a file, and the call to give where a .npy file is expected."""
    table: ClassVar[str] = ""
    """Call that opens a matrix of columns; empty if files have no columns."""
    magic: ClassVar[bytes] = b""
    """First bytes of a file."""
    suffixes: ClassVar[tuple[str, ...]] = ()
    """Suffixes of names. A damaged file is left to the library of the format, which explains it."""
    contents: ClassVar[tuple[str, ...]] = ()
    """Names of files, one of which is in each folder of the format."""
    requirement: ClassVar[str] = ""
    """Package of the extra of pinfeed that reads the format, with its oldest version."""
    store: ClassVar[Any]
    """Opens the store of a source, given the path of a file, and its name if there are several."""

    def open(self, path: Any, name: str = "") -> Any:
        """Open the store of a source of a file; ``name`` is empty if it has only one."""
        return self.store(path, name) if name else self.store(path)

    def parts(self, path: str, name: str | None) -> list[Part]:
        """List the sources of a file, or those at one name of it.

        Raises:
            PinfeedError: If the file or the name does not exist, or the file is damaged.
        """
        if name is not None:
            raise missing_part(path, name)
        return [self.described(path)]

    def is_file(self, file: IO[bytes], start: bytes, size: int) -> bool:
        """Return whether an open file has the format, given its first bytes and its size."""
        return bool(self.magic) and start.startswith(self.magic)

    def is_folder(self, path: str, names: list[str]) -> bool:
        """Return whether a folder with files of these names is one source, or several ones."""
        return any(name in names for name in self.contents)

    def store_of(self, source: Any) -> Store | None:
        """Return a store of an array that the library of the format opened; else None."""
        return None

    def columns_of(self, source: Any) -> Mapping[Any, Store] | None:
        """Return a store for each column of a path, if its name is that of a table; else None."""
        return None

    def part_of(self, path: str, name: str, group: Any) -> Part | None:
        """Describe an open group of arrays, if it is one source of this format; else None."""
        return None

    def described(self, path: str | list[str], name: str = "") -> Part:
        """Describe a source by its open store."""
        with contextlib.closing(self.open(path, name)) as store:
            shape = (store.n_rows, *store.row_shape)
            nbytes = store.n_rows * row_nbytes(store)
            return Part(path, self.kind, name, shape, str(store.dtype), nbytes)


FORMATS: dict[str, FileFormat] = {}
"""All formats, by their kind."""


def register(kind: type[FileFormat]) -> type[FileFormat]:
    """Make a format known; a decorator of its class."""
    FORMATS[kind.kind] = kind()
    if kind.requirement:
        suggestions.REQUIREMENTS[kind.kind] = kind.requirement
    if kind.advice:
        starts = filter(None, (kind.magic,))
        suggestions.BY_START.update(dict.fromkeys(starts, kind.advice))
        suggestions.BY_SUFFIX.update(dict.fromkeys(kind.suffixes, kind.advice))
        suggestions.BY_CONTENT.update(dict.fromkeys(kind.contents, kind.advice))
    return kind


def format_of(path: str) -> FileFormat | None:
    """Return the format of a file or folder, by what is in it; None for any other folder.

    Args:
        path: A file, a folder, or a pattern, whose first file counts.

    Raises:
        FileMissing: If there is no such file.
        StoreError: If the file has another format.
    """
    if not os.path.exists(path):
        matches = sorted(glob.glob(path))
        if not matches:
            raise FileMissing(f"{path}: no such file (looked in {os.getcwd()}){pattern_hint(path)}")
        path = matches[0]
    formats = FORMATS.values()
    if os.path.isdir(path):
        names = os.listdir(path)
        return next((one for one in formats if one.is_folder(path, names)), None)
    require_regular(path)
    with open(path, "rb") as file:
        start = file.read(16)
        size = os.path.getsize(path)
        found = next((one for one in formats if one.is_file(file, start, size)), None)
    if found is None and start:
        suffix = os.path.splitext(path)[1].lower()
        found = next((one for one in formats if suffix in one.suffixes), None)
    if found is None:
        raise StoreError(strange(path, start))
    return found


def missing_part(path: str, name: str) -> StoreError:
    """Return the error about a name that a file does not have."""
    return StoreError(
        f"{path} has nothing of the name {name!r}; expected one of the names that pinfeed inspect "
        f"{path} lists"
    )


class ArrayFormat(FileFormat):
    """A format with arrays in groups, which a library opens as objects like those of h5py."""

    library: ClassVar[str]
    array_class: ClassVar[str]
    """Name of the library's class of arrays; that of its groups is ``Group``."""
    is_one_file: ClassVar[bool]
    """Whether the format has all arrays in one file, not in a folder."""

    def open_group(
        self, source: Any, key: str | None = None
    ) -> AbstractContextManager[tuple[Any, str]]:
        """Open the group or array of a path, or take an open one; return it and its path.

        Args:
            source: The path, or the open group.
            key: Name in it that will be read, for errors.

        Raises:
            StoreError: If the file has another format, or is damaged.
        """
        raise NotImplementedError

    def is_group(self, source: Any) -> bool:
        """Return whether an object is an open group of the library."""
        return is_of(source, self.library, "Group")

    def store_of(self, source: Any) -> Store | None:
        is_array = is_of(source, self.library, self.array_class)
        found: Store | None = self.store(source) if is_array else None
        return found

    def parts(self, path: str, name: str | None) -> list[Part]:
        found: list[Part] = []
        with self.open_group(path) as (parent, _):
            item = parent
            # A Zarr array has nothing inside.
            if name is not None:
                item = parent.get(name) if hasattr(parent, "get") else None
            if item is None:
                raise missing_part(path, str(name))
            seen: tuple[str, ...] = ()
            for inner, one in (("", item), *_inside(item)):
                place = "/".join(filter(None, (name, inner)))
                if place.startswith(seen):
                    continue
                if hasattr(one, "shape"):
                    found.append(self._array(path, place, one))
                    continue
                parts = (kind.part_of(path, place, one) for kind in FORMATS.values())
                if (part := next(filter(None, parts), None)) is not None:
                    found.append(part)
                    # The arrays of the source are not sources of their own.
                    seen += (f"{place}/" if place else "",)
        return found

    def _array(self, path: str, name: str, array: Any) -> Part:
        """Describe an array of the library."""
        dtype = np.dtype(array.dtype)
        shape = tuple(array.shape or ())
        chunks = getattr(array, "shards", None) or array.chunks
        problem = ""
        try:
            self.store(array).close()
        except StoreError as error:
            problem = str(error)
        nbytes = math.prod(shape) * dtype.itemsize
        stored = f"chunks {tuple(chunks)}" if chunks else ""
        return Part(path, self.kind, name, shape, str(dtype), nbytes, stored, problem)


def _inside(group: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and objects in a group of h5py or zarr, and in its groups."""
    if hasattr(group, "visititems"):
        # This visits an object with several names only once, so cycles are no problem.
        items: list[tuple[str, Any]] = []
        group.visititems(lambda name, item: items.append((name, item)))
        yield from items
    elif hasattr(group, "members"):
        with warnings.catch_warnings():
            # zarr warns of files that are not a part of the group.
            warnings.simplefilter("ignore")
            yield from sorted(group.members(max_depth=None))


@register
class NpyFormat(FileFormat):
    """Files of ``numpy.save``."""

    kind = "npy"
    usage = "NpyStore(path) or the path itself reads a .npy file"
    store = NpyStore
    magic = MAGIC
    suffixes = (".npy",)


@register
class SafetensorsFormat(FileFormat):
    """Files of tensors with names."""

    kind = "safetensors"
    store = NpyStore.safetensors
    usage = "NpyStore.safetensors(path, name) reads a tensor"
    advice = (
        "a safetensors file: give pinfeed.NpyStore.safetensors(path, name), with the name of a "
        "tensor"
    )
    suffixes = (".safetensors",)
    requirement = "safetensors>=0.4"

    def is_file(self, file: IO[bytes], start: bytes, size: int) -> bool:
        # The length of a header, which is an object of JSON.
        return start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= size

    def parts(self, path: str, name: str | None) -> list[Part]:
        _, tensors = read_tensors(path)
        if name is not None and name not in tensors:
            raise missing_part(path, name)
        found = []
        for one in tensors if name is None else (name,):
            shape, code, dtype, _ = tensors[one]
            nbytes = math.prod(shape) * (dtype.itemsize if dtype else 0)
            problem = "" if shape else "a single number; expected an axis of rows"
            if dtype is None:
                problem = f"dtype {code}, which numpy and torch do not both have"
            problem = problem and f"{path}:{one} has {problem}"
            dtype_name = str(dtype or code)
            found.append(Part(path, self.kind, one, shape, dtype_name, nbytes, "", problem))
        return found

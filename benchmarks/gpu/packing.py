"""Results in one file, which is up to date even if the call is killed."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

_EVERY_S = 15.0


@contextlib.contextmanager
def packed(folder: Path, path: Path, every_s: float = _EVERY_S) -> Iterator[None]:
    """Pack the files of a folder into ``path`` now, every few seconds, and at the end.

    Some remote machines return only a few files, and only those that exist when a time limit ends
    the call.
    """
    pack(folder, path)
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every_s):
            try:
                pack(folder, path)
            except OSError as error:
                # A part may have removed a file, or the disk may have room again later.
                print(f"{path} was not replaced: {error}", flush=True)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        pack(folder, path)


def pack(folder: Path, path: Path) -> None:
    """Pack the files of a folder. ``path`` is replaced as a whole, so it is always complete."""
    aside = path.with_name(f"{path.name}.aside")
    with tarfile.open(aside, "w") as archive:
        for file in sorted(folder.glob("*")):
            # A part renames its file ".aside" at any time.
            if file.is_file() and file.suffix != ".aside" and file != path:
                # A file may change between its size and its contents.
                contents = file.read_bytes()
                entry = archive.gettarinfo(file, file.name)
                entry.size = len(contents)
                archive.addfile(entry, io.BytesIO(contents))
    os.replace(aside, path)

"""TarDataset: samples of .tar archives by index, such as the shards of a WebDataset."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Sequence
from typing import Any

from pinfeed.stores.paths import Path, local_paths
from pinfeed.stores.tar_index import TarIndex


class TarDataset:
    """Samples of .tar archives by index, for ``wrap_dataset``; without a copy of the archives.

    A sample is a dict with the contents of its members, as ``bytes``, by their extensions, and its
    key as ``"__key__"``. As in WebDataset, the key is the path up to the first dot of the base
    name, the extension is the rest in lower case, and consecutive members with the same key are a
    sample. Each archive needs an index, which the command ``pinfeed index shard-*.tar`` writes next
    to it.

    Any thread may read samples. The members of a sample are read together from the archive, which
    is open only for this time. An index takes 24 bytes of memory for each member, and for each
    sample 8 bytes and those of the longest key.

    Args:
        path: An archive without compression, a pattern (``"shard-*.tar"``, in sorted order), or a
            sequence of paths.

    Raises:
        ArgumentError: If a path is a URL, or the sequence has no paths.
        FileMissing: If an archive or its index is missing.
        StoreError: If an index is damaged.
        ReadError: If an archive has another size or time of change than when it was indexed.

    Examples:
        >>> import io, tarfile
        >>> with tarfile.open("shard-0.tar", "w") as tar:
        ...     for name, data in (("0.txt", b"a cat"), ("0.cls", b"3"), ("1.txt", b"a dog")):
        ...         member = tarfile.TarInfo(name)
        ...         member.size = len(data)
        ...         tar.addfile(member, io.BytesIO(data))
        >>> pinfeed.TarDataset.write_index("shard-*.tar")
        2
        >>> dataset = pinfeed.TarDataset("shard-*.tar")
        >>> dataset[0]
        {'__key__': '0', 'txt': b'a cat', 'cls': b'3'}
        >>> loop = pinfeed.wrap_dataset(dataset, lambda sample: len(sample["txt"]), batch_size=2)
    """

    def __init__(self, path: Path | Sequence[Path]) -> None:
        # The process may change its working directory later.
        paths = map(os.path.abspath, local_paths(path))
        self._archives = list(map(TarIndex.loaded, paths))
        # Number of the first sample after each archive.
        self._ends = list(itertools.accumulate(len(one.keys) for one in self._archives))

    def __repr__(self) -> str:
        return f"<TarDataset: {len(self):,} samples in {len(self._archives):,} archives>"

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample.

        Raises:
            IndexError: If ``index`` is negative, or not below the number of samples.
            ReadError: If the archive has changed since it was indexed.
            OSError: If it cannot be read.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self):,} samples; expected 0 or more")
        number = bisect.bisect(self._ends, index)
        before = self._ends[number - 1] if number else 0
        return self._archives[number].read(index - before)

    @staticmethod
    def write_index(path: Path | Sequence[Path]) -> int:
        """Write an index next to each archive, as the command ``pinfeed index`` does.

        It reads the headers of all members, and none of their contents.

        Args:
            path: As for the class.

        Returns:
            The number of samples of all archives.

        Raises:
            ArgumentError: As for the class.
            FileMissing: If an archive is missing.
            StoreError: If a file is not an archive without compression, is damaged, or has links or
                a sample with one extension twice, or if an index cannot be written.
        """
        indexes = [TarIndex.made(name) for name in local_paths(path)]
        for index in indexes:
            index.save()
        return sum(len(index.keys) for index in indexes)

"""``pinfeed index``: indexes of .tar archives, so that ``TarDataset`` reads samples by number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pinfeed.cli.inspect import Report, in_words, table
from pinfeed.errors import PinfeedError
from pinfeed.stores.paths import local_paths
from pinfeed.stores.tar_index import TarIndex


def index(files: Sequence[str]) -> Report:
    """Write an index next to each archive, and report what it has."""
    archives: list[dict[str, Any]] = []
    paths: list[str] = []
    errors = []
    for given in files:
        try:
            paths += local_paths(given)
        except PinfeedError as error:
            errors.append(in_words(error))
    for path in paths:
        try:
            found = TarIndex.made(path)
            found.save()
            archives.append({"archive": path, **found.counts})
        except (PinfeedError, OSError) as error:
            errors.append(in_words(error))
    titles = archives[0] if archives else ()
    text = table({title: [str(one[title]) for one in archives] for title in titles})
    return Report({"archives": archives}, text, errors)

"""Trials of drivers that a user's cache has, for tests that keep their own cache."""

from pathlib import Path

from pinfeed.devices import route


def take_over(source: Path, target: Path) -> None:
    """Copy the trials of one cache folder to another, without the measured rates.

    A driver that has crashed or hung in its trial is not tried again.
    """
    known = route._read(route.routes_file(source))
    trials = {key: entry for key, entry in known.items() if key.startswith("batched copies, ")}
    if trials:
        path = route.routes_file(target)
        route._write(path, {"format": known["format"], **trials})

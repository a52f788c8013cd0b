"""SizeField: field of a dataclass that takes a number of bytes, or text such as ``"2GiB"``."""

from __future__ import annotations

from typing import Any

from pinfeed.memory.units import parse_size


class SizeField:
    """Field of a dataclass: a size in bytes, at least 1, or None, which is the default.

    The field accepts text, and its value is always an int or None. A type checker knows both types
    from the annotation.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> int | None:
        # A dataclass reads the default of a field from its class.
        return None if instance is None else instance.__dict__[self._name]

    def __set__(self, instance: Any, value: int | str | None) -> None:
        if value is not None:
            value = parse_size(value, self._name, note=", or None")
        instance.__dict__[self._name] = value

"""Checks of arguments that several functions share: numbers, seeds, ranks, flags, paths, and names that no argument has."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, ParamSpec, TypeVar

from pinfeed.errors import ArgumentError, FileMissing, StoreError, UnknownArgument

P = ParamSpec("P")
T = TypeVar("T")


def whole_number(
    value: Any, name: str, *, least: int = 1, most: int | None = None, note: str = ""
) -> int:
    """``value`` as an int.

    Args:
        value: The user's argument.
        name: The argument's name.
        least: The smallest number that is accepted.
        most: The largest number that is accepted; None accepts any.
        note: Appended to what was expected: a reason, or what to give instead.

    Raises:
        ArgumentError: If ``value`` is no integer (True and False are none), or out of range.
    """
    number = _integer(value)
    if number is None or number < least or (most is not None and number > most):
        range_text = f"at least {least}" if most is None else f"from {least} to {most:,}"
        raise ArgumentError(f"{name}={value!r}: expected a whole number, {range_text}{note}")
    return number


def real_number(value: Any, name: str, *, least: float = -math.inf, note: str = "") -> float:
    """Return ``value`` as a float.

    Args:
        value: The user's argument.
        name: The argument's name.
        least: The smallest number that is accepted.
        note: Appended to what was expected.

    Raises:
        ArgumentError: If ``value`` is no number (True, False and NaN are none), or is below
            ``least``.
    """
    # "not >=", because NaN compares with nothing.
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) >= least:
        range_text = "" if least == -math.inf else f", at least {least:g}"
        raise ArgumentError(f"{name}={value!r}: expected a number{range_text}{note}")
    return float(value)


def check_path(value: Any, name: str = "path") -> str:
    """Return ``value`` as a str.

    Raises:
        ArgumentError: If it is no path.
    """
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str):
        raise ArgumentError(f"{name}={value!r}: expected a path, as a str or a pathlib.Path")
    return path


def check_file_to_make(value: Any, name: str = "path") -> str:
    """Return ``value`` as a str, if it can be the path of a file that is made.

    Raises:
        ArgumentError: If it is no path.
        StoreError: If it is a directory.
        FileMissing: If its directory does not exist.
    """
    path = check_path(value, name)
    if os.path.isdir(path):
        raise StoreError(
            f"{name}={path!r} is a directory; expected the name of a .npy file that is to be made; give a name in it"
        )
    directory = os.path.dirname(path)
    if directory and not os.path.isdir(directory):
        raise FileMissing(
            f"{name}={path!r}: the directory {directory!r} does not exist (looked in {os.getcwd()}); expected one that does; make it "
            f"with os.makedirs({directory!r})"
        )
    return path


def check_seed(seed: Any) -> int:
    """``seed`` as an int.

    Raises:
        ArgumentError: If it is not an integer.
    """
    number = _integer(seed)
    if number is None:
        raise ArgumentError(
            f"seed={seed!r}: expected a whole number; for another order in every run, give seed=random.randrange(2**32)"
        )
    return number


def check_rank(rank: Any, world_size: Any, text: str) -> tuple[int, int]:
    """Both as ints. ``text`` says where they come from, for the error.

    Raises:
        ArgumentError: If one is not an integer, or the rank is not in [0, world_size).
    """
    numbers = _integer(rank), _integer(world_size)
    if numbers[0] is None or numbers[1] is None or not 0 <= numbers[0] < numbers[1]:
        raise ArgumentError(f"{text}: expected 0 <= rank < world_size, both whole numbers")
    return numbers[0], numbers[1]


def check_flag(value: Any, name: str) -> None:
    """Refuse what is neither True nor False: the string ``"False"`` is true.

    Raises:
        ArgumentError: If it is neither.
    """
    if type(value).__name__ not in ("bool", "bool_"):
        # Python's and numpy's
        raise ArgumentError(f"{name}={value!r}: expected True or False")


def explain_arguments(
    hints: Mapping[str, str], example: str = ""
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function, or an ``__init__``, so that an argument that it does not have gets an error that says what to give.

    The function's signature stays as it is, for people, editors and type checkers. A ``seed``
    without ``shuffle`` is refused here too, because only here the caller's words can be told from
    defaults: such a seed would shuffle nothing.

    Args:
        hints: What to do instead, by the name that other libraries have for it.
        example: An argument with its name, for the error about too many without one; the first that
            the function has if empty.

    Raises:
        UnknownArgument: If the function has no argument of that name, or too many were given
            without a name.
        ArgumentError: If ``seed`` was given, and ``shuffle`` was not.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        title = function.__qualname__.split(".")[0]
        parameters = inspect.signature(function).parameters.values()
        positional = [
            one.name
            for one in parameters
            if one.kind is one.POSITIONAL_OR_KEYWORD and one.name != "self"
        ]
        known = [one.name for one in parameters if one.name != "self"]
        takes_any_name = any(one.kind is one.VAR_KEYWORD for one in parameters)
        n_most = len([one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD])

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            unknown = [name for name in kwargs if name not in known and not takes_any_name]
            if unknown:
                raise UnknownArgument(
                    "\n".join(
                        f"{title} has no argument {name!r}; {_advice(name, known, hints)}"
                        for name in unknown
                    )
                )
            if len(args) > n_most:
                expected = ", ".join(positional)
                named = example or "".join(f"{name}=..." for name in known[len(positional) :][:1])
                by_name = (
                    f"; give the others by name: {title}({expected}, {named})" if named else ""
                )
                raise UnknownArgument(
                    f"{title} got {len(args) - n_most + len(positional)} arguments without a name; expected {expected} alone{by_name}"
                )
            if "seed" in kwargs and "shuffle" in known and "shuffle" not in kwargs:
                seed = f"seed={kwargs['seed']!r}"
                order = (
                    f" (an order has its own: rows=pinfeed.rows.shuffled({seed}))"
                    if "rows" in known
                    else ""
                )
                raise ArgumentError(
                    f"{seed} was given and shuffle was not; expected shuffle=True, which alone uses the seed; "
                    f"give shuffle=True, or leave seed out{order}"
                )
            return function(*args, **kwargs)

        return checked

    return decorate


def _advice(name: str, known: Sequence[str], hints: Mapping[str, str]) -> str:
    import difflib

    if name in hints:
        return hints[name]
    if near := difflib.get_close_matches(name.lower(), known, 1):
        return f"did you mean {near[0]!r}?"
    return f"expected one of {', '.join(known)}"


def _integer(value: Any) -> int | None:
    """``value`` as an int; None if it is not an integer, or True or False."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None

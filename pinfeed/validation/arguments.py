"""Checks of arguments that several functions share: numbers, flags, paths, functions, names."""

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
    """Return ``value`` as an int.

    Args:
        value: The user's argument.
        name: The argument's name.
        least: The smallest number that is accepted.
        most: The largest number that is accepted; None accepts any.
        note: Text that the error appends to the expected range: a reason, or what to give instead.

    Raises:
        ArgumentError: If ``value`` is not an integer, is True or False, or is out of range.
    """
    number = _integer(value)
    if number is None or number < least or (most is not None and number > most):
        range_text = f"at least {least}" if most is None else f"from {least} to {most:,}"
        raise ArgumentError(f"{name}={value!r}: expected a whole number, {range_text}{note}")
    return number


def real_number(
    value: Any, name: str, *, least: float = -math.inf, most: float = math.inf
) -> float:
    """Return ``value`` as a float.

    Args:
        value: The user's argument.
        name: The argument's name.
        least: The smallest number that is accepted.
        most: The largest number that is accepted.

    Raises:
        ArgumentError: If ``value`` is not a number, is True, False or NaN, or is out of range.
    """
    # "not <=" also refuses NaN, because every comparison with NaN is false.
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= float(value) <= most:
        range_text = "" if least == -math.inf else f", at least {least:g}"
        range_text += "" if most == math.inf else f" and at most {most:g}"
        raise ArgumentError(f"{name}={value!r}: expected a number{range_text}")
    return float(value)


def check_path(value: Any) -> str:
    """Return ``value`` as a str.

    Raises:
        ArgumentError: If ``value`` is neither a str nor a path object of str.
    """
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str):
        raise ArgumentError(f"path={value!r}: expected a path, as a str or a pathlib.Path")
    return path


def check_file_to_make(value: Any) -> str:
    """Return ``value`` as a str, if a file can be created at that path.

    Raises:
        ArgumentError: If ``value`` is neither a str nor a path object of str.
        StoreError: If ``value`` is a directory.
        FileMissing: If the directory of the file does not exist.
    """
    path = check_path(value)
    if os.path.isdir(path):
        raise StoreError(
            f"path={path!r} is a directory; expected the path of a new .npy file; give a file "
            "name in it"
        )
    directory = os.path.dirname(path)
    if directory and not os.path.isdir(directory):
        raise FileMissing(
            f"path={path!r}: the directory {directory!r} does not exist (looked in "
            f"{os.getcwd()}); create it with os.makedirs({directory!r})"
        )
    return path


def check_seed(seed: Any) -> int:
    """Return ``seed`` as an int.

    Raises:
        ArgumentError: If ``seed`` is not an integer.
    """
    number = _integer(seed)
    if number is None:
        raise ArgumentError(
            f"seed={seed!r}: expected a whole number; for a different order in every run, give "
            "seed=random.randrange(2**32)"
        )
    return number


def check_rank(rank: Any, world_size: Any, text: str) -> tuple[int, int]:
    """Return ``rank`` and ``world_size`` as ints.

    Args:
        rank: The user's rank.
        world_size: The user's number of ranks.
        text: Beginning of the error, which names the source of the two numbers.

    Raises:
        ArgumentError: If one is not an integer, or the rank is not in [0, world_size).
    """
    number = _integer(rank)
    n_ranks = _integer(world_size)
    if number is None or n_ranks is None or not 0 <= number < n_ranks:
        raise ArgumentError(f"{text}: expected 0 <= rank < world_size, both whole numbers")
    return number, n_ranks


def check_flag(value: Any, name: str) -> None:
    """Raise ArgumentError unless ``value`` is True or False.

    A truthy value is not enough, because the string ``"False"`` is truthy.
    """
    # Python's bool is "bool", and numpy's is "bool" or "bool_".
    if type(value).__name__ not in ("bool", "bool_"):
        raise ArgumentError(f"{name}={value!r}: expected True or False")


def check_choice(value: Any, name: str, choices: Sequence[str]) -> None:
    """Raise ArgumentError unless ``value`` is one of ``choices``."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise ArgumentError(f"{name}={value!r}: expected {', '.join(others)} or {last}")


def check_function(value: Any, name: str) -> None:
    """Raise ArgumentError unless ``value`` is None, or a function that is no generator function."""
    if value is None:
        return
    if inspect.isgeneratorfunction(value) or inspect.isasyncgenfunction(value):
        raise ArgumentError(
            f"{name}={value!r} is a generator function, so each call returns a generator; expected "
            "a function that takes a batch and returns one; replace yield by return"
        )
    if not callable(value):
        raise ArgumentError(
            f"{name}={value!r}: expected a function that takes a batch and returns one; leave it "
            "out to keep batches unchanged"
        )


def takes_generator(function: Any) -> bool:
    """Return whether a function has an unbound parameter named ``generator``."""
    return takes_parameter(function, "generator")


def takes_parameter(function: Any, name: str) -> bool:
    """Return whether a function has an unbound parameter of a name."""
    if isinstance(function, functools.partial) and name in function.keywords:
        return False
    # A torch module is called through its method forward.
    target = getattr(function, "forward", function)
    try:
        parameter = inspect.signature(target).parameters.get(name)
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind in (
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.KEYWORD_ONLY,
    )


def explain_arguments(hints: Mapping[str, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function, or an ``__init__``, to give helpful advice on a wrong argument.

    Editors and type checkers still see the function's own signature. The decorator also refuses a
    ``seed`` without ``shuffle``, because such a seed would have no effect, unless a transform gets
    a generator. Only a decorator can distinguish the caller's arguments from defaults.

    Args:
        hints: Advice on what to give instead of an argument of another library. A key is the name
            of the argument, or several names with spaces between them; the last entry that has a
            name counts. In the advice, ``{name}`` stands for the name.

    Raises:
        UnknownArgument: If the function has no argument of a given name.
        ArgumentError: If ``seed`` is given without ``shuffle``.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        title = function.__qualname__.removesuffix(".__init__")
        parameters = inspect.signature(function).parameters.values()
        known = [one.name for one in parameters if one.name not in ("self", "cls")]
        names = frozenset(known)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            # Most calls are correct, and need no look at single arguments.
            if not names.issuperset(kwargs) or "seed" in kwargs:
                _require_known_names(title, known, hints, kwargs)
                _require_shuffle_with_seed(known, kwargs)
            return function(*args, **kwargs)

        return checked

    return decorate


def _require_known_names(
    title: str, known: Sequence[str], hints: Mapping[str, str], given: Mapping[str, Any]
) -> None:
    """Raise UnknownArgument if a function has no argument of a given name."""
    import difflib

    lines = []
    for name in (name for name in given if name not in known):
        found = [advice for names, advice in hints.items() if name in names.split()]
        if found:
            advice = found[-1].replace("{name}", name)
        elif near := difflib.get_close_matches(name.lower(), known, 1):
            advice = f"did you mean {near[0]!r}?"
        else:
            advice = f"expected one of {', '.join(known)}"
        lines.append(f"{title} has no argument {name!r}; {advice}")
    if lines:
        raise UnknownArgument("\n".join(lines))


def _require_shuffle_with_seed(known: Sequence[str], given: Mapping[str, Any]) -> None:
    """Raise ArgumentError if a seed is given that shuffles nothing."""
    if "seed" not in given or "shuffle" in given or "shuffle" not in known:
        return
    if "reproducible" in known:
        # The random numbers of samples use the seed.
        return
    if any(takes_generator(given.get(name)) for name in ("host_transform", "device_transform")):
        return
    seed = f"seed={given['seed']!r}"
    order = ""
    if "rows" in known:
        order = f" (an order has its own: rows=pinfeed.rows.shuffled({seed}))"
    expected = "shuffle=True, because only shuffling uses the seed"
    if "host_transform" in known:
        expected = "shuffle=True, or a transform with a parameter named generator"
    raise ArgumentError(
        f"{seed} was given without shuffle; expected {expected}; give shuffle=True, or leave "
        f"seed out{order}"
    )


def _integer(value: Any) -> int | None:
    """Return ``value`` as an int; None if it is not an integer, or is True or False."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None

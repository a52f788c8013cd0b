"""The structure of a batch: taken apart, and built again from other leaves."""

import collections
import dataclasses
import time
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinfeed.tensors.pytree import flatten


class Pair(typing.NamedTuple):
    image: Any
    label: Any


@dataclasses.dataclass
class Sample:
    image: Any
    label: Any = None
    derived: Any = dataclasses.field(init=False, default=0)
    late: Any = dataclasses.field(init=False)
    kind: typing.ClassVar[str] = "sample"

    def __post_init__(self) -> None:
        self.derived = self.derived or ("derived", self.image)


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: Any
    label: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slotted:
    image: Any
    label: Any


class Annotated(dict[Any, Any]):
    """A dict with an attribute, which cannot be made from its contents alone."""

    def __init__(self, contents: Any, note: str) -> None:
        super().__init__(contents)
        self.note = note


class AnnotatedList(list[Any]):
    def __init__(self, contents: Any, note: str) -> None:
        super().__init__(contents)
        self.note = note


class Fixed(Mapping[str, Any]):
    """A mapping that cannot be made from its contents."""

    def __init__(self, x: Any, y: Any) -> None:
        self._items = {"x": x, "y": y}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Point(tuple[Any, ...]):
    """A tuple that cannot be made from its contents."""

    def __new__(cls, x: Any, y: Any) -> "Point":
        return super().__new__(cls, (x, y))


class Checked(Pair):
    """A named tuple whose constructor is not that of its fields."""

    def __new__(cls, pair: tuple[Any, Any]) -> "Checked":
        return super().__new__(cls, *pair)


class Movable:
    """An object with a ``to`` method of its own, which makes it a leaf."""

    def to(self, device: Any) -> "Movable":
        return self


class MovableDict(dict[str, Any], Movable): ...


class MovablePair(Pair):
    def to(self, device: Any) -> "MovablePair":
        return self


def negated(value: Any) -> Any:
    """Return ``value`` with its leaves, which are numbers, negated."""
    leaves, rebuild = flatten(value)
    return rebuild(iter([-leaf for _, leaf in leaves]))


def paths(value: Any) -> list[str]:
    return [path for path, _ in flatten(value)[0]]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (1, -1),
        ([1, 2], [-1, -2]),
        ((1,), (-1,)),
        ({"x": 1, 2: 3}, {"x": -1, 2: -3}),
        ({"x": [1, (2, {"y": 3})]}, {"x": [-1, (-2, {"y": -3})]}),
        ([[], (), {}], [[], (), {}]),
        (collections.OrderedDict(b=1, a=2), collections.OrderedDict(b=-1, a=-2)),
        (collections.Counter("aab"), collections.Counter(a=-2, b=-1)),
        (collections.UserDict(x=1), collections.UserDict(x=-1)),
        (types.MappingProxyType({"x": 1}), types.MappingProxyType({"x": -1})),
        (Pair(1, [2]), Pair(-1, [-2])),
        (collections.namedtuple("Edge", "start to")(1, 2), (-1, -2)),
        (Checked((1, 2)), Checked((-1, -2))),
        (time.gmtime(0), time.struct_time([-number for number in time.gmtime(0)])),
        (Frozen(1, Slotted(image=2, label=3)), Frozen(-1, Slotted(image=-2, label=-3))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_structures_are_built_again(value: Any, wanted: Any) -> None:
    got = negated(value)
    assert got == wanted
    assert type(got) is type(value)
    assert negated(got) == value


def test_paths_name_leaves_as_python_does() -> None:
    assert paths(7) == [""]
    assert paths([1, {"x": Pair(2, (3,))}]) == ["[0]", "[1]['x'].image", "[1]['x'].label[0]"]
    assert paths(Frozen(1, {2: 3})) == [".image", ".label[2]"]


TREES = st.recursive(
    st.integers(),
    lambda children: (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), children, max_size=4)
        | st.builds(Pair, children, children)
        | st.builds(Frozen, children, children)
    ),
)


@given(TREES)
def test_any_structure(value: Any) -> None:
    leaves, rebuild = flatten(value)
    assert all(eval(f"value{path}", {"value": value}) is leaf for path, leaf in leaves)
    assert rebuild(iter([leaf for _, leaf in leaves])) == value
    again = negated(value)
    assert paths(again) == paths(value)
    assert [leaf for _, leaf in flatten(again)[0]] == [-leaf for _, leaf in leaves]


def test_additions_of_subclasses_are_kept() -> None:
    default = collections.defaultdict(list, x=1)
    assert negated(default)["missing"] == []
    marked = negated(Annotated({"x": 1}, "cropped"))
    assert (marked, marked.note, type(marked)) == ({"x": -1}, "cropped", Annotated)
    listed = negated(AnnotatedList([1, 2], "cropped"))
    assert (listed, listed.note, type(listed)) == ([-1, -2], "cropped", AnnotatedList)
    assert list(negated(collections.OrderedDict(b=1, a=2))) == ["b", "a"]


def test_containers_that_cannot_be_rebuilt_become_plain_ones() -> None:
    assert negated(Fixed(1, 2)) == {"x": -1, "y": -2}
    assert negated(Point(1, 2)) == (-1, -2)


def test_a_dataclass_is_copied_and_not_made_again() -> None:
    sample = Sample(1, [2])
    sample.derived = 5
    got = negated(sample)
    assert (got.image, got.label, got.derived, got.kind) == (-1, [-2], -5, "sample")
    # The sample had no such attribute either.
    assert not hasattr(got, "late")
    sample.late = 6
    assert negated(sample).late == -6


def test_the_original_stays_as_it_is() -> None:
    inner = [1, 2]
    value = {"x": inner, "y": Sample(3), "z": (Frozen(4, 5),)}
    value["y"].label = 7
    value["y"].derived = 8
    got = negated(value)
    assert (value["x"], value["y"].image, value["z"]) == ([1, 2], 3, (Frozen(4, 5),))
    assert value["x"] is inner
    assert got["y"] is not value["y"]


@pytest.mark.parametrize(
    "leaf",
    [
        None,
        "text",
        b"bytes",
        {1, 2},
        np.arange(3),
        collections.deque([1]),
        range(3),
        Sample,
        Movable(),
        MovableDict(x=1),
        MovablePair(1, 2),
    ],
    ids=lambda leaf: type(leaf).__name__,
)
def test_leaves(leaf: Any) -> None:
    (found,), rebuild = flatten([leaf])
    assert found == ("[0]", leaf)
    assert found[1] is leaf
    assert rebuild(iter([leaf]))[0] is leaf

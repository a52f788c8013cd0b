"""Options that several functions share: their names, defaults and signature."""

import inspect
from typing import TYPE_CHECKING, Annotated, TypedDict

import pytest

from pinfeed import errors
from pinfeed.validation.arguments import explain_arguments
from pinfeed.validation.options import Default

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Speeds(TypedDict, total=False):
    fast: Annotated[bool, Default(True)]
    speed: Annotated[int | None, Default(None)]


@explain_arguments({"quick": "give fast=True"}, options=Speeds)
def move(distance: int, *, steps: int = 1, **options: "Unpack[Speeds]") -> dict[str, object]:
    return {"distance": distance, "steps": steps, **options}


def test_a_function_gets_every_option() -> None:
    assert move(2) == {"distance": 2, "steps": 1, "fast": True, "speed": None}
    assert move(2, fast=False, steps=3) == {
        "distance": 2,
        "steps": 3,
        "fast": False,
        "speed": None,
    }


def test_the_signature_names_every_option_and_its_default() -> None:
    parameters = inspect.signature(move).parameters
    assert list(parameters) == ["distance", "steps", "fast", "speed"]
    assert all(one.kind is one.KEYWORD_ONLY for one in list(parameters.values())[1:])
    assert (parameters["fast"].default, parameters["fast"].annotation) == (True, bool)
    assert (parameters["speed"].default, parameters["speed"].annotation) == (None, int | None)


def test_an_option_that_does_not_exist_is_explained() -> None:
    with pytest.raises(errors.UnknownArgument, match="move has no argument 'quick'; give fast="):
        move(2, quick=True)  # type: ignore[call-arg]
    with pytest.raises(errors.UnknownArgument, match="did you mean 'speed'"):
        move(2, sped=4)  # type: ignore[call-arg]

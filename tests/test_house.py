"""The rules of CONTRIBUTING that a program can check: sizes, parameters, docstrings, layers."""

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "pinfeed").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

MOST_LAYERS = 11
MOST_FUNCTION_LINES = 60
MOST_CLASS_LINES = 200
MOST_TEST_LINES = 600
MOST_TEST_NAME_LENGTH = 60
MOST_EXPLAINED_PARAMETERS = 21
MOST_PUBLIC_PARAMETERS = 12
MOST_PARAMETERS = 6
TORCH_SIGNATURES = {
    "pinfeed/training/embeddings/table.py HostEmbedding.__init__",
}
"""Functions that take the place of a function of torch, and so have its parameters."""

REASON = re.compile(r"\bbecause\b|\bone class\b")
"""Words of a class docstring that says why the class is long."""
FRAGMENT = r"(?:Of|What|How|Whose|Where|As far as|Nobody)\b"
"""Words that begin a fragment, which cannot be understood without the code."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """Function or class, with its place in the code."""

    path: Path
    name: str
    node: Function | ast.ClassDef
    is_public: bool
    is_method: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)} {self.name}"

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.node) or ""

    @property
    def source(self) -> str:
        lines = self.path.read_text().splitlines()
        return "\n".join(lines[self.node.lineno - 1 : self.node.end_lineno])


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def definitions(path: Path) -> Iterator[Definition]:
    """Yield the functions and classes of a file, inner ones too."""
    yield from _definitions(path, parsed(path), "", is_public=True)


def _definitions(
    path: Path, parent: ast.AST, prefix: str, *, is_public: bool
) -> Iterator[Definition]:
    for node in ast.iter_child_nodes(parent):
        if not isinstance(node, Function | ast.ClassDef):
            yield from _definitions(path, node, prefix, is_public=is_public)
            continue
        is_dunder = node.name.startswith("__") and node.name.endswith("__")
        public = is_public and (is_dunder or not node.name.startswith("_"))
        name = f"{prefix}{node.name}"
        yield Definition(path, name, node, public, isinstance(parent, ast.ClassDef))
        inside = public and isinstance(node, ast.ClassDef)
        yield from _definitions(path, node, f"{name}.", is_public=inside)


def n_docstring_lines(node: ast.AST) -> int:
    """Return how many lines the docstring of a function or class has."""
    first = node.body[0] if isinstance(node, Function | ast.ClassDef) else None
    if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
        return 0
    return (first.end_lineno or 0) - first.lineno + 1


def n_lines(node: Function | ast.ClassDef) -> int:
    """Return the length of a function or class without the docstrings in it."""
    length = (node.end_lineno or 0) - node.lineno + 1
    return length - sum(n_docstring_lines(inner) for inner in ast.walk(node))


def n_parameters(definition: Definition) -> int:
    """Return the number of parameters of a function, without ``self`` or ``cls``."""
    node = definition.node
    assert isinstance(node, Function)
    given = node.args
    several = [given.vararg, given.kwarg]
    n = len([*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, several)])
    is_static = any(ast.unparse(one) == "staticmethod" for one in node.decorator_list)
    return n - (definition.is_method and not is_static)


def most_parameters(definition: Definition) -> int:
    """Return the limit of the number of parameters of a function."""
    decorators = map(ast.unparse, definition.node.decorator_list)
    if any(one.startswith("explain_arguments(") for one in decorators):
        return MOST_EXPLAINED_PARAMETERS
    return MOST_PUBLIC_PARAMETERS if definition.is_public else MOST_PARAMETERS


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the docstrings of a file with their place: module, classes, functions, attributes."""
    for node in ast.walk(parsed(path)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield f"{path.relative_to(ROOT)}:{statement.lineno}", inspect.cleandoc(text)


def entries(docstring: str, section: str) -> list[str]:
    """Return the entries of a section of a docstring, such as ``Args``."""
    found = re.search(rf"^{section}:\n((?:    .*\n?|\n)*)", docstring, re.MULTILINE)
    return re.findall(r"^    (\S.*)", found[1], re.MULTILINE) if found else []


# The files are read by the first test that needs them, and not where tests are collected.
@functools.cache
def every_definition() -> list[Definition]:
    return [definition for path in FILES for definition in definitions(path)]


def functions() -> list[Definition]:
    return [one for one in every_definition() if isinstance(one.node, Function)]


def classes() -> list[Definition]:
    return [one for one in every_definition() if isinstance(one.node, ast.ClassDef)]


@functools.cache
def every_docstring() -> list[tuple[str, str]]:
    return [found for path in FILES for found in docstrings(path)]


def refuse(found: list[str]) -> None:
    """Fail with all findings, each on a line, if there are any."""
    assert not found, "\n".join(["", *found])


def test_the_import_contract_has_few_layers() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    layers = re.search(r'"imports go down".*?layers = \[(.*?)\]', text, re.DOTALL)
    assert layers is not None
    assert len(re.findall(r'"[^"]+"', layers[1])) <= MOST_LAYERS


def test_lines_of_c_are_as_short_as_those_of_python() -> None:
    files = [*(ROOT / "pinfeed/native").glob("*.[ch]"), *(ROOT / "tests/native").glob("*.c")]
    refuse(
        [
            f"{path.relative_to(ROOT)}:{number}"
            for path in sorted(files)
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if len(line) > 100
        ]
    )
    assert files


def test_functions_are_short() -> None:
    long = [str(one) for one in functions() if n_lines(one.node) > MOST_FUNCTION_LINES]
    refuse(long)


def test_a_long_class_says_why_it_is_one() -> None:
    # A public class says it in a comment, because its users do not need the reason.
    long = [one for one in classes() if n_lines(one.node) > MOST_CLASS_LINES]
    unexplained = [one for one in long if "# It is one class" not in one.source]
    refuse([str(one) for one in unexplained if not REASON.search(one.docstring)])


def test_functions_have_few_parameters() -> None:
    many = [
        f"{one}: {n_parameters(one)}"
        for one in functions()
        if n_parameters(one) > most_parameters(one) and str(one) not in TORCH_SIGNATURES
    ]
    refuse(many)


def test_test_files_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in TESTS}
    refuse([path.name for path, n in lengths.items() if n > MOST_TEST_LINES])


def test_names_of_tests_are_short() -> None:
    names = [name for path in TESTS for name in re.findall(r"def (test_\w+)", path.read_text())]
    assert len(names) > 1000
    refuse([name for name in names if len(name) > MOST_TEST_NAME_LENGTH])


def test_a_statement_sets_one_attribute() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        for target in node.targets
        if isinstance(target, ast.Tuple | ast.List)
        and any(isinstance(one, ast.Attribute) for one in target.elts)
    ]
    refuse(found)


def test_docstrings_begin_with_a_sentence() -> None:
    refuse([place for place, text in every_docstring() if re.match(FRAGMENT, text)])


@pytest.mark.parametrize("section", ["Args", "Attributes", "Raises"])
def test_entries_of_docstrings_begin_with_a_sentence(section: str) -> None:
    begin = re.compile(rf"[\w*`., ]+: {FRAGMENT}")
    found = [
        f"{place} {entry}"
        for place, text in every_docstring()
        for entry in entries(text, section)
        if begin.match(entry)
    ]
    refuse(found)


@pytest.mark.parametrize("section", ["Returns", "Yields"])
def test_results_in_docstrings_begin_with_a_sentence(section: str) -> None:
    found = [
        f"{place} {entry}"
        for place, text in every_docstring()
        for entry in entries(text, section)[:1]
        if re.match(FRAGMENT, entry)
    ]
    refuse(found)


def test_errors_in_docstrings_begin_with_their_condition() -> None:
    found = [
        f"{place} {entry}"
        for place, text in every_docstring()
        for entry in entries(text, "Raises")
        if not re.match(r"[\w.]+: (?:If|Always|As for)\b", entry)
    ]
    refuse(found)

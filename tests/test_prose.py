"""The words and sentences of pages, docstrings and comments."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = sorted((ROOT / "pinfeed").rglob("*.py"))
FILES = {str(path.relative_to(ROOT)): path for path in [*PAGES, *SOURCES]}

MOST_WORDS = 40
"""Words of the longest sentence, without code. Nearly all sentences have fewer than 25."""
PLAIN_WORDS = {
    "beside": "next to, in addition to, compared with",
    "meanwhile": "while ...",
    "nobody": "no caller, no thread",
    "somebody": "a caller, a thread",
    "hardly": "rarely, barely",
    "had better": "should",
    "under way": "in progress",
    "on its way": "in progress",
    "goes on": "continues",
    "as far as": "up to",
    "what is there": "existing",
    "row numbers": "row indices",
}
"""Words that readers had to read twice, and words to use instead."""


def test_words_are_plain() -> None:
    found = [
        f"{name}: {word!r} (use: {instead})"
        for name, path in FILES.items()
        for word, instead in PLAIN_WORDS.items()
        if re.search(rf"\b{word}\b", unwrapped(path.read_text()), re.IGNORECASE)
    ]
    assert not found, "\n".join(found)


def test_sentences_are_short() -> None:
    long = [
        f"{name}: {sentence}"
        for name, path in FILES.items()
        for text in texts(path)
        for sentence in sentences(text)
        if len(re.findall(r"[A-Za-z][\w'-]*", sentence.replace("CODE", ""))) > MOST_WORDS
    ]
    assert not long, f"sentences of more than {MOST_WORDS} words:\n" + "\n".join(long)


def unwrapped(text: str) -> str:
    """Return a text on one line, without the marks of comments."""
    return " ".join(line.lstrip("# ") for line in text.splitlines())


def texts(path: Path) -> Iterator[str]:
    """Yield the docstrings of a source file without examples, or a page without code and links."""
    text = path.read_text()
    if path.suffix == ".md":
        for unspoken in (r"```.*?```", r"<!--.*?-->", r"^#.*?$", r"^\[[\w-]+\]: .*?$", r"\*"):
            text = re.sub(unspoken, "", text, flags=re.DOTALL | re.MULTILINE)
        yield re.sub(r"\]\([^)]*\)", "]", text)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            yield re.sub(r"^ *(>>>|\.\.\.|.*[├└]).*$", "", docstring, flags=re.MULTILINE)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of paragraphs, list items, table cells and entries of docstrings."""
    text = re.sub(r"``[^`]*``|`[^`]*`", "CODE", text)
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\(?\d+[.)]) |\n(?=\s*\w+: )|\|", text):
        yield from re.split(r"(?<=[.!?:;])\s+(?=[\w(\"'])", " ".join(paragraph.split()))

"""Build hooks for the pages: show code that tests skip, and refuse pages that use the network."""

import re
import subprocess
from pathlib import Path
from typing import Any

# A browser loads the addresses in these elements. It loads the address of an <a> only on a click.
_TAGS = r"audio|embed|iframe|img|link|object|script|source|track|video"
_ADDRESS = r"((?:https?:)?//[^\"'\s>)]+)"
_IN_TAG = re.compile(
    rf"<(?:{_TAGS})\b[^>]*?[\s\"'](?:data|href|src|srcset)=[\"']?{_ADDRESS}", re.IGNORECASE
)
_IN_STYLE = re.compile(rf"(?:url\(|@import)\s*[\"']?{_ADDRESS}", re.IGNORECASE)
# The theme's script loads Mermaid from unpkg.com if a page has an element of this class.
_MERMAID = re.compile(r"<\w+\s[^>]*class=[\"']?[^\"'>]*\bmermaid\b")


def on_config(config: Any, **_: Any) -> None:
    """Show the version in the header, as a link to the repository that this clone is from."""
    version = re.search(r'__version__ = "(.+?)"', Path("pinfeed/__init__.py").read_text())
    assert version is not None
    command = ["git", "config", "--get", "remote.origin.url"]
    origin = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    config.repo_name = f"pinfeed {version[1]}"
    config.repo_url = repository(origin)


def repository(origin: str) -> str:
    """Return the page of a repository whose remote is ``origin``; if it has none, the changelog."""
    address = re.sub(r"^(?:ssh://)?git@([^:/]+)[:/]", r"https://\1/", origin).removesuffix(".git")
    return address if address.startswith("https://") else "changelog.html"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Highlight code that the tests skip (``python no-run``) like other Python code."""
    return markdown.replace("```python no-run\n", "```python\n")


def on_post_build(config: Any, **_: Any) -> None:
    """Check the built pages.

    Raises:
        PluginError: If a page would load something from the network, or if the rule in
            ``style.css`` for the copy button no longer fits the theme.
    """
    from mkdocs.exceptions import PluginError

    site = Path(config.site_dir)
    for path in sorted([*site.rglob("*.html"), *site.rglob("*.css")]):
        if found := fetched(path.read_text()):
            raise PluginError(
                f"{path.relative_to(site)} loads {', '.join(found)}; expected nothing from the "
                "network; keep a copy in docs/vendor/"
            )
    scripts = [path.read_text() for path in site.glob("assets/javascripts/bundle.*.js")]
    if not any("data-md-copying" in script for script in scripts):
        raise PluginError(
            "the theme's script does not set data-md-copying; expected it while the copy button "
            "reads a block; change the rule for console blocks in docs/style.css"
        )


def fetched(text: str) -> list[str]:
    """Return the network addresses that a page or a style sheet makes a browser load."""
    found = _IN_TAG.findall(text) + _IN_STYLE.findall(text)
    return [*found, "https://unpkg.com/mermaid"] if _MERMAID.search(text) else found

"""Writes hps/serve/page/runbooks.html, which servers show at `/runbooks`, from the pages for those on call: `make docs`."""

import re
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

_ROOT = Path(__file__).parents[1]
PAGES = ("runbooks.md", "operations.md")
PLACE = _ROOT / "hps" / "serve" / "page" / "runbooks.html"
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>hps: runbooks</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="page/page.css">
<link rel="stylesheet" href="page/runbooks.css">
</head>
<body>
<header>
  <p id="about">hps: runbooks</p>
  <nav><a href=".">Server</a></nav>
</header>
<main class="text">
"""


def page() -> str:
    """Return the page. Headings have the anchors of the pages; links to other pages are left out, since servers lack those."""
    parser, parts = MarkdownIt("commonmark").enable("table"), [_HEAD]
    for name in PAGES:
        tokens = parser.parse((_ROOT / "docs" / name).read_text())
        for token, inner in pairwise(tokens):
            if token.type == "heading_open":
                token.attrSet("id", slug(inner.content))
        for token in tokens:
            _keep_links_within(token.children or [])
        html = str(parser.renderer.render(tokens, parser.options, {}))
        parts.append(html.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>"))
    return "".join([*parts, "</main>\n</body>\n</html>\n"])


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _title(name: str) -> str:
    return slug((_ROOT / "docs" / name).read_text().partition("\n")[0].removeprefix("# "))


def _keep_links_within(tokens: list[Token]) -> None:
    kept = True
    for token in tokens:
        if token.type == "link_open":
            target, _, anchor = str(token.attrs["href"]).partition("#")
            kept = target in ("", *PAGES)
            token.attrs = {"href": f"#{anchor or _title(target)}"} if kept else {}
        if token.type in ("link_open", "link_close") and not kept:
            token.tag = "span"


if __name__ == "__main__":
    PLACE.write_text(page())

"""The paths of the pages at `/`, `/docs` and `/runbooks`, and of their parts."""

from typing import Final

PAGES: Final = {"/": "index.html", "/docs": "api.html", "/runbooks": "runbooks.html"}
PARTS: Final = ("page.css", "dom.js", "figures.js", "actions.js", "versions.js", "page.js", "api.js", "runbooks.css")
OPEN_PATHS: Final = frozenset({*PAGES, *(f"/page/{name}" for name in PARTS)})
"""Paths without a token: static files, the same for every server. Their data come from routes that need it."""

"""How the tests start a browser: Debian's Chromium, headless, which asks nobody for anything by itself."""

import shutil
from typing import Any, Final

CHROMIUM: Final[dict[str, Any]] = {
    "executable_path": shutil.which("chromium"),
    "args": [
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ],
}

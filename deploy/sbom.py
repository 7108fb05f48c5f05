"""Writes the Python packages of this environment as a CycloneDX 1.6 document: `python deploy/sbom.py > sbom.cdx.json`.

It needs nothing but Python, so that it runs in the environment that it describes. System packages are not in it.
"""

import json
import re
import sys
from importlib.metadata import Distribution, distributions
from typing import Any
from urllib.parse import quote

ROOT = "hps-server"


def document() -> dict[str, Any]:
    """Describe what is installed: every package with its version and licence, and which needs which."""
    installed = {normal(distribution.metadata["Name"]): distribution for distribution in distributions()}
    components = {name: component(name, distribution) for name, distribution in sorted(installed.items())}
    root = components.pop(ROOT) | {"type": "application"}
    needs = {
        name: sorted(set(needed(name, distribution)) & installed.keys() - {name})
        for name, distribution in sorted(installed.items())
    }
    purls = {name: component_["purl"] for name, component_ in (components | {ROOT: root}).items()}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": root},
        "components": list(components.values()),
        "dependencies": [
            {"ref": purls[name], "dependsOn": [purls[other] for other in others]} for name, others in needs.items()
        ],
    }


def component(name: str, distribution: Distribution) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{quote(distribution.version, safe='')}"
    found: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": distribution.version, "purl": purl}
    if expression := distribution.metadata.get("License-Expression"):
        found["licenses"] = [{"expression": expression}]
    elif names := licences(distribution):
        found["licenses"] = [{"license": {"name": name}} for name in names]
    return found


def licences(distribution: Distribution) -> list[str]:
    """Return what older metadata says: the classifiers, or else a field that some packages put a whole text into."""
    classifiers = [
        text.rpartition(" :: ")[2]
        for text in distribution.metadata.get_all("Classifier") or ()
        if text.startswith("License ::")
    ]
    return classifiers or [text for text in [(distribution.metadata.get("License") or "").strip()] if text and "\n" not in text]


def needed(name: str, distribution: Distribution) -> list[str]:
    """Return the names of the packages that a package needs. Of extras, only ours are known to have been asked for."""
    wanted = [text for text in distribution.requires or () if name == ROOT or not re.search(r";.*\bextra\b", text)]
    return [normal(re.split(r"[^\w.-]", text, maxsplit=1)[0]) for text in wanted]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    json.dump(document(), sys.stdout, indent=1)
    sys.stdout.write("\n")

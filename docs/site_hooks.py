"""Extends mkdocs: pages made of `openapi.json`, `metrics.json` and docstrings, and links to files of the repository."""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.python_api import page as python_api

_ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[([^\]]*)\]\(\.\./([^)#]+)[^)]*\)")
_METHODS = ("get", "post", "put", "delete")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages: the HTTP routes, the metrics and the Python API."""
    document = json.loads((_ROOT / "docs" / "openapi.json").read_text())
    files.append(File.generated(config, "http-routes.md", content=http_routes(document)))
    metrics = json.loads((_ROOT / "docs" / "metrics.json").read_text())
    files.append(File.generated(config, "metrics.md", content=metrics_table(metrics)))
    files.append(File.generated(config, "python-api.md", content=python_api()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Name files outside `docs/` by their path in the repository, where the page on GitHub links to them."""

    def name(link: re.Match[str]) -> str:
        text, path = link[1], link[2]
        if not (_ROOT / path).exists():
            raise PluginError(f"{page.file.src_path} links to ../{path}, which the repository does not have")
        return text if path.rstrip("/") in text else f"{text} (`{path}`)"

    return _LINK.sub(name, markdown)


def metrics_table(metrics: list[dict[str, Any]]) -> str:
    """Return a page in Markdown: every metric with its type, labels and help."""
    lines = [
        "# Metrics",
        "",
        "Every metric of `GET /metrics`. [Observability](observability.md#metrics) explains how to use them.",
        "",
        "| metric | type | labels | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric["labels"])
        lines.append(f"| `{metric['name']}` | {metric['kind']} | {labels} | {_cell(metric['help'])} |")
    return "\n".join([*lines, ""])


def http_routes(document: dict[str, Any]) -> str:
    """Return a page in Markdown: every route with its parameters, body and answers, and every schema."""
    lines = [
        "# HTTP routes",
        "",
        "Every route, as `GET /openapi.json` of a running server has it. [HTTP API](http-api.md) explains them.",
        "",
    ]
    operations = [(path, way, one) for path, ways in document["paths"].items() for way, one in ways.items() if way in _METHODS]
    for tag in dict.fromkeys(one["tags"][0] for _, _, one in operations):
        lines += [f"## {tag.capitalize()}", ""]
        for path, way, operation in operations:
            if operation["tags"][0] == tag:
                lines += _operation(path, way, operation)
    lines += ["## Schemas", ""]
    for name, schema in document["components"]["schemas"].items():
        lines += [f"### {name}", "", *_paragraph(schema), *_fields(schema)]
    return "\n".join(lines)


def _operation(path: str, way: str, operation: dict[str, Any]) -> list[str]:
    lines = [f"### `{way.upper()} {path}`", "", f"{operation['summary']}.", "", *_paragraph(operation)]
    if parameters := operation.get("parameters"):
        lines += ["| parameter | in | type | |", "| --- | --- | --- | --- |"]
        for parameter in parameters:
            need = "required" if parameter.get("required") else "optional"
            lines.append(
                f"| `{parameter['name']}` | {parameter['in']} | {_type(parameter['schema'])} "
                f"| {_cell(parameter.get('description', need))} |"
            )
        lines.append("")
    if body := operation.get("requestBody"):
        lines += [f"Body: {_contents(body['content'])}.", ""]
    lines += ["| status | answer | |", "| --- | --- | --- |"]
    for status, answer in operation["responses"].items():
        lines.append(f"| {status} | {_contents(answer.get('content', {}))} | {_cell(answer['description'])} |")
    return [*lines, ""]


def _fields(schema: dict[str, Any]) -> list[str]:
    if not (properties := schema.get("properties")):
        return []
    lines = ["| field | type | |", "| --- | --- | --- |"]
    for name, one in properties.items():
        notes = ["required"] if name in schema.get("required", ()) else []
        notes += [one["description"]] if "description" in one else []
        lines.append(f"| `{name}` | {_type(one)} | {_cell('; '.join(notes))} |")
    return [*lines, ""]


def _contents(content: dict[str, Any]) -> str:
    return ", ".join(f"`{media}` {_type(one.get('schema', {}))}".rstrip() for media, one in content.items())


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{one!r}`" for one in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"array of {_type(schema.get('items', {})) or 'any'}"
    if isinstance(of := schema.get("additionalProperties"), dict):
        return f"object of {_type(of)}"
    return str(schema.get("type", ""))


def _paragraph(one: dict[str, Any]) -> list[str]:
    return [one["description"], ""] if "description" in one else []


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())

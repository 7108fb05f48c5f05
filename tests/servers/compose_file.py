"""Reads a compose file and a Dockerfile as compose and the builder would, as far as the project's own files go."""

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests import ROOT

_VARIABLE = re.compile(r"\$(?:(?P<escaped>\$)|\{(?P<name>\w+)(?:(?P<kind>:[-?])(?P<text>[^}]*))?\})")


def interpolate(value: Any, variables: Mapping[str, str]) -> Any:
    """Replace `${NAME}`, `${NAME:-default}`, `${NAME:?error}` and `$$` as compose does."""
    if isinstance(value, dict):
        return {key: interpolate(one, variables) for key, one in value.items()}
    if isinstance(value, list):
        return [interpolate(one, variables) for one in value]
    if not isinstance(value, str):
        return value

    def replace(found: re.Match[str]) -> str:
        if found["escaped"]:
            return "$"
        got = variables.get(found["name"], "")
        if not got and found["kind"] == ":?":
            raise KeyError(f"{found['name']}: {found['text']}")
        return got or (found["text"] if found["kind"] == ":-" else "")

    return _VARIABLE.sub(replace, value)


def seconds(text: str) -> float:
    """A duration such as `1m30s` or `500ms`."""
    units = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}
    parts = re.findall(r"(\d+)(ms|s|m|h)", text)
    assert "".join(number + unit for number, unit in parts) == text, text
    return sum(int(number) * units[unit] for number, unit in parts)


@dataclass
class Stage:
    """What a stage of a Dockerfile says of the containers made of it, with what it has from its base."""

    image: str
    environment: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: dict[str, Any] = field(default_factory=dict)
    user: str = "root"
    instructions: list[tuple[str, str]] = field(default_factory=list)


def read_dockerfile(path: Path) -> dict[str, Stage]:
    """The stages of a Dockerfile by name. Knows the instructions that ours has."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage = Stage("")
    for line in re.sub(r"\\\n", " ", text).splitlines():
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        match name:
            case "":
                continue
            case "ARG":
                key, _, value = rest.partition("=")
                arguments[key] = value
            case "FROM":
                base, _, alias = rest.partition(" AS ")
                base = interpolate(base, arguments)
                stage = stages[alias.strip()] = deepcopy(stages[base]) if base in stages else Stage(base)
            case "ENV":
                stage.environment.update((key, value.strip('"')) for key, value in re.findall(r'(\w+)=("[^"]*"|\S+)', rest))
            case "ENTRYPOINT":
                stage.entrypoint, stage.command = json.loads(rest), []
            case "CMD":
                stage.command = json.loads(rest)
            case "USER":
                stage.user = rest
            case "HEALTHCHECK":
                options, _, command = rest.partition(" CMD ")
                stage.healthcheck = {
                    key.replace("-", "_"): value for key, value in re.findall(r"--([\w-]+)=(\S+)", options)
                } | {"test": ["CMD", *json.loads(command)]}
        stage.instructions.append((name, rest))
    return stages


class Compose:
    """A compose file with its variables filled in, cut down to some profiles.

    Args:
        path: of the file.
        variables: what the environment and `.env` would give.
        profiles: those to take; services without a profile are always there.
    """

    def __init__(self, path: Path, variables: Mapping[str, str], *profiles: str) -> None:
        self.directory = path.parent
        document = interpolate(yaml.safe_load(path.read_text()), variables)
        self.document = document
        self.services: dict[str, dict[str, Any]] = {
            name: service
            for name, service in document["services"].items()
            if not service.get("profiles") or set(service["profiles"]) & set(profiles)
        }

    def needs(self, name: str) -> dict[str, str]:
        """What a service waits for, as condition by service; those of other profiles left out where they may be."""
        needs = self.services[name].get("depends_on", {})
        absent = {other for other in needs if other not in self.services}
        assert all(needs[other].get("required") is False for other in absent), f"{name} needs {absent}"
        return {other: need["condition"] for other, need in needs.items() if other not in absent}

    def order(self) -> list[str]:
        """The services, each after what it waits for."""
        done: list[str] = []
        while len(done) < len(self.services):
            free = [name for name in self.services if name not in done and set(self.needs(name)) <= set(done)]
            assert free, f"services wait for each other: {set(self.services) - set(done)}"
            done += free
        return done

    def stage(self, name: str) -> Stage:
        """What the image of a service says; nothing where it is somebody else's."""
        build = self.services[name].get("build")
        if build is None:
            return Stage(self.services[name]["image"])
        return read_dockerfile((self.directory / build["context"]).resolve() / build["dockerfile"])[build["target"]]


def compose_of(profiles: tuple[str, ...], **variables: str) -> Compose:
    """The project's compose file, with secrets of a test."""
    path = ROOT / "deploy" / "docker-compose.yml"
    secrets = {"HPS_BEARER_TOKEN": "token4tests", "HPS_REDIS_PASSWORD": "password4tests", "GRAFANA_PASSWORD": "grafana4tests"}
    return Compose(path, secrets | variables, *profiles)

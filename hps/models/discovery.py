"""Finds models and their tables in a directory that nobody described: which are versions, which tables, how wide they are.

    <dir>/key, emb_vector                     a table
    <model>/<table>/key, emb_vector           a model of several tables
    <model>/<version>/<table>/...             versions of a model: directories named by a number
    <model>/<prefix>0_sparse_2000.model/...   what HugeCTR's training saves: of several iterations the last counts

HugeCTR's graph of a model (`dcn.json`) beside the directories names its tables.
"""

import json
import os
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hps.errors import ModelFileError
from hps.models.files import stored_shape
from hps.models.importing import natural
from hps.models.manifest import VERSION, read_json, within
from hps.models.repository import MODEL_ENTRY
from hps.models.sources import ModelSources

_SAVED = re.compile(r"(.*?)_?([0-9]+)_sparse_([0-9]+)(?:\.model)?")  # HugeCTR's: prefix, table, iteration
_DEPTH = 4  # of directories below the one that is searched


@dataclass(frozen=True, slots=True)
class FoundTable:
    """A table's directory. *Immutable.*

    Attributes:
        name: by its directory, or HugeCTR's graph.
        place: path or URI; relative to a version where the model has versions.
        dim: float32 elements of a vector.
        rows: of its files; of the latest version where there are several.
    """

    name: str
    place: str
    dim: int
    rows: int


@dataclass(frozen=True, slots=True)
class FoundModel:
    """Tables that belong together. *Immutable.*

    Attributes:
        name: by its directory.
        tables: in the order of their names (2 before 10), or of HugeCTR's numbers.
        version_path: the directory whose numbered directories are the versions; empty where there are none.
        versions: their numbers, ascending.
        entry: what a ps.json that was found says of the model.
    """

    name: str
    tables: tuple[FoundTable, ...]
    version_path: str = ""
    versions: tuple[str, ...] = ()
    entry: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Discovery:
    """What a directory holds. *Immutable.*

    Attributes:
        models: by name.
        repository: whether its models describe themselves (`model.json`), so that it is a `model_repository`.
    """

    models: tuple[FoundModel, ...]
    repository: bool = False


def discover(place: str, sources: ModelSources | None = None) -> Discovery:
    """Find the models below a directory. Sizes are looked at; no row is read.

    Raises:
        ModelFileError: it cannot be listed, holds no table, or two models have one name.
    """
    search = _Search(sources or ModelSources())
    root = search.locate(place)
    if any(search.holds(within(root, name), MODEL_ENTRY) for name in search.directories(root)):
        return Discovery((), repository=True)
    models = search.models(root, _DEPTH)
    if not models:
        held = ", ".join(search.names(root)[:8]) or "nothing"
        raise ModelFileError(
            f"searching {place}: got {held}, expected directories with the files key and emb_vector, at most {_DEPTH} deep, or "
            "a checkpoint"
        )
    names = [model.name for model in models]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ModelFileError(f"searching {place}: got two models called {repeated}, expected different names of directories")
    return Discovery(tuple(models))


def relocated(place: str, entry: Mapping[str, Any], sources: ModelSources | None = None) -> FoundModel:
    """The model of an entry of a ps.json whose files may have been moved to a directory, and how wide its tables really are.

    Args:
        place: where the files are looked for, by the last parts of their names, if they are not where the entry says.
        entry: its `model` and `sparse_files`.

    Raises:
        ModelFileError: a table is in neither place, or fits no dimension.
    """
    search = _Search(sources or ModelSources())
    tables, files = [], entry.get("sparse_files") or []
    names = entry.get("embedding_table_names") or [f"sparse_embedding{i}" for i in range(len(files))]
    for name, file in zip(names, files, strict=False):
        parts = str(file).rstrip("/").split("/")
        tries = [str(file), *(within(place, "/".join(parts[-count:])) for count in range(min(3, len(parts)), 0, -1))]
        found = next((search.locate(one) for one in tries if search.is_table(search.locate(one))), None)
        if found is None:
            raise ModelFileError(f"searching for table {name} of {entry.get('model')}: it is in none of {', '.join(tries)}")
        tables.append(FoundTable(str(name), found, *stored_shape(found, search.sources)))
    return FoundModel(str(entry.get("model")), tuple(tables), entry=entry)


def name_of(text: str) -> str:
    """A name of a model or a table, of what is allowed in one."""
    return re.sub("[^a-zA-Z0-9_-]", "_", text)[:120] or "model"


class _Search:
    """Lists directories. *One thread.*"""

    def __init__(self, sources: ModelSources) -> None:
        self.sources = sources

    def locate(self, place: str) -> str:
        return self.sources.locate(place)[1].rstrip("/") or "/"

    def directories(self, place: str) -> list[str]:
        return [one for one in self.sources.locate(place)[0].directories(place) if not one.startswith((".", "_"))]

    def names(self, place: str) -> list[str]:
        return self.sources.locate(place)[0].list(place)

    def holds(self, place: str, name: str) -> bool:
        return self.sources.locate(place)[0].exists(within(place, name))

    def is_table(self, place: str) -> bool:
        return self.holds(place, "key") and self.holds(place, "emb_vector")

    def models(self, place: str, depth: int) -> list[FoundModel]:
        """The models at a place and below it."""
        name = name_of(posixpath.basename(place).removesuffix(".model"))
        if self.is_table(place):
            return [FoundModel(name, (FoundTable(name, place, *stored_shape(place, self.sources)),))]
        below = self.directories(place) if depth else []
        versions = sorted((one for one in below if VERSION.fullmatch(one)), key=int)
        held = [self._tables(within(place, one), relative=True) for one in versions]
        if versions and all(held):
            return [FoundModel(name, tuple(held[-1]), place, tuple(versions))]
        tables = self._tables(place)
        found = [FoundModel(name, tuple(tables))] if tables else []
        places = {table.place for table in tables}
        others = [within(place, one) for one in below]
        return found + [
            model for one in others if one not in places and not self.is_table(one) for model in self.models(one, depth - 1)
        ]

    def _tables(self, place: str, *, relative: bool = False) -> list[FoundTable]:
        """The tables that lie in a directory, or which it is."""
        if relative and self.is_table(place):
            return [FoundTable("embedding", ".", *stored_shape(place, self.sources))]
        names = [one for one in sorted(self.directories(place), key=natural) if self.is_table(within(place, one))]
        graph = self._graph(place)
        latest: dict[tuple[str, int], tuple[int, str]] = {}
        plain = []
        for name in names:
            saved = _SAVED.fullmatch(name)
            if saved is None:
                plain.append((name_of(name.removesuffix(".model")), name))
                continue
            of = saved[1], int(saved[2])
            latest[of] = max(latest.get(of, (-1, "")), (int(saved[3]), name))
        prefixes = {prefix for prefix, _ in latest}
        for (prefix, number), (_, name) in sorted(latest.items()):
            own = graph[number] if number < len(graph) else f"sparse_embedding{number}"
            plain.append((own if len(prefixes) == 1 else name_of(f"{prefix}_{own}"), name))
        return [
            FoundTable(
                name, directory if relative else within(place, directory), *stored_shape(within(place, directory), self.sources)
            )
            for name, directory in plain
        ]

    def _graph(self, place: str) -> list[str]:
        """Names of the sparse embeddings of HugeCTR's graph of a model, in order; none if there is no such file."""
        filesystem = self.sources.locate(place)[0]
        for name in self.names(place):
            if os.path.splitext(name)[1] != ".json":
                continue
            try:
                layers = (read_json(filesystem, within(place, name)) or {}).get("layers")
            except ModelFileError:
                continue
            kinds = [one for one in layers if isinstance(one, dict)] if isinstance(layers, list) else []
            tops = [one.get("top") for one in kinds if "Sparse" in str(one.get("type"))]
            if found := [name_of(str(top)) for top in tops if top]:
                return found
        return []


def entries_of(path: str) -> list[dict[str, Any]]:
    """The entries of `models` of a ps.json, as they are; none where the file is something else."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            models = json.load(file).get("models")
    except (OSError, ValueError, AttributeError):
        return []
    listed = models if isinstance(models, list) else []
    return [one for one in listed if isinstance(one, dict) and isinstance(one.get("sparse_files"), list)]

"""Finds the models, versions and tables in a directory without a description.

    <dir>/key, emb_vector                     a table; or <dir>/rows, sealed
    <model>/<table>/key, emb_vector           a model of several tables
    <model>/<version>/<table>/...             versions of a model: directories named by a number
    <model>/<prefix>0_sparse_2000.model/...   files of HugeCTR's training; the last iteration counts

HugeCTR's graph of a model (`dcn.json`) beside the directories names its tables.
"""

import json
import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hps.errors import ModelFileError
from hps.ground.small_files import read_small
from hps.models.manifest import VERSION, read_json, read_manifest, within
from hps.models.repository import MODEL_ENTRY
from hps.models.sealed import ROWS_FILE, stored_shape_of
from hps.models.sources import ModelSources

_SAVED = re.compile(r"(.*?)_?([0-9]+)_sparse_([0-9]+)(?:\.model)?")  # HugeCTR's: prefix, table, iteration
_WORKSPACES = 4  # parallel lookups: with HugeCTR's 1, every lookup waits for the previous one
_DEPTH = 4  # levels of directories to search


@dataclass(frozen=True, slots=True)
class FoundTable:
    """A table's directory. *Immutable.*

    Attributes:
        name: from its directory or HugeCTR's graph.
        place: path or URI; relative to the version if the model has versions.
        rows: rows of the files, or of the latest version's.
    """

    name: str
    place: str
    dim: int
    rows: int


@dataclass(frozen=True, slots=True)
class FoundModel:
    """The tables of a model. *Immutable.*

    Attributes:
        name: from its directory.
        tables: in the order of their ids: that of a `version.json` or of HugeCTR's numbers, else the natural order of names.
        version_path: directory of the numbered versions; empty without versions.
        versions: their numbers, ascending.
        entry: the model's entry in a ps.json beside it.
    """

    name: str
    tables: tuple[FoundTable, ...]
    version_path: str = ""
    versions: tuple[str, ...] = ()
    entry: Mapping[str, Any] = field(default_factory=dict)

    def new_entry(self) -> dict[str, Any]:
        """Return an entry of `models` that serves the model."""
        return {
            "model": self.name,
            **({"version_path": self.version_path} if self.version_path else {}),
            "sparse_files": [table.place for table in self.tables],
            "embedding_table_names": [table.name for table in self.tables],
            "embedding_vecsize_per_table": [table.dim for table in self.tables],
            **default_settings(len(self.tables)),
        }


def default_settings(tables: int) -> dict[str, Any]:
    """Return the settings of a new entry of `models`; no key of a table is ever answered with the default vector."""
    return {
        "max_batch_size": 4096,
        "maxnum_catfeature_query_per_table_per_sample": [1] * tables,
        "num_of_worker_buffer_in_pool": _WORKSPACES,
        "default_value_for_each_table": [0.0] * tables,
        "deployed_device_list": [0],
        "gpucacheper": 0.5,
        "hit_rate_threshold": 1.1,
    }


@dataclass(frozen=True, slots=True)
class Discovery:
    """The content of a directory. *Immutable.*

    Attributes:
        repository: whether its models have a `model.json`, so that it can be a `model_repository`.
    """

    models: tuple[FoundModel, ...]
    repository: bool = False


def discover(place: str) -> Discovery:
    """Find the models below a directory. Only the sizes of files are read.

    Raises:
        ModelFileError: the directory cannot be listed, holds no table, or holds two models with one name.
    """
    search = _Search()
    root = search.locate(place)
    if any(search.has(within(root, name), MODEL_ENTRY) for name in search.directories(root)):
        return Discovery((), repository=True)
    models = search.models(root, _DEPTH)
    if not models:
        contents = ", ".join(search.names(root)[:8]) or "nothing"
        raise ModelFileError(
            f"searching {place}: got {contents}, expected directories with the files key and emb_vector, at most {_DEPTH} "
            "deep, or a checkpoint"
        )
    names = [model.name for model in models]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ModelFileError(f"searching {place}: got two models called {repeated}, expected different names of directories")
    return Discovery(tuple(models))


def relocated(place: str, entry: Mapping[str, Any]) -> FoundModel:
    """Find the files of an entry of a ps.json, which may have been moved, and the widths of its tables.

    Args:
        place: directory to search if the files are not at the entry's paths: by relative paths, then by the last parts of them.
        entry: an entry of `models` with `model` and `sparse_files`.

    Raises:
        ModelFileError: a table is in neither place, or fits no dimension.
    """
    search = _Search()
    tables, files = [], entry.get("sparse_files") or []
    names = entry.get("embedding_table_names") or [f"sparse_embedding{i}" for i in range(len(files))]
    for name, file in zip(names, files, strict=False):
        parts = str(file).rstrip("/").split("/")
        relative = [] if posixpath.isabs(str(file)) or ":" in str(file) else [os.path.join(place, str(file))]
        tries = [str(file), *relative, *(within(place, "/".join(parts[-count:])) for count in range(min(3, len(parts)), 0, -1))]
        found = next((search.locate(path) for path in tries if search.is_table(search.locate(path))), None)
        if found is None:
            raise ModelFileError(f"searching for table {name} of {entry.get('model')}: it is in none of {', '.join(tries)}")
        tables.append(FoundTable(str(name), found, *stored_shape_of(found, search.sources)))
    return FoundModel(str(entry.get("model")), tuple(tables), entry=entry)


def name_of(text: str) -> str:
    """Turn a text into a valid name of a model or table."""
    return re.sub("[^a-zA-Z0-9_-]", "_", text) or "model"


def in_order(names: Sequence[str]) -> list[str]:
    """Return the order of ids of a source's names: its own, unless that says nothing.

    Names that are sorted as text, or that differ only in numbers, are in natural order.
    """
    numbered = len({re.sub("[0-9]+", "", name) for name in names}) == 1
    return sorted(names, key=natural) if numbered or list(names) == sorted(names) else list(names)


def natural(name: str) -> list[tuple[int, str]]:
    """Make a sort key that compares numbers in names by value (2 before 10)."""
    parts = re.split(r"(\d+)", name)
    return [(int(part) if i % 2 else 0, part) for i, part in enumerate(parts)]


class _Search:
    """Lists directories. *One thread.*"""

    def __init__(self) -> None:
        self.sources = ModelSources()

    def locate(self, place: str) -> str:
        return self.sources.locate(place)[1].rstrip("/") or "/"

    def directories(self, place: str) -> list[str]:
        return [
            directory for directory in self.sources.locate(place)[0].directories(place) if not directory.startswith((".", "_"))
        ]

    def names(self, place: str) -> list[str]:
        return self.sources.locate(place)[0].list(place)

    def has(self, place: str, name: str) -> bool:
        return self.sources.locate(place)[0].exists(within(place, name))

    def is_table(self, place: str) -> bool:
        return (self.has(place, "key") and self.has(place, "emb_vector")) or self.has(place, ROWS_FILE)

    def models(self, place: str, depth: int) -> list[FoundModel]:
        """Find the models in a directory and below it."""
        name = name_of(posixpath.basename(place).removesuffix(".model"))
        if self.is_table(place):
            return [FoundModel(name, (FoundTable(name, place, *stored_shape_of(place, self.sources)),))]
        directories = self.directories(place) if depth else []
        versions = sorted((directory for directory in directories if VERSION.fullmatch(directory)), key=int)
        tables_by_version = [self._tables(within(place, version), relative=True) for version in versions]
        if versions and all(tables_by_version):
            return [FoundModel(name, tuple(tables_by_version[-1]), place, tuple(versions))]
        tables = self._tables(place)
        found = [FoundModel(name, tuple(tables))] if tables else []
        places = {table.place for table in tables}
        others = [within(place, directory) for directory in directories]
        return found + [
            model
            for other in others
            if other not in places and not self.is_table(other)
            for model in self.models(other, depth - 1)
        ]

    def _tables(self, place: str, *, relative: bool = False) -> list[FoundTable]:
        """Find the tables in a directory; with `relative`, the directory may be a table itself."""
        if relative and self.is_table(place):
            return [FoundTable("embedding", ".", *stored_shape_of(place, self.sources))]
        names = [directory for directory in self._in_order(place) if self.is_table(within(place, directory))]
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
            graph_name = graph[number] if number < len(graph) else f"sparse_embedding{number}"
            plain.append((graph_name if len(prefixes) == 1 else name_of(f"{prefix}_{graph_name}"), name))
        return [
            FoundTable(
                name,
                directory if relative else within(place, directory),
                *stored_shape_of(within(place, directory), self.sources),
            )
            for name, directory in plain
        ]

    def _in_order(self, place: str) -> list[str]:
        """List the directories of tables: first those of a `version.json`, in its order, then the others by name."""
        try:
            manifest = read_manifest(place, self.sources)
        except ModelFileError:
            manifest = None
        written = dict.fromkeys(posixpath.dirname(path) for path in manifest.files) if manifest else {}
        directories = self.directories(place)
        return [directory for directory in written if directory in directories] + [
            directory for directory in sorted(directories, key=natural) if directory not in written
        ]

    def _graph(self, place: str) -> list[str]:
        """Read the names of the sparse embeddings in HugeCTR's graph of a model, in order; none without a graph."""
        filesystem = self.sources.locate(place)[0]
        for name in self.names(place):
            if os.path.splitext(name)[1] != ".json":
                continue
            try:
                layers = (read_json(filesystem, within(place, name)) or {}).get("layers")
            except ModelFileError:
                continue
            kinds = [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
            tops = [kind.get("top") for kind in kinds if "Sparse" in str(kind.get("type"))]
            if found := [name_of(str(top)) for top in tops if top]:
                return found
        return []


def entries_of(path: str) -> list[dict[str, Any]]:
    """Read the entries of `models` in a ps.json, unchecked; none if the file is something else."""
    try:
        models = json.loads(read_small(path).decode("utf-8-sig")).get("models")
    except (OSError, ValueError, AttributeError, RecursionError):
        return []
    listed = models if isinstance(models, list) else []
    return [entry for entry in listed if isinstance(entry, dict) and isinstance(entry.get("sparse_files"), list)]

"""Writes increments of a trainer as the next version of a model, a delta.

A directory of increments has an entry for each, named by its step: `step_1200`, a directory with the files of any format that
`hps import` reads, or `<prefix>_step_1200.parquet`. They are applied in the order of their steps: of a key that several change,
the last one counts; a key that one deletes and a later one changes is present.

No file lists the steps. Missing ones are found by the interval between steps, by default the most frequent, and by the step in
the `version.json` of the base.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt

from hps.configuration.tiers import ModelSourceConfig
from hps.errors import InvalidInputError, ModelFileError, ModelFileNotFoundError
from hps.filesystems.local import LocalFileSystem, local_path
from hps.ground.progress import NoProgress, Progress
from hps.models.deltas import MOST_DELTAS
from hps.models.importing.checkpoint import CheckpointTable, find_tables
from hps.models.manifest import VERSION, VersionManifest, read_manifest, within
from hps.models.sealed import ROWS_FILE, stored_shape_of
from hps.models.sources import ModelSources
from hps.models.writer import write_version
from hps.types import FloatArray, KeyArray

_FILES = LocalFileSystem()
_STEP = re.compile(r"(?:.+_)?step_(?P<step>\d{1,18})(?:\.parquet)?")
_LISTED = 8


@dataclass(frozen=True, slots=True)
class ImportedDelta:
    """A version that was written from increments. *Immutable.*

    Attributes:
        place: path or URI of the version.
        steps: steps of the increments, ascending; empty for a source without steps.
        changed: number of rows of each table, by its directory; of a key that several increments change there are several.
        deleted: number of deleted keys of each table.
    """

    place: str
    steps: tuple[int, ...]
    changed: Mapping[str, int]
    deleted: Mapping[str, int]


def import_delta(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    delta_of: str,
    *,
    tables: str,
    after: int | None = None,
    every: int | None = None,
    keys: str | None = None,
    file_format: str | None = None,
    dtype: str | None = None,
    first_key: int | None = None,
    model_source: ModelSourceConfig | None = None,
    progress: Progress | None = None,
) -> ImportedDelta:
    """Write increments of a trainer as a version that changes another one. It appears only when complete.

    Args:
        source: local path of one increment, in any format of `import_tables`, or of a directory of increments by step.
        destination: path or URI of the new version, `<model>/<number>`.
        delta_of: number of the version that the increments change, beside the new one. It has every table that they name.
        tables: pattern of the tables' names in the source, as in `import_tables`. A table changes `<name>.model` or `<name>`.
        after: step that the rows of `delta_of` are of; earlier increments are left out. By default that of its `version.json`.
        every: interval between steps, by default the most frequent one; 0 if it is irregular, so that none can be missed.
        keys, file_format, dtype, first_key: as in `import_tables`.
        model_source: how to reach the destination.
        progress: receives the number of written rows.

    Raises:
        ModelFileError: a step is missing or there twice, none is new, an increment cannot be read or does not fit the
            tables, the other version is missing, or the new one exists.
        InvalidInputError: as in `import_model`; or `after` is before the step of `delta_of`, or given without steps.
        CapacityError: there is no memory for the keys of a table in shards.
    """
    path, sources = local_path(os.fspath(source)), ModelSources(model_source)
    place = os.fspath(destination).rstrip("/")
    model, _, version = place.rpartition("/")
    if not (VERSION.fullmatch(version) and VERSION.fullmatch(delta_of)):
        raise InvalidInputError(
            f"importing to {place}: got version {version!r} as a delta of {delta_of!r}, expected <model>/<number> and a number"
        )
    manifest, dims = _base(model or ".", delta_of, sources)
    steps, start = find_steps(path), _start(manifest, delta_of, after)
    increments: dict[int, str] = {}
    if steps is not None:
        increments = _choose(path, steps, start, every)
    elif after is not None or every is not None:
        raise InvalidInputError(
            f"importing {path}: got --after or --every, expected a directory of increments named by their steps"
        )
    found = [
        find_tables(increment, tables, keys=keys, file_format=file_format, dtype=dtype, first_key=first_key, delta=True)
        for increment in (increments.values() if steps is not None else [path])
    ]
    merged = _by_directory(path, found, dims)
    counts: dict[str, int] = {}
    progress = progress or NoProgress()
    for name, parts in merged.items():
        total = sum(table.selection.rows for _, table in parts)
        progress.start(within(place, name), total, total * (8 + 4 * dims[name]))
    changes = {name: _Changes(name, parts) for name, parts in merged.items()}

    def rows(name: str) -> Iterator[tuple[KeyArray, FloatArray]]:
        for chunk, vectors in changes[name].chunks():
            yield chunk, vectors
            counts[name] = counts.get(name, 0) + chunk.size
            progress.advance(within(place, name), chunk.size)
        progress.finish(within(place, name))

    write_version(
        place,
        {name: rows(name) for name in merged},
        delta_of=delta_of,
        deleted={name: change.deleted for name, change in changes.items()},
        note=f"imported from {os.path.basename(path.rstrip('/'))}"
        + (f", steps {_text(list(increments))}" if increments else ""),
        step=max(increments, default=start),
        sources=sources,
    )
    return ImportedDelta(
        place,
        tuple(increments),
        {name: counts.get(name, 0) for name in merged},
        {name: change.deleted.size for name, change in changes.items()},
    )


def find_steps(path: str) -> dict[int, str] | None:
    """Find the increments in a directory, by step and ascending, or the one that a path is; None if no name has a step.

    Raises:
        ModelFileError: two entries are of one step.
    """
    if match := _STEP.fullmatch(os.path.basename(path.rstrip("/"))):
        return {int(match["step"]): path}
    if not os.path.isdir(path):
        return None
    found: dict[int, str] = {}
    for name in _FILES.list(path):
        entry = os.path.join(path, name)
        match = _STEP.fullmatch(name)
        if match is None or os.path.isdir(entry) == name.endswith(".parquet"):
            continue
        step = int(match["step"])
        if step in found:
            raise ModelFileError(
                f"importing {path}: got {os.path.basename(found[step])} and {name} of step {step}, expected one increment "
                "for each step"
            )
        found[step] = entry
    return {step: found[step] for step in sorted(found)} or None


def _start(manifest: VersionManifest | None, delta_of: str, after: int | None) -> int | None:
    """Choose the step that the base is of."""
    known = manifest.step if manifest else None
    if after is not None and known is not None and after < known:
        raise InvalidInputError(
            f"importing a delta of version {delta_of}: got --after {after}, expected {known} or later: the version has the "
            f"rows of step {known}, which older increments would overwrite"
        )
    return known if after is None else after


def _choose(path: str, steps: Mapping[int, str], after: int | None, every: int | None) -> dict[int, str]:
    """Choose the increments after a step; refuse missing ones."""
    chosen = {step: entry for step, entry in steps.items() if after is None or step > after}
    if not chosen:
        raise ModelFileError(
            f"importing {path}: got steps {_text(list(steps))}, expected one after {after}, which the version has"
        )
    gaps = Counter(later - earlier for earlier, later in pairwise(steps))
    interval = every if every is not None else min(gaps, key=lambda gap: (-gaps[gap], gap), default=0)
    first = min(chosen) if after is None else after + 1
    if interval:
        due = range(-(-first // interval) * interval, max(chosen) + 1, interval)
        missing = list(islice((step for step in due if step not in chosen), _LISTED))
        if missing:
            raise ModelFileError(
                f"importing {path}: got no increment of step {_text(missing)} among steps {_text(list(chosen))}, expected one "
                f"for each multiple of {interval}; copy what is missing, or import all rows again. If the interval is "
                "another, say --every N, or --every 0 for an irregular one"
            )
    return chosen


def _base(model: str, version: str, sources: ModelSources) -> tuple[VersionManifest | None, dict[str, int]]:
    """Read the manifest of a version, and the width of each of its tables by directory, from the version with all rows."""
    place = within(model, version)
    manifest = last = read_manifest(place, sources)
    for _ in range(MOST_DELTAS):
        if last is None or not last.delta_of:
            break
        place = within(model, last.delta_of)
        last = read_manifest(place, sources)
    else:
        raise ModelFileError(
            f"importing a delta of version {version}: it is delta {MOST_DELTAS} in a row; import all rows again"
        )
    filesystem, directory = sources.locate(place)
    below = [name for name in sorted(filesystem.directories(directory)) if not name.startswith(".")]
    names = [
        name for name in below if any(filesystem.exists(within(within(directory, name), file)) for file in ("key", ROWS_FILE))
    ]
    if not names:
        raise ModelFileNotFoundError(
            f"importing a delta of version {version}: {place} has no table, expected directories with key and emb_vector; "
            f"import all rows to {within(model, version)} first"
        )
    return manifest, {name: stored_shape_of(within(directory, name), sources)[0] for name in names}


def _by_directory(
    path: str, found: Sequence[Mapping[str, CheckpointTable]], dims: Mapping[str, int]
) -> dict[str, list[tuple[int, CheckpointTable]]]:
    """Arrange the tables of all increments, with their numbers, by the directory that they change."""
    merged: dict[str, list[tuple[int, CheckpointTable]]] = {name: [] for name in dims}
    for number, tables in enumerate(found):
        for name, table in tables.items():
            directory = next((directory_name for directory_name in (f"{name}.model", name) if directory_name in dims), None)
            if directory is None:
                raise ModelFileError(
                    f"importing {path}: got table {name!r}, expected a table of the version that it changes: "
                    f"{', '.join(dims)}; choose --tables so that * matches its name"
                )
            if table.selection.dim != dims[directory]:
                raise ModelFileError(
                    f"importing {table.checkpoint.arrays.path}: got {table.selection.dim} elements a row of {name!r}, expected "
                    f"{dims[directory]}, as in the version that it changes"
                )
            merged[directory].append((number, table))
    if not any(merged.values()):
        raise ModelFileError(
            f"importing {path}: got no row of any table, expected rows of some of: {', '.join(dims)}; see --tables"
        )
    return merged


class _Changes:
    """The rows and the deleted keys of a table in several increments, as one delta. *One thread.*

    Attributes:
        deleted: (m,) int64, distinct and ascending: keys that any increment deletes.
    """

    def __init__(self, name: str, parts: Sequence[tuple[int, CheckpointTable]]) -> None:
        self._parts = parts
        none = np.empty(0, np.int64)
        keys, numbers = [none], [none]
        for number, table in parts:
            for chunk in table.deleted():
                keys.append(chunk.copy())
                numbers.append(np.full(chunk.size, number, np.int64))
        every, of = np.concatenate(keys), np.concatenate(numbers)
        order = np.argsort(every, kind="stable")  # increments are in order, and remain so for each key
        every, of = every[order], of[order]
        last = np.ones(every.size, np.bool_)
        last[:-1] = every[1:] != every[:-1]
        self.deleted: KeyArray = every[last]
        self._deleted_by: npt.NDArray[np.int64] = of[last]

    def chunks(self) -> Iterator[tuple[KeyArray, FloatArray]]:
        """Yield the rows, in the order of the increments, that no later increment deletes."""
        for number, table in self._parts:
            for keys, vectors in table.chunks():
                if self.deleted.size:
                    at = np.minimum(np.searchsorted(self.deleted, keys), self.deleted.size - 1)
                    kept = ~((self.deleted[at] == keys) & (self._deleted_by[at] > number))
                    keys, vectors = keys[kept], vectors[kept]
                yield keys, vectors


def _text(steps: Sequence[int]) -> str:
    """List steps for messages."""
    if len(steps) <= _LISTED:
        return ", ".join(map(str, steps))
    return f"{', '.join(map(str, steps[: _LISTED - 1]))}, ... {steps[-1]}"

"""The routes of lookups and of rows, by path."""

from typing import NamedTuple

from hps.serve.protocol.schemas import INFER, INFER_VERSION, LOOKUP, ROW, ROWS, SCORE


class LookupTarget(NamedTuple):
    """The lookup route of a path, and the path's parameters."""

    route: str
    model_name: str
    version: str | None = None  # the serving one

    @property
    def is_json(self) -> bool:
        """Whether the body of a request is JSON alone."""
        return self.route in (LOOKUP, SCORE)


def lookup_target(path: str) -> LookupTarget | None:
    """Return the lookup route of a path; None for other routes."""
    match path.split("/"):
        case ["", "v2", "models", model, "infer"]:
            return LookupTarget(INFER, model)
        case ["", "v1", "models", model, "lookup"]:
            return LookupTarget(LOOKUP, model)
        case ["", "v1", "models", model, "score"]:
            return LookupTarget(SCORE, model)
        case ["", "v2", "models", model, "versions", version, "infer"]:
            return LookupTarget(INFER_VERSION, model, version)
    return None


class RowTarget(NamedTuple):
    """The row route of a path, and the path's parameters."""

    route: str
    model: str
    table: str
    key: str = ""


def row_target(path: str) -> RowTarget | None:
    """Return the row route of a path; None for other routes."""
    match path.split("/"):
        case ["", "v1", "models", model, "tables", table, "rows"]:
            return RowTarget(ROWS, model, table)
        case ["", "v1", "models", model, "tables", table, "rows", key]:
            return RowTarget(ROW, model, table, key)
    return None

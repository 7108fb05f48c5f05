"""The routes of rows, by path."""

from typing import NamedTuple

from hps.serve.protocol.schemas import ROW, ROWS


class RowTarget(NamedTuple):
    """The row route of a path, and the path's parameters."""

    route: str
    model: str
    table: str
    key: str = ""


def row_target(path: str) -> RowTarget | None:
    match path.split("/"):
        case ["", "v1", "models", model, "tables", table, "rows"]:
            return RowTarget(ROWS, model, table)
        case ["", "v1", "models", model, "tables", table, "rows", key]:
            return RowTarget(ROW, model, table, key)
    return None

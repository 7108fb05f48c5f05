"""What the codecs know about a model, and how many keys they let through."""

from collections.abc import Iterable

from hps.errors import TooManyKeysError, UnknownTableError
from hps.types import TableSpec


class ServedModel:
    """What the codecs know about a model. Immutable; equal to itself alone.

    Args:
        name: of the model.
        tables: at least one, in the order of their ids.
    """

    def __init__(self, name: str, tables: tuple[TableSpec, ...]) -> None:
        self.name = name
        self.tables = tables
        self._indices = {table.table_name: index for index, table in enumerate(tables)}

    def has_table(self, name: str) -> bool:
        """Whether the model has a table of this name."""
        return name in self._indices

    def table_index(self, name: str, what: str) -> int:
        """The index of a table.

        Raises:
            UnknownTableError: the model has no such table.
        """
        try:
            return self._indices[name]
        except KeyError:
            known = ", ".join(self._indices)
            raise UnknownTableError(f"{what}: got table {name[:120]!r}, wanted one of model {self.name!r}: {known}") from None


def check_counts(counts: Iterable[tuple[TableSpec, int]], max_keys: int) -> int:
    """Refuse more keys than the service or a table takes, before anything is allocated for them.

    Returns:
        How many floats the vectors of the keys have together.

    Raises:
        TooManyKeysError: naming the limit that was passed.
    """
    total = floats = 0
    for table, count in counts:
        if count > table.max_keys:
            raise TooManyKeysError(
                f"looking up table {table.table_name!r} of model {table.model_name!r}: got {count} keys, wanted at most "
                f"{table.max_keys} (max_batch_size x maxnum_catfeature_query_per_table_per_sample); send fewer at once"
            )
        total += count
        floats += count * table.dim
    if total > max_keys:
        raise TooManyKeysError(
            f"reading the request: got {total} keys, wanted at most {max_keys} (service.max_keys_per_request); "
            "send fewer at once"
        )
    return floats

"""How many keys a lookup may have."""

from collections.abc import Sequence

from hps.cache.base import Segment
from hps.errors import TooManyKeysError
from hps.types import TableSpec


def refuse_too_many_keys(tables: Sequence[TableSpec], max_keys: Sequence[int], segments: Sequence[Segment]) -> None:
    """Check a lookup against the limits of its tables.

    Args:
        tables: of the model.
        max_keys: `max_keys` of each of them.
        segments: of the lookup.

    Raises:
        TooManyKeysError: a segment has more keys than its table allows.
    """
    for segment in segments:
        if segment.n > max_keys[segment.table]:
            table = tables[segment.table]
            raise TooManyKeysError(
                f"looking up table {table.table_name!r} of model {table.model_name!r}: got {segment.n} keys, "
                f"wanted at most {table.max_keys} (max_batch_size x maxnum_catfeature_query_per_table_per_sample); "
                "send fewer or raise them"
            )

"""What a check found: one line for people, and for programs whether all is well."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check. *Immutable.*

    Attributes:
        level: `good`; `note` and `warning` are no failures; `wrong`: something must be changed; `unreachable`: it cannot be
            told, or cannot be used now.
        where: the key of the configuration that it is about, as in a report.
        text: what was found.
    """

    level: Literal["good", "note", "warning", "wrong", "unreachable"]
    where: str
    text: str

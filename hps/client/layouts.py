"""Decides which servers hold which keys of a model whose tables are split into shares. Without I/O.

Servers of the same number of shares that have all of them are a *layout*. A model grows by servers of a layout with more
shares: it is used from the moment it is complete, and the servers of the old one can leave then.
"""

from collections.abc import Mapping
from typing import NamedTuple

from hps.ground.shares import TableShare


class ShareLayout(NamedTuple):
    """Servers of one number of shares."""

    of: int
    replicas: tuple[tuple[int, ...], ...]  # by share: indices of its servers, ascending

    @property
    def missing(self) -> tuple[int, ...]:
        """Shares without a server."""
        return tuple(share for share, servers in enumerate(self.replicas) if not servers)


def layouts_of(declared: Mapping[int, TableShare]) -> list[ShareLayout]:
    """Return the layouts of servers, the best first: complete ones, then incomplete ones, each with most shares first.

    Args:
        declared: by server, the share that it holds.
    """
    found = []
    for of in {share.of for share in declared.values()}:
        replicas: list[list[int]] = [[] for _ in range(of)]
        for server, share in sorted(declared.items()):
            if share.of == of:
                replicas[share.index].append(server)
        found.append(ShareLayout(of, tuple(map(tuple, replicas))))
    return sorted(found, key=lambda layout: (bool(layout.missing), -layout.of))


def refusal_text(layouts: list[ShareLayout]) -> str:
    """Describe why no layout can be used."""
    found = "; ".join(
        f"of {layout.of} shares none has {', '.join(map(str, layout.missing))}" for layout in layouts if layout.missing
    )
    return f"the servers do not have all shares of its tables: {found}"

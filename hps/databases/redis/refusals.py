"""Error replies of Redis: which say where to ask instead, and what the others mean for the user."""

from typing import Final

from hps.databases.redis.connections import Node
from hps.errors import DatabaseError

_ADVICE: Final = {
    "NOAUTH": "it wants a password: set user_name and password, or HPS_REDIS_PASSWORD",
    "WRONGPASS": "user_name or password is wrong",
    "NOPERM": "the user may not do this: grant it the commands and the keys hps_et{*",
    "OOM": "it is full: give it more maxmemory, or lower overflow_margin",
    "LOADING": "it is reading its data from disk; it answers when it has",
    "READONLY": "it is a replica; give the address of the primary",
    "MASTERDOWN": "it is a replica that has lost its primary",
    "CLUSTERDOWN": "the cluster is not whole; see CLUSTER INFO",
    "MISCONF": "it cannot save its data and therefore takes no writes; see its log",
    "BUSY": "a script keeps it busy",
    "NOREPLICAS": "too few replicas are connected to it for a write",
    "WRONGTYPE": "another program uses this key for something else",
}
_ELSEWHERE: Final = ("MOVED", "ASK", "TRYAGAIN")


def is_elsewhere(refusal: str) -> bool:
    """Whether the request should be made again: at another node, or here in a moment."""
    return refusal.split(" ", 1)[0] in _ELSEWHERE


def target_of(refusal: str, node: Node) -> tuple[int, Node] | None:
    """The slot and the node that a MOVED or ASK names, asked of `node`; None where it names none."""
    words = refusal.split(" ")
    if words[0] not in ("MOVED", "ASK") or len(words) < 3:
        return None
    host, _, port = words[2].rpartition(":")
    if not words[1].isdigit() or not port.isdigit():
        return None
    return int(words[1]), Node(host.strip("[]") or node.host, int(port))


def refusal_error(node: Node, refusal: str) -> DatabaseError:
    """The error to raise for an error reply."""
    advice = _ADVICE.get(refusal.split(" ", 1)[0])
    if refusal.startswith("ERR AUTH"):  # called without any password configured
        advice = "it has no password: leave password empty"
    return DatabaseError(f"redis {node}: it refused: {refusal}" + (f"; {advice}" if advice else ""))

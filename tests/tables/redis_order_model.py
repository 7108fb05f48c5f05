"""A model of processes that share one partition of Redis, and an exhaustive search through all that may happen to them.

One key, the product's rules (`hps.stores.redis.marks`), and a scheduler that does whatever hurts: a write that failed lands
at any later time or never, the row is evicted, Redis is emptied, a process is killed and started again, its directory is copied
and the copy is started, too. Values are numbered by the writes that made them, 0 is the row of the model files.

A process must never answer with a value whose write had returned before another began that this process has acknowledged.

With `applies`, the writes are those of a log instead: every process makes all of them, in their order, at its own pace, and
after a kill begins with the last one again. Then no process may answer with a value that comes before one that it has made.

With `fills`, processes copy the row of their RocksDB into Redis, between their modifications.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from hps.stores.redis import marks
from hps.stores.redis.marks import Mark, Process

ABSENT = -1


class Node(NamedTuple):
    """A process: the first four are in its RocksDB, the others in its memory."""

    row: int = 0
    token: str | None = None
    forbidden: int = 0  # values that it must not answer with, one bit each
    position: int = 0  # in the log: the last change before the one that it began last
    up: bool = False
    previous: str | None = None
    known: Mark | None = None
    pen: bool = False
    unmodified: bool = True
    quarantined: bool = False
    write: tuple[str, int, int, bool] | None = None  # stage, value, values that had returned when it began, whether the first
    # Of a fetch: row that was read, values forbidden when it began, whether it may promote, mark that was known then.
    fetch: tuple[int, int, bool, Mark | None] | None = None
    promotion: int | None = None
    healing: bool = False
    fill: tuple[str, int] | None = None  # stage, row
    applied: bool = False  # whether it has begun the change after its position since it was started


class State(NamedTuple):
    mark: Mark | None
    row: int
    late: tuple[tuple[Any, ...], ...]  # what failed and may still land
    nodes: tuple[Node, ...]
    returned: int  # writes, one bit each
    writes: int
    budget: tuple[int, ...]  # how many of each may still happen; then the length of the log


class WrongAnswer(Exception):
    """A process answered with a value that is older than a write that it has acknowledged."""


WRITES, FETCHES, FAILURES, LOSSES, CRASHES, COPIES, REFUSALS, APPLIES, FILLS = range(9)


class Search:
    """Runs every interleaving from a state on. *One thread.*

    Attributes:
        transitions: how many different steps there were.
    """

    def __init__(self) -> None:
        self.transitions = 0
        self._executions: dict[State, int] = {}

    def executions(self, state: State) -> int:
        """How many different executions begin in a state; each is run, what they have in common once.

        Raises:
            WrongAnswer: with what was done.
        """
        known = self._executions.get(state)
        if known is not None:
            return known
        total = 0
        for name, after in self._steps(state):
            self.transitions += 1
            try:
                total += self.executions(after)
            except WrongAnswer as wrong:
                wrong.args = (f"{name}\n{wrong}",)
                raise
        self._executions[state] = total = max(total, 1)
        return total

    def _steps(self, state: State) -> Iterator[tuple[str, State]]:
        yield from self._environment(state)
        for i, node in enumerate(state.nodes):
            if not node.up:
                yield f"{i} starts", self._started(state, i)
                continue
            yield from self._lookups(state, i, node)
            yield from self._modifications(state, i, node)
            yield from self._fills(state, i, node)
            if node.quarantined and not node.write and not node.healing:
                gone = _changed(state._replace(mark=None, row=ABSENT), i, known=None, pen=False, healing=True)
                yield f"{i} drops", gone
            if node.healing:
                yield f"{i} heals", _changed(self._looked(state, i), i, healing=False, quarantined=False)

    def _environment(self, state: State) -> Iterator[tuple[str, State]]:
        for k, message in enumerate(state.late):
            if k == 0 or message != state.late[k - 1]:
                rest = state._replace(late=state.late[:k] + state.late[k + 1 :])
                yield f"{message} lands", self._landed(rest, message)
        if state.budget[LOSSES]:
            less = _spent(state, LOSSES)
            if state.row != ABSENT:
                yield "the row is evicted", less._replace(row=ABSENT)
            if state.mark:
                yield "Redis is emptied", less._replace(mark=None, row=ABSENT)
        for i, node in enumerate(state.nodes):
            if node.up and state.budget[CRASHES]:
                dead = _spent(state, CRASHES)
                if node.write:
                    dead = dead._replace(returned=dead.returned | 1 << node.write[1])
                nodes = list(dead.nodes)
                nodes[i] = Node(*node[:4])
                dead = dead._replace(nodes=tuple(nodes))
                yield f"{i} is killed", dead
                if node.write and node.write[0] == "send":
                    yield (
                        f"{i} is killed while it sends",
                        _late(dead, "write", node.known, self._stored(state, i, node.write[1])),
                    )
                if node.fill and node.fill[0] == "send" and node.known and marks.can_promote(node.known, self._me(node)):
                    yield f"{i} is killed while it fills", _late(dead, "write", node.known, node.fill[1])
            if state.budget[COPIES] and (node.token or not node.up):
                copy = Node(*node[:4])
                yield f"{i} is copied", _spent(state, COPIES)._replace(nodes=(*state.nodes, copy))

    def _landed(self, state: State, message: tuple[Any, ...]) -> State:
        kind, mark, value = message
        if kind == "write" and state.mark == mark:
            return state._replace(row=value)
        if kind == "promotion" and state.mark == mark:
            return state._replace(row=value if state.row == ABSENT else state.row)
        if kind == "change" and state.mark == mark:
            return state._replace(mark=value)
        return state

    def _started(self, state: State, i: int) -> State:
        node = state.nodes[i]
        if node.token is None:
            return self._looked(_changed(state, i, up=True, token=None), i)
        return self._looked(_changed(state, i, up=True, previous=node.token, token=_fresh(state)()), i)

    def _me(self, node: Node, first: bool = False) -> Process:
        return Process("b", "a", None) if first else Process("b", "a", node.token, node.previous)

    def _looked(self, state: State, i: int, first: bool = False) -> State:
        node = state.nodes[i]
        step = marks.opened(state.mark, self._me(node, first), _fresh(state))
        if step is None:
            raise AssertionError(state)
        mark, empty = step
        state = state._replace(mark=mark, row=ABSENT if empty else state.row)
        pen = node.pen and node.known == mark
        return _changed(state, i, known=mark, pen=pen, unmodified=not first and node.token is None)

    def _lookups(self, state: State, i: int, node: Node) -> Iterator[tuple[str, State]]:
        if node.fetch:
            yield f"{i} answers", self._answered(state, i, node, *node.fetch)
        elif state.budget[FETCHES] and not node.quarantined:
            begun = (state.row, node.forbidden, node.write is None, node.known)
            yield f"{i} reads {state.row}", _changed(_spent(state, FETCHES), i, fetch=begun)
        if node.promotion is not None and not node.write and not node.quarantined:
            value = node.promotion
            done = _changed(state, i, promotion=None)
            if node.known and marks.can_promote(node.known, self._me(node)):
                yield f"{i} promotes {value}", self._landed(done, ("promotion", node.known, value))
                if state.budget[FAILURES]:
                    failed = _late(_spent(done, FAILURES), "promotion", node.known, value)
                    yield f"{i} fails to promote {value}", _changed(failed, i, quarantined=True, pen=False)

    def _answered(
        self, state: State, i: int, node: Node, row: int, forbidden: int, promotes: bool, known: Mark | None
    ) -> State:
        state = _changed(state, i, fetch=None)
        if node.known is None or known is None:  # it was dropped meanwhile
            row = ABSENT
        elif state.mark != known:
            if not marks.is_valid(state.mark, self._me(node), known):
                row = ABSENT
                state = self._looked(state, i)
            elif node.known == known:
                state = _changed(state, i, known=state.mark, pen=False)
        if row == ABSENT:
            row = node.row
            if promotes:
                state = _changed(state, i, promotion=row)
        if forbidden >> row & 1:
            raise WrongAnswer(f"{i} answers with {row}: {state}")
        return state

    def _modifications(self, state: State, i: int, node: Node) -> Iterator[tuple[str, State]]:
        if node.fill:
            return
        if node.write is None:
            if state.budget[WRITES] and not node.healing:
                yield f"{i} begins to write {state.writes}", self._begun(state, i, node)
            if (change := node.position + 1 + node.applied) <= state.budget[APPLIES] and not node.healing:
                begun = _changed(self._writing(state, i, node, change, (1 << change) - 1), i, position=change - 1, applied=True)
                yield f"{i} begins to apply {change}", begun
            return
        stage, value, before, first = node.write
        if stage == "done" or node.quarantined:
            token = node.token
            if node.quarantined and stage != "done":
                token = _fresh(state)()
            previous = node.previous if token == node.token else None
            done = _changed(
                state, i, write=None, token=token, previous=previous, forbidden=node.forbidden | before, promotion=None
            )
            yield f"{i} acknowledges {value}", done._replace(returned=state.returned | 1 << value)
            return
        if node.known is None:
            raise AssertionError(state)
        if stage == "take":
            yield from self._taking(state, i, node, value, before, first)
            return
        if state.mark == node.known:
            stored = self._stored(state, i, value)
            yield f"{i} writes {stored}", _changed(state._replace(row=stored), i, write=("done", value, before, first))
        elif state.budget[REFUSALS]:
            again = _changed(_spent(state, REFUSALS), i, pen=False, write=("take", value, before, first))
            yield f"{i} is refused", self._looked(again, i)
        else:  # the time for the call is over
            yield f"{i} gives up", _changed(state, i, quarantined=True, pen=False)
        if state.budget[FAILURES]:
            failed = _late(_spent(state, FAILURES), "write", node.known, self._stored(state, i, value))
            yield f"{i} fails to write {value}", _changed(failed, i, quarantined=True, pen=False)

    def _fills(self, state: State, i: int, node: Node) -> Iterator[tuple[str, State]]:
        """The steps of a copy, which keeps modifications of this process waiting; one that fails is given up."""
        if node.fill is None:
            if state.budget[FILLS] and node.write is None and not node.healing:
                yield f"{i} begins to fill", _changed(_spent(state, FILLS), i, fill=("take", node.row))
            return
        (stage, row), me, known = node.fill, self._me(node), node.known
        if known is None or (stage == "send" and not marks.can_promote(known, me)):
            yield f"{i} does not fill", _changed(state, i, fill=None)
            return
        if stage == "send":
            if state.mark == known:
                yield f"{i} fills", _changed(state._replace(row=row), i, fill=None)
            elif state.budget[REFUSALS]:
                again = _changed(_spent(state, REFUSALS), i, pen=False, fill=("take", row))
                yield f"{i} is refused a fill", self._looked(again, i)
            else:
                yield f"{i} gives up a fill", _changed(state, i, pen=False, fill=None)
            if state.budget[FAILURES]:
                failed = _late(_spent(state, FAILURES), "write", known, row)
                yield f"{i} fails to fill", _changed(failed, i, pen=False, fill=None)
        elif node.token is not None and node.token not in known.writers:
            yield f"{i} looks before it fills", self._looked(state, i)
        elif node.pen:
            yield f"{i} sends a fill", _changed(state, i, fill=("send", row))
        else:
            mark = marks.writable(known, me, _fresh(state))
            if state.mark == known:
                yield (
                    f"{i} takes the pen to fill",
                    _changed(state._replace(mark=mark), i, known=mark, pen=True, fill=("send", row)),
                )
            else:
                yield f"{i} looks before it fills", self._looked(state, i)
            if state.budget[FAILURES]:
                failed = _late(_spent(state, FAILURES), "change", known, mark)
                yield f"{i} fails to take the pen to fill", _changed(failed, i, pen=False, fill=None)

    def _begun(self, state: State, i: int, node: Node) -> State:
        value = state.writes
        return self._writing(_spent(state, WRITES)._replace(writes=value + 1), i, node, value, state.returned | 1)

    def _writing(self, state: State, i: int, node: Node, value: int, before: int) -> State:
        token = node.token or _fresh(state)()
        write = ("take", value, before, node.unmodified)
        fetch = node.fetch and (*node.fetch[:2], False, node.fetch[3])
        return _changed(state, i, row=value, token=token, write=write, fetch=fetch, promotion=None, unmodified=False)

    def _stored(self, state: State, i: int, value: int) -> int:
        """The row that a process leaves where it writes a value."""
        node = state.nodes[i]
        others = state.budget[APPLIES] and node.known and not marks.is_sole_writer(node.known, self._me(node))
        return ABSENT if others else value

    def _taking(self, state: State, i: int, node: Node, value: int, before: int, first: bool) -> Iterator[tuple[str, State]]:
        me, known = self._me(node), node.known
        if known is None:
            raise AssertionError(state)
        entered = node.token in known.writers
        sending = ("send", value, before, first)
        if not entered and not first:
            yield f"{i} looks", self._looked(state, i)
        elif entered and node.pen:
            yield f"{i} sends {value}", _changed(state, i, write=sending)
        else:
            mark = marks.writable(known, me, _fresh(state))
            if state.mark == known:
                yield f"{i} takes the pen", _changed(state._replace(mark=mark), i, known=mark, pen=True, write=sending)
            else:
                yield f"{i} looks", self._looked(state, i, first and not entered)
            if state.budget[FAILURES]:
                failed = _late(_spent(state, FAILURES), "change", known, mark)
                yield f"{i} fails to take the pen", _changed(failed, i, quarantined=True, pen=False)


def start(processes: int, **budget: int) -> State:
    """Processes that are up and have modified nothing; Redis holds the row of the model files."""
    mark = Mark("i", "g", "b")
    nodes = tuple(Node(up=True, known=mark) for _ in range(processes))
    names = ("writes", "fetches", "failures", "losses", "crashes", "copies", "refusals", "applies", "fills")
    counts = [budget.pop(name, 0) for name in names]
    return State(mark, 0, (), nodes, 1, 1, tuple(counts))


def _changed(state: State, i: int, **changes: Any) -> State:
    nodes = list(state.nodes)
    nodes[i] = nodes[i]._replace(**changes)
    return state._replace(nodes=tuple(nodes))


def _spent(state: State, what: int) -> State:
    budget = list(state.budget)
    budget[what] -= 1
    return state._replace(budget=tuple(budget))


def _late(state: State, kind: str, mark: Mark | None, value: Any) -> State:
    return state._replace(late=tuple(sorted((*state.late, (kind, mark, value)), key=repr)))


def _fresh(state: State) -> Callable[[], str]:
    """Texts that stand nowhere in the state: nobody can tell them from ones that were never used."""
    used: set[str | None] = set()
    held = [state.mark, *(node.known for node in state.nodes), *(node.fetch[3] for node in state.nodes if node.fetch)]
    for message in state.late:
        held += [part for part in message if isinstance(part, Mark)]
    for mark in held:
        if mark:
            used |= {mark.incarnation, mark.generation, *mark.writers}
    for node in state.nodes:
        used |= {node.token, node.previous}
    texts = (str(i) for i in range(1000))
    return lambda: next(text for text in texts if text not in used)

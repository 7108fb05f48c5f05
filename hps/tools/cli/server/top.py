"""`hps top`: show the figures of a running server on a terminal."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hps import errors
from hps.ground.progress import count_text, size_text, time_text
from hps.statistics.snapshot import Latency
from hps.tools.cli import console
from hps.tools.cli.running_server import ServerUrl, server_command

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table

    from hps.client.client import Client

EXAMPLE = "Example: `hps top http://127.0.0.1:8000`"
_TIERS = {"embedding_cache": "cache", "volatile_db": "volatile", "persistent_db": "persistent"}
_ANY_WIDTH = 10_000  # of a pipe
_PROBLEMS = 8
_NAMES = 10  # of models that a condition names
_COLORS = {"warning": "yellow", "error": "red"}
_UNREACHABLE = (
    errors.NotReadyError,
    errors.RemoteConnectionError,
    errors.RemoteTimeoutError,
)  # it restarts, or the network is down
_RECENT_S = 3600.0  # as on the page
_LOST_S = 60.0  # patience with a server that does not answer

_Answer = Mapping[str, Any]


@server_command(ServerUrl)
def top_command(
    server: "Client",
    interval: Annotated[float, typer.Option(min=0.3, help="Seconds between two updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Take two samples, print, and exit. The default in a pipe.")] = False,
) -> None:
    """Show the throughput, latencies, hit rates, memory and problems of a running server until Ctrl-C.

    The figures cover the time between two samples. The server's bearer token is enough.
    """
    from rich.live import Live

    url, screen = server.addresses[0], console.screen()
    before, at = server.ask("/v1/stats"), time.monotonic()
    if once or not screen.is_terminal:
        time.sleep(interval)
        now = server.ask("/v1/stats")
        screen.print(shown(url, now, before))
        return
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                now = server.ask("/v1/stats")
            except _UNREACHABLE as error:
                if time.monotonic() - at > _LOST_S:
                    raise
                live.update(f"{error}\nthe last answer is {time.monotonic() - at:.0f} s old", refresh=True)
                continue
            if _started(now) != _started(before):
                before = now
            live.update(shown(url, now, before), refresh=True)
            before, at = now, time.monotonic()


def _started(answer: _Answer) -> object:
    return answer["server"] and answer["server"]["started"]


def shown(url: str, now: _Answer, before: _Answer) -> "RenderableType":
    """Render the figures of the time between two answers of GET /v1/stats."""
    from rich.console import Group
    from rich.text import Text

    server, service, seconds = now["server"], now["service"], max(now["at_s"] - before["at_s"], 1e-9)
    parts: list[RenderableType] = [Text.assemble((url, "bold"), "  ", ("ready", "bold green") if service["ready"] else "")]
    for found in now["conditions"] if "conditions" in now else _older_conditions(service):
        unnamed = f" and {len(found['models']) - _NAMES} more" if len(found["models"]) > _NAMES else ""
        where = f"{', '.join(found['models'][:_NAMES])}{unnamed}: " if found["models"] else ""
        others = f" ({len(found['others'])} more)" if found["others"] else ""
        parts.append(Text(f"{found['name']}: {where}{found['text']}{others}", f"bold {_COLORS[found['level']]}"))
    if server:
        up = time_text(time.time() - server["started"])
        parts.append(Text(f"hps {server['version']}, up {up}, resident {size_text(server['memory_bytes'])}"))
        load = f"{service['pending']} lookups under way, {size_text(service['held_bytes'])} held for clients"
        parts.append(Text(f"{service['fronts']} fronts: {service['connections']} connections, {load}"))
        parts.append(_models(now, before, seconds))
        parts += [_rollout(model["name"], model["rollout"]) for model in server["models"] if _has_news(model, now)]
        for device in server["devices"]:
            name = "CPU" if device["device"] == "cpu" else f"GPU {device['device']}"
            free = (
                f", free {size_text(device['free_bytes'])} of {size_text(device['memory_bytes'])}"
                if device["memory_bytes"]
                else ""
            )
            parts.append(Text(f"{name} {device['name']}: caches {size_text(device['cache_bytes'])}{free}"))
        work = [f"{name} {length}" for name, length in server["queues"].items()]
        work += [
            f"updates of {name} {'?' if lag is None else f'{lag:.1f} s'} behind" for name, lag in server["updates"].items()
        ]
        parts.append(Text("background: " + (", ".join(work) or "nothing")))
    parts += [
        Text(f"{model['name']}: {model['state']}, {model['percent']} %: {reason}", "yellow")
        for model in now["models"]
        if (reason := model.get("reason"))
    ]
    for problem in now["problems"][:_PROBLEMS]:
        since = f" since {_clock(problem['first_s'])}" if "first_s" in problem else ""
        times = f" ({problem['count']} times{since})" if problem["count"] > 1 else ""
        parts.append(
            Text(
                f"{_clock(problem['time_s'])} {problem['level']}{times}: {problem['text']}",
                _COLORS.get(problem["level"], "red"),
            )
        )
    if (more := len(now["problems"]) - _PROBLEMS) > 0:
        parts.append(Text(f"{more} more kinds of problems"))
    if server:
        parts += [_tables(model, _model_figures(before, model["name"]), seconds) for model in server["models"]]
    return Group(*parts)


def _older_conditions(service: _Answer) -> list[_Answer]:
    """Return the conditions of a server that does not list them: the replica in trouble may be of an older release."""
    texts = ("error", "not ready", service["reason"]), ("warning", "degraded", service["degraded"])
    return [{"level": level, "name": name, "text": text, "models": (), "others": ()} for level, name, text in texts if text]


def _has_news(model: _Answer, now: _Answer) -> bool:
    """Return True if a model's canary or shadow is under way, ended within the hour, or rolled back to what serves."""
    if (rollout := model.get("rollout")) is None:
        return False
    ended_s = datetime.fromisoformat(rollout["since"]).timestamp() + rollout["seconds"]
    under_way = rollout["state"] in ("running", "loading")
    return (
        under_way or now["time_s"] - ended_s < _RECENT_S or bool(rollout["reason"] and rollout["serving"] == model["version"])
    )


def _models(now: _Answer, before: _Answer, seconds: float) -> "Table":
    table = _table("model", "version", "lookups/s", "p50", "p95", "p99", "workspaces")
    table.add_column("most time in")
    for model in now["server"]["models"]:
        was = _model_figures(before, model["name"])
        lookups = Latency(**model["lookups"]).since(Latency(**was["lookups"]))
        stage_times = {
            stage: times["total_s"] - was["stages"].get(stage, {"total_s": 0.0})["total_s"]
            for stage, times in model["stages"].items()
        }
        total_s = sum(stage_times.values())
        slowest = sorted(stage_times, key=lambda stage: -stage_times[stage])[:3] if total_s > 0 else []
        table.add_row(
            model["name"],
            model["version"],
            count_text(lookups.count / seconds),
            *(_time(lookups.quantile_s(share) if lookups.count > 0 else None) for share in (0.5, 0.95, 0.99)),
            f"{model['busy_workspaces']} of {model['workspaces']}",
            ", ".join(f"{_TIERS.get(stage, stage)} {stage_times[stage] / total_s:.0%}" for stage in slowest),
        )
    return table


def _rollout(model: str, rollout: _Answer) -> "RenderableType":
    """Render a canary or shadow: its state, and the figures of both versions since its start."""
    from rich.console import Group
    from rich.text import Text

    running = rollout["state"] == "running"
    state = f"{100 * rollout['share']:.3g} % of the requests, step {rollout['step']} of {len(rollout['steps'])}"
    reason = f": {rollout['reason']}" if rollout["reason"] else ""
    title = f"{model}: {rollout['mode']}, {state if running else rollout['state'] + reason}"
    table = _table(f"  {rollout['mode']}", "requests", "errors", "p50", "p99")
    for side in rollout["versions"]:
        times = ("-" if (ms := side[name]) is None else _time(ms / 1e3) for name in ("p50_ms", "p99_ms"))
        table.add_row(f"  version {side['version']}", count_text(side["requests"]), f"{side['error_rate']:.1%}", *times)
    return Group(Text(title, "" if running or not reason else "yellow"), table)


@dataclass(frozen=True)
class _Tables:
    """The tables of a model in one grid, or in two if that is too wide: lookups, and contents of the tiers. *Immutable.*"""

    model: str
    names: list[str]
    lookups: list[dict[str, str]]  # a table's cells by the title of their column
    contents: list[dict[str, str]]

    def __rich_console__(self, screen: "Console", options: "ConsoleOptions") -> "RenderResult":
        joined = self._grid([left | right for left, right in zip(self.lookups, self.contents, strict=True)])
        fits = screen.measure(joined, options=options.update(width=_ANY_WIDTH)).maximum <= options.max_width
        yield from (joined,) if fits else (self._grid(self.lookups), self._grid(self.contents))

    def _grid(self, tables: list[dict[str, str]]) -> "Table":
        filled = [head for head in tables[0] if any(cells[head] for cells in tables)]
        table = _table(self.model, *filled)
        for name, cells in zip(self.names, tables, strict=True):
            table.add_row(name, *(cells[head] for head in filled))
        return table


def _tables(model: _Answer, before: _Answer, seconds: float) -> _Tables:
    lookups, contents = [], []
    earlier = {table["name"]: table for table in before["tables"]}
    for table in model["tables"]:
        was = earlier.get(table["name"], table)
        keys = table["keys"] - was["keys"]
        cache = [tier for tier in table["tiers"] if tier["tier"] == "embedding_cache"]
        evicted = _total(table, "embedding_cache", "evictions") - _total(was, "embedding_cache", "evictions")
        with_rows = [tier for tier in cache if tier["rows"] is not None]
        lookups.append(
            {
                "dim": str(table["dim"]),
                "rows": count_text(table["rows"]),
                "keys/s": count_text(keys / seconds),
                **{f"{name}\nhits": _hit_rate(table, was, tier) for tier, name in _TIERS.items()},
                "unknown": _share(table["defaults"] - was["defaults"], keys),
            }
        )
        contents.append(
            {
                "cached\nrows": f"{count_text(with_rows[0]['rows'])} of {count_text(with_rows[0]['capacity_rows'])}"
                if with_rows
                else "",
                "evicted/s": count_text(evicted / seconds) if cache else "",
                **{f"{name}\nsize": _size(table, tier) for tier, name in _TIERS.items()},
            }
        )
    return _Tables(model["name"], [table["name"] for table in model["tables"]], lookups, contents)


def _model_figures(answer: _Answer, name: str) -> _Answer:
    """Return the earlier figures of a model; zeros if it was not there."""
    nothing: dict[str, Any] = {"lookups": {}, "stages": {}, "tables": []}
    models = answer["server"]["models"] if answer["server"] else []
    model: _Answer = next((entry for entry in models if entry["name"] == name), nothing)
    return model


def _total(table: _Answer, tier: str, what: str) -> int:
    return sum(entry[what] or 0 for entry in table["tiers"] if entry["tier"] == tier)


def _hit_rate(table: _Answer, was: _Answer, tier: str) -> str:
    if all(entry["tier"] != tier for entry in table["tiers"]):
        return ""
    hits = _total(table, tier, "hits") - _total(was, tier, "hits")
    return _share(hits, hits + _total(table, tier, "misses") - _total(was, tier, "misses"))


def _size(table: _Answer, tier: str) -> str:
    entries = [entry for entry in table["tiers"] if entry["tier"] == tier]
    if any(not entry["available"] for entry in entries):
        return "not read"
    if not entries or any(entry["vector_bytes"] is None for entry in entries):
        return "-" if entries else ""
    return size_text(sum(entry["vector_bytes"] + (entry["overhead_bytes"] or 0) for entry in entries))


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def _share(part: int, total: int) -> str:
    return f"{part / total:.1%}" if total > 0 else "-"


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _table(first: str, *figures: str) -> "Table":
    table = console.table((first,), figures)
    table.columns[0].min_width = 8  # long names are shortened, figures are not
    return table

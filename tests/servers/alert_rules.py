"""What Prometheus makes of what replicas really say: scrapes of /metrics, stretched over hours, judged by deploy's alerts."""

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests import ROOT

RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"
SEVERITIES = {
    rule["alert"]: rule["labels"]["severity"]
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
_GROWING = ("hps_update_lag_seconds", "hps_update_lag_messages")  # gauges that go on as counters do


@dataclass
class Scrape:
    """What one replica says at a moment: the values by series, and which of them go on to grow."""

    values: dict[str, float] = field(default_factory=dict)
    growing: set[str] = field(default_factory=set)
    moment: float = field(default_factory=time.monotonic)

    def value(self, name: str, **labels: str) -> float:
        """Of all series with these labels together."""
        wanted = [f"{label}={json.dumps(value)}" for label, value in labels.items()]
        found = [
            one for series, one in self.values.items() if series.startswith(name + "{") and all(w in series for w in wanted)
        ]
        assert found, f"no {name} with {labels}"
        return sum(found)


def scrape(client: httpx.Client) -> Scrape:
    """Read /metrics as Prometheus does."""
    found = Scrape({"up{}": 1.0})
    for family in text_string_to_metric_families(client.get("/metrics").raise_for_status().text):
        for sample in family.samples:
            labels = ",".join(f"{name}={json.dumps(value)}" for name, value in sorted(sample.labels.items()))
            found.values[series := f"{sample.name}{{{labels}}}"] = sample.value
            if family.type in ("counter", "histogram") or sample.name in _GROWING:
                found.growing.add(series)
    return found


class Timeline:
    """Minutes of the life of some replicas. *For one test.*

    Each phase lasts minutes, but is scraped at its begin and its end alone, a second or so apart: what grew meanwhile goes on
    to grow as fast as it did, everything else stays as it was in the end. A renamed metric or label is missed by the alerts.

    Args:
        directory: for promtool's files.
        replicas: a client of each, by the name of its instance.
        disks: their disks are the test's. Others may be full.

    Attributes:
        now: what the first replica said last.
    """

    def __init__(self, directory: Path, replicas: dict[str, httpx.Client], *, disks: bool = False) -> None:
        self._file = directory / "tabletop.yml"
        self._replicas = replicas
        self._left_out = "" if disks else "hps_disk_"
        self._series: dict[tuple[str, str], list[str]] = {}
        self._last: dict[tuple[str, str], float] = {}
        self._minutes = 0
        self._expected: list[tuple[int, list[str]]] = []
        self.now = Scrape()

    def phase(self, minutes: int, work: Callable[[], object], fires: tuple[str, ...] = ()) -> None:
        """Do some work, take it for that of so many minutes, and expect these alerts, and no others, to fire in the end.

        Args:
            fires: names of alerts with the labels of their series, without `severity`.
        """
        begins = {name: scrape(client) for name, client in self._replicas.items()}
        work()
        for name, client in self._replicas.items():
            self._stretch(name, minutes, begins[name], scrape(client))
        self._minutes += minutes
        self._expected.append((self._minutes - 1, sorted(fires)))

    def _stretch(self, instance: str, minutes: int, begin: Scrape, end: Scrape) -> None:
        for series, value in end.values.items():
            if self._left_out and series.startswith(self._left_out):
                continue
            if "_timestamp_seconds{" in series:  # minutes begin at 0
                value += 60 * self._minutes - time.time()
            key, step = (instance, series), 0.0
            if series in end.growing:
                step = (value - begin.values.get(series, 0.0)) * 60 / (end.moment - begin.moment)
                start = begin.values.get(series, 0.0)
                value = start if series.startswith(_GROWING) else self._last.get(key, start)
            parts = self._series.setdefault(key, [f"_x{self._minutes}"] * bool(self._minutes))
            if value == value:  # NaN is nothing to promtool
                parts.append(f"{value:.6f}{step:+.6f}x{minutes - 1}")
            else:
                parts.append(f"_x{minutes}")
            self._last[key] = value + step * minutes
        for (name, series), parts in self._series.items():
            if name == instance and series not in end.values:
                parts.append(f"stale _x{minutes - 1}")
        if instance == next(iter(self._replicas)):
            self.now = end

    def check(self) -> None:
        """Let promtool judge."""
        inputs = [
            {"series": _labelled(series, instance=instance, job="hps"), "values": " ".join(parts)}
            for (instance, series), parts in self._series.items()
        ]
        expected = [
            {
                "expr": 'ALERTS{alertstate="firing"}',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": _alert(fire), "value": 1} for fire in fires],
            }
            for minute, fires in self._expected
        ]
        test = {"interval": "1m", "input_series": inputs, "promql_expr_test": expected}
        rules = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}
        self._file.write_text(json.dumps(rules))
        ran = subprocess.run(
            ["promtool", "test", "rules", self._file], capture_output=True, text=True, timeout=120, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


def _labelled(series: str, **labels: str) -> str:
    name, _, rest = series.partition("{")
    more = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"{name}{{{more}{',' * (rest != '}')}{rest}"


def _alert(alert: str) -> str:
    name = alert.partition("{")[0]
    rest = alert.removeprefix(name) or "{}"
    return "ALERTS" + _labelled(rest, alertname=name, alertstate="firing", severity=SEVERITIES[name])

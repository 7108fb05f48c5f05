"""Connects feeds of online updates with the versions in service: which tables follow the log, from when on, and until when."""

import logging
import re
import socket
from collections.abc import Callable
from functools import partial

from hps.configuration.load import Configuration
from hps.databases.base import PersistentDatabase, SharedDatabase
from hps.deployment import DRAIN_S, Deployment
from hps.metrics import Metrics
from hps.registry import implementation
from hps.types import TableSpec
from hps.updates.base import TOPIC_PREFIX, UpdateLog
from hps.updates.dead_letters import DeadLetters
from hps.updates.feed import FollowedTable, UpdateFeed
from hps.updates.metrics import TableStatus, UpdateMetrics

_log = logging.getLogger(__name__)


class LiveUpdates:
    """The feeds of this process: one for each version in service of which a table follows the log. *Thread-safe.*

    A feed begins when its version is loaded, before that takes over, and ends before the tables are given up or kept for a
    roll-back (`Deployment.close`). Where a deployment hands its tables over to another one, their feed goes on.

    Args:
        configuration: says where the log is, and which tables follow it.
        metrics: where updates are counted.

    Raises:
        ConfigError: the settings of the log contradict each other, or the client refuses them.
        MissingDependencyError: the client is not installed.
    """

    def __init__(self, configuration: Configuration, metrics: Metrics) -> None:
        self._settings = settings = configuration.update_source
        self._key_bytes = 8 if configuration.supportlonglong else 4
        tiers = [tier for tier in (configuration.volatile_db, configuration.persistent_db) if tier.type != "disabled"]
        self._filters = [one for tier in tiers for one in tier.update_filters]
        self._feeds: dict[UpdateFeed, Deployment] = {}
        self._log_class: type[UpdateLog] | None = None
        if settings.type == "null":
            return
        self._log_class = implementation("update_log", settings.type)
        self._log_class.from_config(settings, "hps.check").close()  # what is wrong is said before anything is loaded
        self._metrics = UpdateMetrics(metrics)
        persistent = configuration.persistent_db
        beside = "" if persistent.type == "disabled" else persistent.path
        self._dead_letters = DeadLetters.from_config(settings, beside, metrics)

    def follows(self, table: TableSpec) -> bool:
        """Whether a table follows the log: there is one, and a filter of a configured database matches.

        A filter matches anything in the topic, or, as in HugeCTR's samples, the whole name of the model.
        """
        names = ((re.search(one, topic_of(table)), re.fullmatch(one, table.model_name)) for one in self._filters)
        return self._log_class is not None and any(map(any, names))

    def start(self, deployment: Deployment) -> UpdateFeed | None:
        """Let the tables of a deployment follow the log from now on, until it is closed; None if none of them does."""
        tables = self._followed(deployment)
        if self._log_class is None or not tables:
            return None
        config = deployment.config
        feed = UpdateFeed(
            config.model,
            config.version,
            tables,
            deployment,
            self._log_class.from_config(self._settings, self._group(deployment)),
            self._dead_letters,
            self._settings,
            self._metrics,
        )
        self._feeds[feed] = deployment
        deployment.ends.append(partial(self._stop, feed))
        feed.start()
        return feed

    def start_and_wait(self, deployment: Deployment, give_up: Callable[[], bool]) -> None:
        """Do as `start`, and wait until the tables are no further behind than `ready_lag_s`, at most `ready_wait_s`.

        Args:
            give_up: is asked now and then whether to wait no longer; what it raises ends the wait.
        """
        feed, settings = self.start(deployment), self._settings
        if feed is None or settings.ready_lag_s is None:
            return
        if not feed.wait_for_lag(settings.ready_lag_s, settings.ready_wait_s, give_up) and not give_up():
            _log.warning(
                "model %r: version %s takes over although its updates are not within ready_lag_s (%g s) after %g s: %s",
                deployment.config.model,
                deployment.version,
                settings.ready_lag_s,
                settings.ready_wait_s,
                "; ".join(f"{one.table}: {one.problem or _behind(one)}" for one in feed.status()),
            )

    def hand_over(self, deployment: Deployment, heir: Deployment) -> None:
        """Let the feed of a deployment go on with its heir, which has just taken over."""
        for feed, target in list(self._feeds.items()):
            if target is deployment:
                feed.replace_target(heir)
                self._feeds[feed] = heir

    def status(self) -> list[TableStatus]:
        """How far each table is that follows the log, by model, version and table."""
        found = [one for feed in list(self._feeds) for one in feed.status()]
        return sorted(found, key=lambda one: (one.model, int(one.version), one.table))

    def close(self) -> None:
        """Stop what still runs."""
        for feed in list(self._feeds):
            self._stop(feed, DRAIN_S)
        if self._log_class is not None:
            self._dead_letters.close()

    def disown(self) -> object:
        """In a forked child: forget the feeds, which are the parent's. Returns what was held."""
        held, self._feeds = self._feeds, {}
        return held

    def _stop(self, feed: UpdateFeed, timeout_s: float) -> bool:
        stopped = feed.stop(timeout_s)
        if stopped:
            self._feeds.pop(feed, None)
        return stopped

    def _followed(self, deployment: Deployment) -> list[FollowedTable]:
        followed = []
        for index, (table, start) in enumerate(zip(deployment.tables, deployment.log_starts, strict=True)):
            if start is not None:
                topic = topic_of(table)
                positions = {key if "/" in key else f"{topic}/{key}": position for key, position in start.items()}
                followed.append(FollowedTable(index, table.table_name, topic, table.dim, self._key_bytes, positions))
        return followed

    def _group(self, deployment: Deployment) -> str:
        """The group under which positions are committed: HugeCTR's name for whose rows these are."""
        authority = deployment.chain.databases[-1]
        if self._settings.group:
            return self._settings.group
        if isinstance(authority, PersistentDatabase):
            return f"hps.persistent.{socket.gethostname()}"
        return "hps.volatile" if isinstance(authority, SharedDatabase) else f"hps.volatile.{socket.gethostname()}"


def topic_of(table: TableSpec) -> str:
    """The topic of a table in a log of updates."""
    return f"{TOPIC_PREFIX}{table.model_name}.{table.table_name}"


def _behind(status: TableStatus) -> str:
    lag = "unknown" if status.lag_s is None else f"{status.lag_s:.1f} s"
    return f"lag {lag}, {'an unknown number of' if status.behind is None else status.behind} messages behind"

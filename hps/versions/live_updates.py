"""Connects feeds of online updates to the versions in service."""

import logging
import re
import socket
from collections.abc import Callable, Sequence
from functools import partial

from hps.configuration.load import Configuration
from hps.ground.registry import implementation
from hps.statistics.metrics import Metrics
from hps.statistics.snapshot import UpdateStatus
from hps.stores.base import LogPosition, Partition
from hps.types import TableSpec
from hps.updates.base import TOPIC_PREFIX, UpdateLog
from hps.updates.dead_letters import DeadLetters
from hps.updates.feed import TableTopic, UpdateFeed
from hps.versions.deployment import DRAIN_S, Deployment

_log = logging.getLogger(__name__)


class LiveUpdates:
    """The update feeds of this process, one for each version in service with a table that follows the log. *Thread-safe.*

    A feed starts when its version is loaded, before the takeover, and stops before the tables are released or kept for a
    roll-back (`Deployment.close`). It continues when a deployment hands its tables over to a successor.

    Raises:
        ConfigError: the log's settings contradict each other, or its client rejects them.
        MissingDependencyError: the client is not installed.
    """

    def __init__(self, configuration: Configuration, metrics: Metrics) -> None:
        self._settings = settings = configuration.update_source
        self._key_bytes = 8 if configuration.supportlonglong else 4
        tiers = [tier for tier in (configuration.volatile_db, configuration.persistent_db) if tier.type != "disabled"]
        self._filters = [pattern for tier in tiers for pattern in tier.update_filters]
        self._feeds: dict[UpdateFeed, Deployment] = {}
        self._skipped: dict[Deployment, list[UpdateStatus]] = {}
        self._log_class: type[UpdateLog] | None = None
        if settings.type == "null":
            return
        self._log_class = implementation("update_log", settings.type)
        self._log_class.from_config(settings, "hps.check").close()  # report errors before anything is loaded
        self._metrics = metrics
        metrics.feeds.add(self._skipped_tables)
        persistent = configuration.persistent_db
        directory = "" if persistent.type == "disabled" else persistent.path
        self._dead_letters = DeadLetters.from_config(settings, directory, metrics)

    def follows(self, table: TableSpec) -> bool:
        """Return True if a log is configured and a filter of a configured database matches the table.

        A filter matches any part of the topic or, as in HugeCTR's samples, the full name of the model.
        """
        names = ((re.search(each, topic_of(table)), re.fullmatch(each, table.model_name)) for each in self._filters)
        return self._log_class is not None and any(map(any, names))

    def start(self, deployment: Deployment) -> UpdateFeed | None:
        """Start the feed of a deployment, which runs until the deployment is closed; None if no table follows the log."""
        tables = self._followed(deployment)
        self._skip_stale_copies(deployment)
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
        deployment.stop_following.append(partial(self._stop, feed))
        feed.start()
        return feed

    def start_and_wait(self, deployment: Deployment, is_closing: Callable[[], bool], report: Callable[[str], None]) -> None:
        """Call `start`, then wait at most `ready_wait_s` until the tables are no further behind than `ready_lag_s`.

        Args:
            is_closing: called repeatedly; True, or an exception that it raises, ends the wait.
            report: called repeatedly with the reason of the wait, and at the end with an empty text.
        """
        feed, settings = self.start(deployment), self._settings
        if feed is None or settings.ready_lag_s is None:
            return

        logged: list[str] = []

        def wait_on(late: Sequence[UpdateStatus], left_s: float) -> bool:
            report(text := f"{self._waiting_text(late)}, at most {left_s:.0f} s more")
            if not logged:
                logged.append(text)
                _log.info("model %r: version %s: %s", deployment.config.model, deployment.version, text)
            return is_closing()

        try:
            in_time = feed.wait_for_lag(settings.ready_lag_s, settings.ready_wait_s, wait_on)
        finally:
            report("")
        if not in_time and not is_closing():
            _log.warning(
                "model %r: version %s takes over although its updates are not within ready_lag_s (%g s) after %g s: %s",
                deployment.config.model,
                deployment.version,
                settings.ready_lag_s,
                settings.ready_wait_s,
                "; ".join(f"{status.table}: {status.problem or _lag_text(status)}" for status in feed.status()),
            )

    def hand_over(self, deployment: Deployment, successor: Deployment) -> None:
        """Hand a deployment's feed over to the successor that has just taken over; if other tables follow now, start one."""
        same = self._followed(deployment) == self._followed(successor)
        starts = not same
        for feed in [feed for feed, target in list(self._feeds.items()) if target is deployment]:
            if same and feed.replace_target(successor):
                self._feeds[feed] = successor
            else:
                self._stop(feed, DRAIN_S)
                starts = True
        self._skipped.pop(deployment, None)
        if starts:
            self.start(successor)
        else:
            self._skip_stale_copies(successor)

    def status(self) -> list[UpdateStatus]:
        """Return the status of each table that follows the log, by model, version and table."""
        found = [status for feed in list(self._feeds) for status in feed.status()] + self._skipped_tables()
        return sorted(found, key=lambda status: (status.model, int(status.version), status.table))

    def close(self) -> None:
        for feed in list(self._feeds):
            self._stop(feed, DRAIN_S)
        if self._log_class is not None:
            self._dead_letters.close()

    def disown(self) -> object:
        """In a forked child: drop the feeds, which belong to the parent. Returns them."""
        feeds, self._feeds = self._feeds, {}
        return feeds

    def _skip_stale_copies(self, deployment: Deployment) -> None:
        """Report the tables that do not follow the log since the network has a copy of them."""
        config, topics = deployment.config, {table.name: table.topic for table in self._topics(deployment)}
        if not (names := [name for name in deployment.stale_copies if name in topics]):
            return
        problem = "not followed: the network has a copy, which updates do not reach (dense.stale_copies, allow_stale_copy)"
        _log.warning("updates of model %r, version %s, %s: %s", config.model, config.version, ", ".join(names), problem)
        self._skipped[deployment] = [
            UpdateStatus(config.model, config.version, name, topics[name], {}, None, None, problem=problem) for name in names
        ]
        deployment.stop_following.append(partial(self._forget, deployment))

    def _forget(self, deployment: Deployment, _timeout_s: float) -> bool:
        self._skipped.pop(deployment, None)
        return True

    def _skipped_tables(self) -> list[UpdateStatus]:
        return [status for statuses in list(self._skipped.values()) for status in statuses]

    def _waiting_text(self, late: Sequence[UpdateStatus]) -> str:
        """Describe what a version waits for before it takes over."""
        first, settings = late[0], self._settings
        if not first.connected or first.lag_s is None:
            address = settings.address if settings.type == "redis_stream" else settings.brokers
            return f"waiting for the update log {address} ({first.problem or 'no answer yet'})"
        tables = f"{first.model}.{first.table}" + (f" and {len(late) - 1} more tables" if len(late) > 1 else "")
        return f"waiting for the updates of {tables} ({first.problem or _lag_text(first)})"

    def _stop(self, feed: UpdateFeed, timeout_s: float) -> bool:
        stopped = feed.stop(timeout_s)
        if stopped:
            self._feeds.pop(feed, None)
        return stopped

    def _followed(self, deployment: Deployment) -> list[TableTopic]:
        return [table for table in self._topics(deployment) if table.name not in deployment.stale_copies]

    def _topics(self, deployment: Deployment) -> list[TableTopic]:
        """List the tables with a topic, also those with stale copies."""
        followed = []
        for index, (table, start) in enumerate(zip(deployment.tables, deployment.log_starts, strict=True)):
            if start is not None:
                topic = topic_of(table)
                positions = {
                    Partition(key) if "/" in key else Partition(topic, int(key)): LogPosition(position)
                    for key, position in start.items()
                }
                followed.append(
                    TableTopic(index, table.table_name, topic, table.dim, self._key_bytes, positions, table.row_dtype)
                )
        return followed

    def _group(self, deployment: Deployment) -> str:
        """Return the consumer group for committed positions, named as HugeCTR names it."""
        authority = deployment.chain.databases[-1]
        if self._settings.group:
            return self._settings.group
        if authority.persistent:
            return f"hps.persistent.{socket.gethostname()}"
        return "hps.volatile" if authority.shared else f"hps.volatile.{socket.gethostname()}"


def topic_of(table: TableSpec) -> str:
    """Return the update topic of a table."""
    return f"{TOPIC_PREFIX}{table.model_name}.{table.table_name}"


def _lag_text(status: UpdateStatus) -> str:
    lag = "unknown" if status.lag_s is None else f"{status.lag_s:.1f} s"
    return f"lag {lag}, {'an unknown number of' if status.behind is None else status.behind} messages behind"

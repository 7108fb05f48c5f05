"""Changes the serving versions: the operations on one model, and the loop that brings up the desired versions."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Literal

from hps.cache.base import EmbeddingCache
from hps.configuration.canary import CanaryConfig
from hps.configuration.load import ModelConfig
from hps.engine.chain import DatabaseChain
from hps.errors import (
    CapacityError,
    ConflictError,
    DatabaseCorruptError,
    DatabaseError,
    HPSError,
    NonfiniteRowsError,
    NotReadyError,
    TableWidthError,
    UnknownVersionError,
    VersionHeldError,
)
from hps.ground.progress import Progress
from hps.models.deltas import ResidentTable
from hps.models.loading.table_load import LoadTargets
from hps.models.manifest import within
from hps.types import TableSpec
from hps.versions.building import check_transform, load_deployment, reconfigure
from hps.versions.canary.plan import RolloutPlan
from hps.versions.catalog import ModelCatalog, ModelVersion
from hps.versions.changes import Change
from hps.versions.checks.report import CHECKS, OUTCOMES, CheckReport
from hps.versions.checks.rows import LEAST_ROWS
from hps.versions.checks.run import VersionCheck
from hps.versions.deployment import DRAIN_S, Deployment, Fate
from hps.versions.desired import DesiredVersion
from hps.versions.fleet import SERVING, FleetChange, FleetStatus, ServingDocument
from hps.versions.live_models import LiveModels, Wanted, is_transient
from hps.versions.live_updates import LiveUpdates
from hps.versions.retention import free_slot, leftovers, refuse_format_change, refuse_format_in_service, surplus

_log = logging.getLogger(__name__)
_NOT_OF_A_VERSION = dict.fromkeys(("sparse_files", "versions", "version_path", "version_policy", "keep_versions"))


def _is_refusal(error: Exception) -> bool:
    """Return True if a version failed because of its content, so that only another version can serve."""
    return isinstance(error, HPSError) and not isinstance(error, ConflictError) and not is_transient(error)


@contextmanager
def _after(call: Callable[[], None]) -> Iterator[None]:
    """Call a function first, which may refuse: then no failed change is counted."""
    call()
    yield


class _SupersededError(ConflictError):
    """The serving document changed during the load of its version: not a failure of that version."""


class Reconciler:
    """Puts desired versions into service, one change per model at a time; `LiveModels` has the states. *Thread-safe.*

    `ModelCatalog.desired` is the desired version of a model. `bring_up` puts it into service; `roll_back` and `bring_up` with a
    version change it first. `reconcile` brings up every model that serves another one.

    Args:
        chain: the databases.
        targets: returns the reachable databases to load from model files.
    """

    def __init__(
        self,
        catalog: ModelCatalog,
        live: LiveModels,
        updates: LiveUpdates,
        chain: DatabaseChain,
        targets: Callable[[], LoadTargets],
        cache_class: type[EmbeddingCache],
    ) -> None:
        self._catalog = catalog
        self._live = live
        self._updates = updates
        self._chain = chain
        self._targets = targets
        self._cache_class = cache_class
        self._metrics = chain.metrics
        self._unreadable: dict[str, str] = {}  # errors of models whose files cannot be read
        self._tried: dict[str, int] = {}  # by model: number of the last serving document that a deployment was tried for
        self.tried_out: Callable[[str], Sequence[str]] = lambda name: ()  # versions that a rollout keeps in service

    # -- operations ---------------------------------------------------------------------------------------------------------

    def bring_up(
        self,
        name: str,
        version: str | None = None,
        *,
        entry: ModelConfig | None = None,
        progress: Progress | None = None,
        force: bool = False,
        remember: bool = True,
        pin: bool = False,
        accept: bool = False,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        """Put a version, by default the desired one, into service; see `HPS.deploy`.

        Args:
            entry: replaces the known entry of the model.
            accept: let the version serve whatever its checks find.
            started: called once no other change can begin; raises to refuse the change.
        """
        known = name in self._catalog.names
        if pin and not (accept and self._wanted_by_fleet(name, version)):
            self._refuse_in_fleet(name, "deploying")
        counted = self._metrics.changing(
            "deploy", done=name, failed=name if known else "", outcome=lambda error: _outcome(change, error)
        )
        with self._live.changing(name, "deploying", progress) as change, _after(started), counted:
            before = None if entry is None else self._catalog.add(entry)
            keeps_entry = False
            try:
                change.accepts = accept
                served = self._serve_chosen(name, version, change, force=force, pin=pin, known=known)
                keeps_entry = remember or not known
            finally:
                if entry is not None and not keeps_entry:
                    self._catalog.restore(name, before)
            if served is None:  # an older version serves; polling retries the refused one
                return
            if version is None or pin:
                self._live.deployed_by_policy(name, (self._catalog.model(name), tuple(served)))
            if change.held:
                raise VersionHeldError(change.held)  # its files are known: polling loads it no second time
            if self._catalog.fleet.known(name) is not None:
                if (ended := self._catalog.pins.known(name)) is not None:
                    self._catalog.pins.end(name)  # otherwise it would return if the model left the fleet
                    change.ended_pin = ended
            elif not pin:
                self._log_pin(name, served[-1][0])
            elif version is None:
                ended = self._catalog.pins.known(name)
                self._catalog.pins.end(name)
                change.ended_pin = ended
            else:
                change.pin = self._catalog.pins.pin(name, version, "deploy")

    def _serve_chosen(
        self, name: str, version: str | None, change: Change, *, force: bool, pin: bool, known: bool
    ) -> list[tuple[str, str]] | None:
        """Put a version into service, or all that are chosen, and return their numbers and fingerprints.

        Returns:
            None if a version was refused and the versions chosen without it serve.
        """
        # After a restart no version serves. If the chosen one is refused, the replica would answer nothing until its publisher
        # reacts, so the version that served before the bad one was published serves again. While a version serves, it stays.
        # A conflict with another change, such as a newer serving document, is no refusal.
        refused: list[str] = []
        errors: list[Exception] = []
        try:
            while True:
                chosen: list[str] = []
                served: list[tuple[str, str]] = []
                try:
                    if version is None and not errors:
                        self._catalog.read_document(name)
                    chosen = self._catalog.to_serve(name, pinned=not pin, without=refused) if version is None else [version]
                    if not errors:
                        change.proceed = partial(self._end_if_superseded, name, self._catalog.fleet.known(name))
                        held = self._live.held(name)
                        if version is None and held is not None and held.version != chosen[-1]:
                            change.accepts = False  # a newer version came, of which nobody has seen a report
                    entry, others = self._catalog.model(name), chosen if version is None else []
                    for number in chosen:
                        fingerprint = self._put_into_service(name, number, change, force=force, chosen=others)
                        served.append((number, fingerprint))
                    break
                except Exception as error:
                    if not errors:
                        missing = version is not None and isinstance(error, UnknownVersionError)
                        if missing or isinstance(error, _SupersededError):
                            raise  # a request for a version that does not exist is refused: nothing has failed
                        tried = None
                        if isinstance(error, VersionHeldError | NonfiniteRowsError):
                            tried = entry, (*served, (chosen[len(served)], change.fingerprint))
                        self._live.record_failure(name, error, known=known, refused=tried)
                    errors.append(error)
                    explicit = version is not None or pin
                    if explicit or not chosen or name in self._live.serving or not _is_refusal(error):
                        raise errors[0]  # noqa: B904 - the first error is the cause
                    refused.append(chosen[len(served)])
            if errors:
                why = f"since version {refused[0]} was refused"
                _log.error("model %r: version %s serves, %s: %s", name, chosen[-1], why, errors[0])
            return None if errors else served
        finally:
            del errors  # their tracebacks refer to this frame

    def check(self, name: str, version: str, against: str | None, proceed: Callable[[], None]) -> CheckReport:
        """Check a version in service beside another one, and change nothing; see `HPS.check_version`."""
        new, old = self._live.find(name, version), self._live.find(name, against)

        def proceed_in_service() -> None:
            proceed()
            if gone := [each.version for each in (new, old) if self._live.deployed(name, each.version) is not each]:
                raise ConflictError(f"checking model {name!r}: version {gone[0]} was taken out of service meanwhile")

        report = self._version_check(new, None if old is new else old, proceed_in_service).run()
        proceed_in_service()
        return report

    def _version_check(self, new: Deployment, old: Deployment | None, proceed: Callable[[], None]) -> VersionCheck:
        place = "" if not new.config.version_path else within(new.config.version_path, new.version)
        return VersionCheck(new, old, self._targets().sources, place, proceed)

    def roll_back(self, name: str) -> None:
        """Roll back to the previous version; see `HPS.rollback`."""
        self._refuse_in_fleet(name, "rolling back")
        with self._live.changing(name, "rolling back") as change, self._metrics.changing("rollback", done=name, failed=name):
            serving = self._live.find(name, None)
            kept = self._live.kept(name)
            if not kept:
                below = [version for version in self._catalog.versions(name) if int(version) < int(serving.version)]
                if not below:
                    raise ConflictError(
                        f"rolling back model {name!r}: there is no version to go back to; version {serving.version} "
                        "serves, none was replaced, and there is none below it"
                    )
                fingerprint = self._put_into_service(name, below[-1], change)
                self._rolled_back(name, below[-1], fingerprint, change)
                return

            def select(versions: list[str]) -> list[str]:
                return [version for version in versions if version != serving.version]

            deployed = self._renewed(kept[-1], kept[-1].config)
            try:
                self._updates.start(deployed)  # without waiting: the serving version is worse than late updates
                self._live.serve(deployed, select, "keep" if serving.config.keep_versions else "drop", kept[-1])
            except BaseException:
                deployed.close("keep")
                raise
            self._rolled_back(name, deployed.version, deployed.fingerprint, change)

    # -- rollouts (`canary.rollouts.ChangesVersions`) ------------------------------------------------------------------------

    def load_beside(
        self,
        name: str,
        version: str | None,
        *,
        progress: Progress | None,
        holds: bool,
        started: Callable[[str, str, Change], None],
    ) -> None:
        """Load a version, and leave it available beside the serving one, where it answers those who name it.

        Args:
            version: default: the newest.
            holds: also a version that its checks hold.
            started: called with the serving and the new version before another change can begin.

        Raises:
            ConflictError: the version serves.
            VersionHeldError: its checks refuse it, or hold it. As `bring_up`.
        """
        counted = self._metrics.changing("deploy", done=name, failed=name, outcome=lambda error: _outcome(change, error))
        with self._live.changing(name, "deploying", progress) as change, counted:
            serving = self._live.find(name, None).version
            version = version or self.newest(name)
            if version == serving:
                raise ConflictError(
                    f"deploying model {name!r} beside its version {serving}: that one serves; publish a newer one, or name "
                    "another one with --version"
                )
            others = [entry.version for entry, state in self._live.versions(name) if state == "available"]
            others = [number for number in others if number not in (serving, version)]
            change.beside = True
            self._put_into_service(name, version, change, chosen=[*others, version, serving])
            deployed = self._live.find(name, version)
            if deployed.held and deployed.checks is not None and not holds:
                raise VersionHeldError(
                    f"deploying model {name!r}: version {version} is held, and {serving} serves: {deployed.checks.reason}. "
                    f"Look at it under its number; publish a better one, shadow it, or `hps deploy {name} --canary 5% --accept`"
                )
            if change.held:
                _log.warning("%s", change.held)  # otherwise an error says so
            started(serving, version, change)

    def take_out(self, name: str, version: str, ended: Callable[[Change], None]) -> None:
        """Call `ended`, and take a version out of service unless it serves."""
        counted = self._metrics.changing("rollback", done=name, failed=name)
        with self._live.changing(name, "rolling back") as change, _after(partial(ended, change)), counted:
            serving = self._live.serving.get(name)
            if serving is not None and serving.version != version and self._live.deployed(name, version) is not None:
                for deployment in self._live.withdraw(name, version):
                    self._live.retire(name, deployment, "release")

    def promote(self, name: str, version: str, *, unpin: bool, accept: bool, started: Callable[[], None]) -> None:
        """Let the version of a rollout serve.

        Args:
            unpin: end the pin, unless a still newer version would then serve that nobody has tried out.
            started: as for `bring_up`.
        """
        if self._catalog.document(name) is not None:
            self.change_fleet(name, "promote", version)
            self.bring_up(name, None, started=started)
        elif unpin and self._catalog.to_serve(name, pinned=False)[-1] == version:
            self.bring_up(name, None, pin=True, accept=accept, started=started)
        else:
            self.bring_up(name, version, pin=True, accept=accept, started=started)

    def pin_to(self, name: str, version: str) -> bool:
        """Pin a model to its serving version, unless it is pinned or in a fleet; return whether it was done."""
        if self._catalog.document(name) is not None or self._catalog.pins.known(name) is not None:
            return False
        self._catalog.pins.pin(name, version, "canary")
        return True

    def in_fleet(self, name: str) -> bool:
        """Return True if a serving document says what every replica serves of a model."""
        return self._catalog.document(name) is not None

    def change_fleet(self, name: str, change: Literal["promote", "rollback"], version: str) -> None:
        """End the rollout of a version on every replica, unless the serving document has another one by now, or none.

        Raises:
            ConflictError: it was to be promoted, and the document neither has its rollout nor the version.
        """
        self._catalog.read_document(name)
        document = self._catalog.document(name)
        if document is not None and document.rollout is not None and document.rollout.version == version:
            self._change_fleet(name, change, document)
        elif change == "promote" and (document is None or document.version != version):
            raise ConflictError(f"promoting model {name!r}: another replica has ended the rollout of version {version}")

    def replan_fleet(self, name: str, plan: RolloutPlan, following: RolloutPlan) -> None:
        """Replace the plan of a rollout on every replica, unless the serving document has another one by now, or none."""
        self._catalog.read_document(name)
        document = self._catalog.document(name)
        if document is not None and document.rollout == plan:
            self._change_fleet(name, "canary", document, following)

    def _change_fleet(self, name: str, by: FleetChange, document: ServingDocument, rollout: RolloutPlan | None = None) -> None:
        serving = self._live.serving.get(name)
        number = document.number
        self._catalog.change_fleet(name, by, None, "" if serving is None else serving.version, rollout, number=number)

    def wanted_rollout(self, name: str) -> tuple[int, RolloutPlan | None] | None:
        """Return the number of a model's serving document and its rollout, as last read; None if it has no document."""
        document = self._catalog.fleet.known(name)
        return None if document is None else (document.number, document.rollout)

    def newest(self, name: str) -> str:
        """Return the highest version of a model."""
        return self._catalog.versions(name)[-1]

    def canary_config(self, name: str) -> CanaryConfig:
        return self._catalog.model(name).canary

    def end_pin(self, name: str, progress: Progress | None) -> None:
        """End the pin of a model, if it has one; see `HPS.unpin`."""
        if self._catalog.document(name) is not None:
            self._catalog.fleet.forget(name)
            self.bring_up(name, progress=progress, pin=True)
            return
        try:
            pinned = self._catalog.pins.of(self._catalog.model(name).model) is not None
        except DatabaseError:
            pinned = True
        if pinned:
            self.bring_up(name, progress=progress, pin=True)

    def take_down(self, name: str, version: str | None = None) -> None:
        """Undeploy a model or one version; see `HPS.undeploy`."""
        if version is not None:
            self._refuse_in_fleet(name, "undeploying a version of")
        counted = self._metrics.changing("undeploy", done="" if version is None else name, failed=name)
        with self._live.changing(name, "undeploying"), counted:
            kept = [deployment for deployment in self._live.kept(name) if deployment.version == version]
            if kept and self._live.deployed(name, kept[0].version) is None:
                self._live.drop_kept(name, kept)  # with its rows, which nothing but a roll-back would read
                return
            for deployment in self._live.withdraw(name, version):
                self._live.retire(name, deployment, "release")
            if version is not None and (pin := self._catalog.pins.known(name)) is not None and pin.version == version:
                self._catalog.pins.end(name)
            if version is None:
                self._live.drop_kept(name, self._live.kept(name), "release")

    # -- the loop -----------------------------------------------------------------------------------------------------------

    def read_documents(self) -> None:
        """Read the serving document of every model in service or awaited; see `HPS.read_documents`."""
        for life in self._live.models():
            with suppress(HPSError):  # its entry is gone
                self._catalog.read_document(life.name)

    def reconcile(self, progress: Progress | None, *, documents_only: bool = False) -> dict[str, Exception | None]:
        """Bring up every model that does not serve its desired version, and take down deleted models; see `HPS.poll`.

        Args:
            documents_only: only models, in service or expected, that do not serve the version of their last read serving
                document; see `HPS.follow`.
        """
        # Documents are read and followed by two other threads than polling's. A load takes minutes to hours: a thread that
        # waited for it could not read that the fleet has rolled back meanwhile, which ends the load (`_end_if_superseded`).
        if not documents_only:
            self.read_documents()
        outcome: dict[str, Exception | None] = {}
        for name, deleted in self._not_following() if documents_only else self._differing():
            try:
                if deleted:
                    self.take_down(name)
                else:
                    self.bring_up(name, progress=progress)
                outcome[name] = None
            except ConflictError as error:
                _log.debug("polling model %r: retried in the next round: %s", name, error)
            except Exception as error:  # noqa: BLE001 - the other models are not concerned
                outcome[name] = error
        return outcome

    def _differing(self) -> Iterator[tuple[str, bool]]:
        """Yield each model that differs from the catalog: its name, and whether it was deleted.

        A model differs if its entry, its chosen versions or their files have changed since it was last deployed; a pinned model
        only if the pinned version has. An undeployed model does not differ. Reads no rows.
        """
        self._catalog.scan()
        names = self._catalog.names
        known = {*names, *self._catalog.problems}
        yield from [(name, True) for name in self._live.serving if name not in known]
        self._live.forget_others(names)
        for name in names:
            if (wanted := self._wanted(name)) is None:
                continue
            if self._live.needs_deployment(name, wanted) or self._accepted_elsewhere(name, wanted):
                yield name, False

    def _not_following(self) -> Iterator[tuple[str, bool]]:
        """Yield each model, in service or expected, that does not serve the version of its serving document.

        A version that does not exist yet, or cannot be read, leaves the model as it is.
        """
        for name in [life.name for life in self._live.models()]:
            document = self._catalog.fleet.known(name)
            if document is None or self._live.change_of(name):
                continue
            new = self._tried.get(name) != document.number
            if new:
                self._live.forget_failure(name)  # of the document before
            held = self._live.held(name)
            if held is not None and held.version == document.version and not new:
                if self._accepted_report(held.config, held.version, held.fingerprint) is not None:
                    yield name, False
                continue
            if not self._serves(name, document.desired) or (new and not document.version):
                wanted = self._wanted(name)
                if wanted is not None and (
                    self._live.failure(name) is None
                    or self._live.needs_deployment(name, wanted)
                    or self._accepted_elsewhere(name, wanted)
                ):
                    yield name, False
            # A generator resumes after its caller has tried the deployment: until then the document is pending.
            self._tried[name] = document.number

    def _wanted(self, name: str) -> Wanted | None:
        """Return the entry, versions and files that are desired of a model; None, after one warning, if unknown."""
        try:
            numbers, desired = self._catalog.to_serve(name), self._catalog.desired(name)
            if desired.version and desired.version not in numbers and name in self._live.serving:
                # Its files are missing: a fleet waits for them, and a pinned version that serves continues without them.
                if desired.source == "fleet":
                    raise UnknownVersionError(f"the fleet serves {desired}, and there is no such version (yet)")
                if self._serves(name, desired):
                    raise UnknownVersionError(f"version {desired.version}, which serves, is {desired}, and its files are gone")
            chosen = [self._catalog.version(name, number) for number in numbers]
            versions = tuple((version.config.version, self._catalog.fingerprint(version)) for version in chosen)
            wanted = self._catalog.model(name), versions
        except HPSError as error:
            if self._unreadable.get(name) != str(error):
                self._unreadable[name] = str(error)
                _log.warning("polling model %s: it is left as it is: %s", name, error)
            return None
        self._unreadable.pop(name, None)
        return wanted

    def _serves(self, name: str, desired: DesiredVersion) -> bool:
        serving = self._live.serving.get(name)
        return serving is not None and desired.allows(serving.version)

    def fleet(self, name: str) -> FleetStatus | None:
        """Return whether this replica follows the serving document of a model; None if it has none."""
        document = self._catalog.fleet.known(name)
        if document is None:
            return None
        deployment, failure = self._live.serving.get(name), self._live.failure(name)
        change = self._live.change_of(name)
        pending = bool(change) or self._tried.get(name) != document.number
        reason = self._catalog.fleet.problem(name)
        held = self._live.held(name)
        if not reason and held is not None and held.checks is not None and held.version == document.version:
            reason = self._held_text(held.checks)
        if not reason and not self._serves(name, document.desired):
            cause = self._unreadable.get(name, "") or ("" if failure is None else failure.cause)
            reason = (change and f"{change} it is under way") or ("" if pending else cause) or "it is not deployed yet"
        serving = "" if deployment is None else deployment.version
        return FleetStatus(document, serving, not reason, pending, reason, self._catalog.fleet.age_s(name))

    def chosen_by(self, name: str, serving: str) -> str:
        """Describe the pin or document that chose the serving version, a version that is held, and one that cannot be read."""
        status = self.fleet(name)
        desired = self._catalog.pins.known(name) if status is None else status.document.desired
        reason = f"; {status.reason}" if status is not None and status.reason else ""
        found = ["" if desired is None else desired.describe(serving) + reason]
        held = self._live.held(name)
        if held is not None and held.checks is not None and (status is None or held.version != status.document.version):
            found.append(f"version {held.version} is held: {held.checks.reason}")
        if status is None and (unreadable := self._unreadable.get(name)):
            found.append(f"polling leaves it as it is: {unreadable}")
        return "; ".join(filter(None, found))

    def check_integrity(self) -> list[str]:
        """Return a sentence for each broken invariant of the states and the desired versions."""
        found = [*self._live.check_integrity(), *self._catalog.pins.check_integrity(), *self._catalog.fleet.check_integrity()]
        for name in self._live.serving:
            try:
                desired = self._catalog.desired(name)
            except HPSError as error:
                found.append(f"model {name!r}: what is desired is unknown: {error}")
                continue
            document = self._catalog.fleet.known(name)
            if document is not None and desired.source != "fleet":
                found.append(f"model {name!r}: the fleet serves {document}, but {desired} is desired")
        return found

    # -- the steps ----------------------------------------------------------------------------------------------------------

    def _rolled_back(self, name: str, version: str, fingerprint: str, change: Change) -> None:
        """Pin a model to the version of a roll-back, so that neither polling nor a restart deploys a newer one."""
        self._live.deployed_by_policy(name, (self._catalog.model(name), ((version, fingerprint),)))
        change.pin = self._catalog.pins.pin(name, version, "rollback")

    def _refuse_in_fleet(self, name: str, doing: str) -> None:
        """Refuse to change one replica of a fleet: it would serve another version than the others."""
        if (document := self._catalog.document(name)) is not None:
            raise ConflictError(
                f"{doing} model {name!r}: its {SERVING} says what every replica serves: {document}. Change it for all of them "
                "(--fleet, or POST /v1/models/{model}/fleet)"
            )

    def _wanted_by_fleet(self, name: str, version: str | None) -> bool:
        """Return True if a model has a serving document that wants this version: accepting it changes no fleet."""
        document = self._catalog.document(name)
        return document is not None and version in (None, document.version)

    def _end_if_superseded(self, name: str, chosen_by: ServingDocument | None) -> None:
        """End a load before its version takes over, if the serving document has changed."""
        document = self._catalog.fleet.known(name)
        if document is not None and document != chosen_by:
            raise _SupersededError(f"deploying model {name!r}: meanwhile the fleet serves {document}")

    def _log_pin(self, name: str, served: str) -> None:
        """Log that a pin chose the serving version."""
        pin = self._catalog.pins.of(name)
        if pin is None:
            return
        if pin.version == served:
            _log.info("model %r: version %s is %s; `hps unpin %s` ends that", name, served, pin, name)
        else:
            _log.error("model %r: version %s is %s, but its files are gone: version %s serves", name, pin.version, pin, served)

    def _put_into_service(
        self, name: str, version: str, change: Change, *, force: bool = False, chosen: Sequence[str] = ()
    ) -> str:
        """Put a version into service, and return the fingerprint of its files.

        Args:
            chosen: all versions that the policy chose; the serving version serves until the last of them does. By default, the
                versions to keep are chosen from those in service.
        """
        only_available = bool(chosen) and version != chosen[-1]
        wanted = self._catalog.version(name, version, partial(self._resident_tables, name))
        config = wanted.config
        if (current := self._live.deployed(name, config.version)) and (difference := _other_tables(current.config, config)):
            raise ConflictError(
                f"deploying model {name!r}: {difference}, which cannot change under the same version; give the files a version "
                "of their own, or undeploy the model first"
            )
        fingerprints = self._catalog.fingerprints(wanted)
        fingerprint = self._catalog.fingerprint(wanted, fingerprints)
        change.fingerprint = fingerprint
        same_files = current if current and current.fingerprint == fingerprint and not force else None
        if current and same_files and not only_available:
            if change.accepts:
                self._accept(current)
            elif current.held and current.checks is not None:
                if (report := self._accepted_report(current.config, current.version, current.fingerprint)) is not None:
                    current.checks = current.checks.accepted(report.accepted_at or 0.0)
                else:
                    only_available, change.held = True, self._held_text(current.checks)
        if current and same_files:
            refuse_format_in_service(current.config, config)
            same = _same_settings(current.config, config)
            if same or current.chain.databases:
                deployed = current if same else self._renewed(current, config, wanted.written_at_us)
                # A running modification is in the database and not in the caches yet. Lookups that missed the old caches have
                # already answered its rows, so caches with the rows before it must not take over; nor may a modification start
                # before the old lookups have ended.
                try:
                    change.proceed()
                    with nullcontext() if same else deployed.chain.settled(deployed.tables):
                        self._live.serve(deployed, lambda versions: versions, "hand over", only_available=only_available)
                        if not same:
                            current.lookups_ended.wait(DRAIN_S)
                except BaseException:
                    if deployed is not current:
                        current.successors.remove(deployed)
                        deployed.close("hand over")
                    raise
                self._updates.hand_over(current, deployed)
                if not only_available:
                    self._retire_unselected(deployed, chosen)
                return fingerprint
        if name not in self._live.serving and not change.accepts:
            self._refuse_held(name, version, fingerprint)
        replacing = partial(self._replace, name, wanted, fingerprints, same_files, change, force=force, chosen=chosen)
        try:
            replacing()
        except DatabaseError as error:
            permanent = isinstance(error, (DatabaseCorruptError, TableWidthError))
            if permanent or self._live.deployed(name, config.version) is not current or not self._chain.put_away(str(error)):
                raise
            _log.error("model %r: version %s is deployed without the volatile database: %s", name, config.version, error)
            try:
                replacing()
            except BaseException:
                self._chain.take_in()  # the volatile database was not the cause
                raise
        return fingerprint

    def _retire_unselected(self, serving: Deployment, chosen: Sequence[str]) -> None:
        """Retire versions that neither the policy nor `chosen` selects, such as one whose pin has ended."""
        config, name = serving.config, serving.config.model
        policy = self._catalog.model(name).version_policy

        def select(versions: list[str]) -> list[str]:
            return [*chosen, *self.tried_out(name), *policy.chosen(versions, also=serving.version)]

        available = [entry.version for entry, state in self._live.versions(name) if state in ("serving", "available")]
        if not {*available} <= {*select(available)}:
            kept = self._live.kept(name)
            self._live.serve(serving, select, "keep" if config.keep_versions else "drop")
            self._drop_rest(name, kept, config)

    def _replace(
        self,
        name: str,
        wanted: ModelVersion,
        fingerprints: Sequence[str],
        current: Deployment | None,
        change: Change,
        *,
        force: bool,
        chosen: Sequence[str],
    ) -> None:
        """Load a version, or reuse a kept one, and put it into service.

        Args:
            current: the deployment in service with the same files and other settings; it has no database.
            change, force, chosen: as for `_put_into_service`.
        """
        # A version is loaded into tables of its own slot and its caches are warmed before it takes over: the serving version
        # answers meanwhile, and stays if anything fails. Both need memory at the same time.
        config, version = wanted.config, wanted.config.version
        fingerprint = self._catalog.fingerprint(wanted, fingerprints)
        kept, targets = self._live.kept(name), self._targets()
        old = next((entry for entry in kept if (entry.version, entry.fingerprint) == (version, fingerprint)), None)
        same = old and old.config.row_dtype == config.row_dtype and not _other_tables(old.config, config)
        if old and same and current is None and not force:  # including its online writes
            deployed, kept = self._renewed(old, config, wanted.written_at_us), [entry for entry in kept if entry is not old]
        else:
            used = {table.slot for deployment, _ in self._live.versions(name) for table in deployment.tables}
            slot = free_slot(config, fingerprints, used, self._chain, force=force, keep=targets.keep)
            tables, old = tuple(replace(table, slot=slot) for table in config.tables), None
            if not force:
                refuse_format_change(config, tables, fingerprints, self._chain.databases)
            load = partial(
                load_deployment,
                wanted,
                tables,
                self._cache_class,
                self._chain,
                targets=replace(targets, force=force),
                follows=self._updates.follows,
                progress=change,
            )
            change.expect(table.table_name for table in tables)
            try:
                deployed = load()
            except CapacityError:  # nothing was loaded, so the tables to drop afterwards can be dropped now
                self._drop_rest(name, kept, config, tables)
                deployed, kept = load(), self._live.kept(name)
        policy = self._catalog.model(name).version_policy

        def select(versions: list[str]) -> list[str]:
            return [version for version in versions if version in chosen] or policy.chosen(versions, also=version)

        def is_closing() -> bool:
            change.advance(deployed.tables[0].tag, 0)  # raises if the deployment is aborted, as during the load
            return self._live.closed

        only_available = bool(chosen) and version != chosen[-1]
        fate: Fate = "keep" if config.keep_versions and current is None else "drop"  # `there` would have older rows
        # First the feed, so that lookups of the new version do not go back to rows older than those of the serving one; then
        # the check whether the fleet still wants it; the tables of old versions are dropped last, since until then they may
        # serve.
        try:
            self._updates.start_and_wait(deployed, is_closing, change.wait_for)
            if old is None and (not only_available or change.beside):
                self._check(deployed, change, is_closing)
            change.proceed()
            if change.beside or (deployed.held and not only_available):
                self._live.serve(deployed, self._without_held(name), fate, old, only_available=True)
                kept = []  # nothing was replaced
            else:
                self._live.serve(deployed, select, fate, old, only_available=only_available)
        except BaseException:
            if self._live.serving.get(name) is not deployed:
                deployed.close("keep" if old else "release")
            raise
        self._drop_rest(name, kept, config)

    def _check(self, deployed: Deployment, change: Change, is_closing: Callable[[], bool]) -> None:
        """Check a loaded version, and record the report in it.

        A version below the serving one is a way back, and is not checked: the serving one may be what is wrong.

        Raises:
            VersionHeldError: it must not serve, and cannot be held: it is refused, no version serves meanwhile, or the serving
                one has its number.
        """
        config, documents = deployed.config, self._catalog.checks
        serving = self._live.serving.get(config.model)
        if not config.checks.enabled or (serving is not None and int(deployed.version) < int(serving.version)):
            return

        def proceed() -> None:
            change.proceed()
            if is_closing():
                raise NotReadyError(f"deploying model {config.model!r}: the parameter server is closed")

        change.wait_for("its checks")
        report = self._version_check(deployed, serving, proceed).run()
        change.wait_for("")
        counted = Counter((found.check, found.outcome) for found in report.checks)
        for check, outcome in product(CHECKS, OUTCOMES):  # zeros, too: the first failure is then visible as an increase
            self._metrics.version_checks.labels(config.model, check, outcome).inc(counted[check, outcome])
        before = documents.read(config.model, config.version_path, report.version, report.fingerprint)
        deployed.checks = report
        if change.accepts:
            self._accept(deployed)
        elif before is not None and before.accepted_at is not None:
            deployed.checks = report.accepted(before.accepted_at)
        elif serving is None:
            self._refuse_held(config.model, report.version, report.fingerprint)  # by another replica, during the load
        documents.write(deployed.checks, config.version_path)
        verdict = deployed.checks.verdict
        if verdict in ("passed", "accepted"):
            for failed in report.failed:
                _log.warning("model %r: version %s: %s; it serves (%s)", config.model, report.version, failed, failed.policy)
            compared = [found for found in report.checks if found.check not in ("finite", "expected")]
            uncompared = {found.outcome for found in compared} == {"skipped"}
            if serving is not None and uncompared and max(deployed.rows) >= LEAST_ROWS:
                _log.warning("model %r: version %s serves unchecked: %s", config.model, report.version, compared[0])
            return
        if verdict == "refused" or serving is None or serving.version == deployed.version:
            raise VersionHeldError(f"{_refused(config.model, report.version)}: {report.reason}; {_advice(config.model)}")
        change.held = self._held_text(report)

    def _without_held(self, name: str) -> Callable[[list[str]], list[str]]:
        """Return a selection of all versions but one that its checks held before."""
        before = self._live.held(name)
        return lambda versions: [version for version in versions if before is None or version != before.version]

    def _accept(self, deployed: Deployment) -> None:
        """Let a version serve that its checks hold."""
        if deployed.checks is not None and deployed.checks.verdict in ("held", "refused"):
            deployed.checks = deployed.checks.accepted(time.time())
            self._catalog.checks.write(deployed.checks, deployed.config.version_path)

    def _refuse_held(self, name: str, version: str, fingerprint: str) -> None:
        """Refuse a version, while none serves, that was held before: nothing can be compared with it now."""
        config = self._catalog.model(name)
        report = self._catalog.checks.read(name, config.version_path, version, fingerprint) if config.checks.enabled else None
        if report is not None and report.verdict == "held":
            raise VersionHeldError(f"{_refused(name, version)}, since it was held: {report.reason}; {_advice(name)}")

    def _accepted_elsewhere(self, name: str, wanted: Wanted) -> bool:
        """Return True if the desired version is held or refused here, and was accepted on another replica."""
        config, (*_, (version, fingerprint)) = wanted
        held, failure = self._live.held(name), self._live.failure(name)
        waits = (held is not None and held.version == version) or (failure is not None and failure.refused_beside is not None)
        return waits and self._accepted_report(config, version, fingerprint) is not None

    def _accepted_report(self, config: ModelConfig, version: str, fingerprint: str) -> CheckReport | None:
        """Return the report of a version if a person let it serve, on any replica."""
        report = self._catalog.checks.read(config.model, config.version_path, version, fingerprint)
        return None if report is None or report.accepted_at is None else report

    def _held_text(self, report: CheckReport) -> str:
        name, version = report.model, report.version
        return (
            f"deploying model {name!r}: version {version} is held, and {report.against} serves: {report.reason}. Look at it "
            f"under its number; {_advice(name)}"
        )

    def _renewed(self, current: Deployment, config: ModelConfig, written_at_us: int = 0) -> Deployment:
        """Build new sessions, with the caches of `config`, over the tables of a version."""
        if _same_settings(current.config, config):
            renewed = current.renewed(current.config)
            renewed.start_aging()
            return renewed
        check_transform(config, self._targets().sources)
        return reconfigure(current, config, written_at_us)

    def _resident_tables(self, name: str, version: str) -> list[ResidentTable]:
        """Return the tables of a version in service or kept."""
        found = (deployment.resident_tables() for deployment, _ in self._live.versions(name) if deployment.version == version)
        return next(found, [])

    def _drop_rest(self, name: str, kept: Sequence[Deployment], config: ModelConfig, loading: Sequence[TableSpec] = ()) -> None:
        """Drop the tables that are not needed once the version serves; failures are retried later.

        Args:
            kept: versions kept for a roll-back, before this version.
            config: configuration of the version.
            loading: its tables that are not in service yet.
        """
        self._live.drop_kept(name, surplus(kept, config.keep_versions))
        versions = self._live.versions(name)
        live = [table for deployment, _ in versions for table in deployment.tables] + list(loading)
        kept_versions = sum(state in ("kept", "retiring") for _, state in versions)
        for tags in leftovers(config, live, kept_versions, self._chain, self.tried_out(name)):
            self._chain.discard(tags)


def _outcome(change: Change, error: Exception) -> str:
    """Name the outcome of a deployment that raised an error: neither a held version nor a newer document is a failure."""
    if isinstance(error, _SupersededError):
        return "superseded"
    return "held" if change.held else "failed"


def _refused(name: str, version: str) -> str:
    return f"deploying model {name!r}: version {version} is refused"


def _advice(name: str) -> str:
    return f"publish a better one, or `hps deploy {name} --accept`"


def _same_settings(entry: ModelConfig, other: ModelConfig) -> bool:
    """Return True if two entries are equal except in how they choose versions."""
    return entry.model_copy(update=_NOT_OF_A_VERSION) == other.model_copy(update=_NOT_OF_A_VERSION)


def _other_tables(current: ModelConfig, config: ModelConfig) -> str:
    """Describe how the tables of a version, or the location of their rows, differ; empty if equal."""
    for key, old, new in (
        ("tables", current.embedding_table_names, config.embedding_table_names),
        ("widths", current.embedding_vecsize_per_table, config.embedding_vecsize_per_table),
        ("embedding_cache_type", current.embedding_cache_type, config.embedding_cache_type),
    ):
        if old != new:
            return f"got {key} {new}, but version {config.version} serves with {old}"
    return ""

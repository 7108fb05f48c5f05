"""The desired version of a model: one record for its three sources.

The sources are the `version_policy` of the model's entry, a pin of this process (a roll-back, or a deployment by number),
and the serving document of a fleet. A document comes before a pin, and a pin before the policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from hps.configuration.models import VersionPolicy

DesiredBy: TypeAlias = Literal["configuration", "deploy", "rollback", "unpin", "canary", "promote"]


@dataclass(frozen=True)
class DesiredVersion:
    """The version of a model that should serve. *Immutable.*

    Attributes:
        version: its number; empty if the model's `version_policy` chooses.
        by: the change that chose it.
        since: time of that change, in seconds since the epoch.
        previous: the version to serve if `version` does not exist; empty if none.
        withdrawn: versions that the policy does not choose.
        problem: why it ends with the process; empty if a restart finds it.
    """

    version: str = ""
    by: DesiredBy = "configuration"
    since: float = 0.0
    source: Literal["policy", "pin", "fleet"] = "policy"
    previous: str = ""
    withdrawn: tuple[str, ...] = ()
    problem: str = ""

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.since, UTC)
        if self.source == "pin":
            return f"pinned by {self.by}, {when:%Y-%m-%d}"
        what = f"version {self.version}" if self.version else "what the version_policy chooses"
        return f"{what} (by {self.by}, {when:%Y-%m-%d %H:%M:%S} UTC)" if self.source == "fleet" else what

    def chosen(self, versions: Sequence[str], policy: VersionPolicy) -> list[str]:
        """Return the versions to serve, ascending; the last one answers requests that name none. Empty if there are none.

        The policy selects among those that are not withdrawn; as if `version`, if it is named, were the newest. If that one
        does not exist, as if `previous` were; if that one does not exist either, a version below serves.
        """
        allowed = [number for number in versions if number == self.version or number not in self.withdrawn]
        if not self.version:
            return policy.chosen(allowed)
        highest = self.previous if self.version not in allowed and self.previous in allowed else self.version
        return policy.chosen([number for number in allowed if int(number) <= int(highest)], also=highest)

    def allows(self, version: str) -> bool:
        """Return True if a process may serve this version."""
        return version == self.version if self.version else version not in self.withdrawn

    def describe(self, serving: str) -> str:
        """Describe the pin or document that chose the serving version; empty if the `version_policy` did."""
        if self.source == "policy":
            return ""
        if self.source == "fleet":
            return f"the fleet serves {self}"
        which = "" if self.version == serving else f"version {self.version}, whose files are gone, is "
        return f"{which}{self}" + (f"; {self.problem}" if self.problem else "")

    def unmet(self, name: str, versions: Sequence[str], policy: VersionPolicy) -> str:
        """Describe why no version of a model is chosen, and the cure."""
        got = ", ".join(versions) or "none"
        if self.source == "fleet":
            return (
                f"deploying model {name!r}: the fleet serves {self}; got versions {got}, withdrawn "
                f"{', '.join(self.withdrawn) or 'none'}. Put its files back, or `hps deploy {name} --version V --fleet`"
            )
        if self.source == "pin":
            return (
                f"deploying model {name!r}: version {self.version} is {self}, and its files are gone; got versions {got}, "
                "expected it, or one below it that the version_policy allows. Put its files back, deploy another version, or "
                f"`hps unpin {name}` to serve what the version_policy chooses"
            )
        expected = f"versions {', '.join(policy.specific)} (version_policy)" if policy.specific else "at least one"
        return f"deploying model {name!r}: got versions {got}, expected {expected}"

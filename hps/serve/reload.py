"""Compares a reread configuration with the running one: which changes apply now, and which need a restart."""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from hps.configuration.load import Configuration, ModelConfig
from hps.configuration.tiers import Section

CHANGEABLE = frozenset(
    {
        "access_log_per_s",
        "admin_token",
        "allow_empty",
        "answer_timeout_s",
        "bearer_token",
        "drain_s",
        "keep_alive_s",
        "log_format",
        "log_level",
        "max_body_bytes",
        "max_connections",
        "max_held_bytes",
        "max_keys_per_request",
        "max_rows_per_write",
        "refuse_nan",
        "repository_poll_s",
        "request_timeout_s",
        "shared_memory_bytes",
        "slow_lookup_ms",
        "tokens_path",
        "triton_metrics",
    }
)
"""Keys of `service` that can change while it runs."""

_OF_VERSIONS = {"keep_versions", "version_path", "version_policy", "versions"}


class ReloadPlan(NamedTuple):
    """Actions for a running service, and lines for its log.

    Attributes:
        configuration: the running configuration with all applicable changes.
        deploy: models that are new, failed to load and have changed, or are in service with other versions.
        undeploy: names of removed models.
        made: a line for each applied change.
        refused: a line for each difference that needs a restart.
    """

    configuration: Configuration
    deploy: list[ModelConfig]
    undeploy: list[str]
    made: list[str]
    refused: list[str]


def compare(running: Configuration, wanted: Configuration, failed: Collection[str], kept: Collection[str]) -> ReloadPlan:
    """Plan the changes.

    Args:
        failed: names of models that could not be loaded: their entries may change.
        kept: keys of `service` that are not applied although they could be.
    """
    made, refused = [], []
    settings: dict[str, Any] = {}
    for path, secret, old, new in _differences("", running, wanted):
        section, _, key = path.partition(".")
        if section != "service" or key not in CHANGEABLE or key in kept:
            refused.append(f"{path} differs")
        else:
            settings[key] = new
            made.append(f"{path} is another one" if secret else f"{path} is {new}, was {old}")
    before, models, deploy = {model.model: model for model in running.models}, [], []
    for model in wanted.models:
        name, old = model.model, before.pop(model.model, None)
        if old is None or (old != model and name in failed):
            deploy.append(model)
            made.append(f"model {name} is {'new' if old is None else 'tried as it is now'}, and will be loaded")
        elif keys := [path for path, *_ in _differences("", old, model)]:
            if _OF_VERSIONS.issuperset(keys):
                deploy.append(model)
                made.append(f"model {name} has other {', '.join(keys)}; what serves stays until `hps deploy {name}`")
            else:
                refused.append(f"model {name} differs in {', '.join(keys)}")
                model = old
        models.append(model)
    made += [f"model {name} is gone, and will be taken out of service" for name in before]
    service = running.service.model_copy(update=settings)
    configuration = running.model_copy(update={"service": service, "models": tuple(models)})
    return ReloadPlan(configuration, deploy, list(before), made, refused)


def _differences(where: str, old: Section, new: Section) -> Iterator[tuple[str, bool, Any, Any]]:
    """Yield each differing key outside the models: its path, whether it is secret, and the two values."""
    fields = type(old).model_fields
    for (key, before), (_, after) in zip(old, new, strict=True):
        if before == after or fields[key].deprecated or key == "models":
            continue
        if isinstance(before, Section):
            yield from _differences(f"{where}{key}.", before, after)
        else:
            yield f"{where}{key}", not fields[key].repr, before, after

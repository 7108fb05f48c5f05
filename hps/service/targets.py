"""The lookup routes, by path."""

from typing import NamedTuple

from hps.service.protocol.schemas import INFER, INFER_VERSION, LOOKUP, SCORE


class LookupTarget(NamedTuple):
    """The lookup route of a path, and the path's parameters."""

    route: str
    model_name: str
    version: str | None = None  # the serving one

    @property
    def is_json(self) -> bool:
        """Whether the body of a request is JSON alone."""
        return self.route in (LOOKUP, SCORE)


def lookup_target(path: str) -> LookupTarget | None:
    """Return the lookup route of a path; None for other routes."""
    match path.split("/"):
        case ["", "v2", "models", model, "infer"]:
            return LookupTarget(INFER, model)
        case ["", "v1", "models", model, "lookup"]:
            return LookupTarget(LOOKUP, model)
        case ["", "v1", "models", model, "score"]:
            return LookupTarget(SCORE, model)
        case ["", "v2", "models", model, "versions", version, "infer"]:
            return LookupTarget(INFER_VERSION, model, version)
    return None

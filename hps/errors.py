"""Every error that hps raises.

    HPSError
    ├── ConfigError              (ValueError)         a configuration is wrong; carries the full report
    ├── MissingDependencyError   (ImportError)        an optional package is missing; says what to install
    ├── ModelFileError           (ValueError)         sparse model files are missing, truncated or do not match
    │   ├── ModelFileNotFoundError (FileNotFoundError)
    │   ├── ModelFileChangedError                     they were replaced while they were being read
    │   ├── NonfiniteRowsError                        a table has too many rows with an infinity or NaN
    │   └── ModelSourceError     (ConnectionError)    their host does not answer, or disconnects; transient
    ├── InvalidInputError        (ValueError)         keys or outputs of a call, or a request, are of the wrong kind
    │   ├── InvalidDtypeError    (TypeError)
    │   ├── ServedWeightError    (AttributeError)     the weight of a layer of torch was used other than by a lookup
    │   └── TooManyKeysError                          more keys than the model is configured for
    ├── UnknownModelError        (KeyError)
    │   └── UnknownVersionError
    │       └── VersionMismatchError                  a layer is of a version that is not in service any more
    ├── UnknownTableError        (KeyError)
    ├── MisplacedKeysError       (KeyError)           keys of a share of the table that other servers hold
    ├── UnknownDeviceError       (KeyError)
    ├── ConflictError            (RuntimeError)       a change of a model conflicts with its state or another change
    │   └── StaleCopyError                            its network has a copy of the table, which writes would not reach
    ├── VersionHeldError         (RuntimeError)       a version failed its checks; the one before serves on
    ├── CapacityError            (MemoryError)        a model does not fit in memory, on disk or on the device
    ├── NotReadyError            (RuntimeError)       still loading, or already closed
    │   ├── ForkedProcessError                        opened by the parent process, before a fork
    │   └── MissingShareError                         no server of a share of the model answers
    ├── TrainingModeError        (RuntimeError)       a layer of torch was called in training mode
    ├── WorkspaceTimeoutError    (TimeoutError)       every lookup workspace stayed busy
    ├── NetworkError             (RuntimeError)       a dense network failed, or was not opened in time
    │   └── NetworkBusyError     (TimeoutError)       a call of it hangs; requests are refused meanwhile
    ├── TransformError           (RuntimeError)       the function of a model's `transform` failed, or was not done in time
    ├── DeadlineError            (TimeoutError)       the time that a request allows was over before work began
    ├── DatabaseError            (RuntimeError)       a volatile or persistent database failed
    │   ├── DatabaseTimeoutError (TimeoutError)
    │   ├── DatabaseLockedError                       another process holds the directory
    │   ├── DatabaseCorruptError
    │   ├── ReadOnlyError                             it is configured as read-only
    │   └── TableWidthError      (ValueError)         a table holds vectors of another width
    ├── UpdateLogError           (RuntimeError)       a log of online updates failed, or cannot be reached
    ├── UpdateFormatError        (ValueError)         a message of a log of online updates cannot be read
    ├── PartialWriteError        (RuntimeError)       some servers did not acknowledge their keys of a write
    ├── RemoteError              (RuntimeError)       a remote server failed, or did not answer the request
    │   ├── RemoteConnectionError (ConnectionError)   it cannot be reached, or disconnected
    │   ├── RemoteTimeoutError   (TimeoutError)
    │   └── UnauthorizedError    (PermissionError)    it refused the token
    └── DeviceError              (RuntimeError)       CUDA failed
        └── DeviceMemoryError    (MemoryError)        a cache does not fit into the device's memory

A database error never means an absent key: an absent key gets the default vector, a failure is raised. The HTTP service adds
one class, `RequestError` in `hps/serve/http/http_answer.py`, which never leaves it.
"""

from collections.abc import Mapping
from typing import Any


class HPSError(Exception):
    """The base of every error that hps raises."""

    def __str__(self) -> str:  # KeyError would show the message's repr
        return str(self.args[0]) if self.args else ""


class ConfigError(HPSError, ValueError):
    """A configuration is wrong. `problems` has one line per problem; the message shows all of them."""

    def __init__(self, source: str, problems: list[str]) -> None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in problems)]))
        self.source = source
        self.problems = problems


class MissingDependencyError(HPSError, ImportError):
    """An optional package is needed and is not installed."""


class ModelFileError(HPSError, ValueError):
    """Sparse model files cannot be read as the table that they are configured for."""


class ModelFileNotFoundError(ModelFileError, FileNotFoundError):
    """A sparse model file or its directory does not exist."""


class ModelFileChangedError(ModelFileError):
    """A sparse model file was replaced or written while it was being read."""


class NonfiniteRowsError(ModelFileError):
    """A table has more rows with an infinity or NaN than its model allows."""


class ModelSourceError(ModelFileError, ConnectionError):
    """The host of model files does not answer, reports an internal error, or disconnects. Possibly transient."""


class InvalidInputError(HPSError, ValueError):
    """Keys or outputs of a call have the wrong shape, layout or place, or a request cannot be read."""


class InvalidDtypeError(InvalidInputError, TypeError):
    """Keys or outputs of a call have the wrong dtype."""


class ServedWeightError(InvalidInputError, AttributeError):
    """The weight of a converted layer was used other than by a lookup: its rows are in the server."""


class TooManyKeysError(InvalidInputError):
    """A lookup has more keys than the table is configured for."""


class UnknownModelError(HPSError, KeyError):
    """No model of this name is deployed."""


class UnknownVersionError(UnknownModelError):
    """The model is deployed, but not in this version, or the version does not exist."""


class VersionMismatchError(UnknownVersionError):
    """A layer is of a version that is no longer in service: the rows of another one do not belong to it."""


class UnknownTableError(HPSError, KeyError):
    """The model has no such table."""


class MisplacedKeysError(HPSError, KeyError):
    """Keys of a call belong to a share of the table that this server does not hold (`models[].shard`)."""


class UnknownDeviceError(HPSError, KeyError):
    """The model is not deployed on this device."""


class ConflictError(HPSError, RuntimeError):
    """A model's state forbids this change, or another change is in progress."""


class StaleCopyError(ConflictError):
    """Rows of a table were to be written of which the version's network has a copy."""


class VersionHeldError(HPSError, RuntimeError):
    """A version failed its checks, and does not serve; the version before serves on."""


class CapacityError(HPSError, MemoryError):
    """A model does not fit in memory, on disk or on the device; nothing of it was loaded."""


class NotReadyError(HPSError, RuntimeError):
    """The parameter server is still loading or is closed."""


class ForkedProcessError(NotReadyError):
    """The object was opened before this process was forked; create `HPS` after the fork."""


class MissingShareError(NotReadyError):
    """No server answers keys of a share of the model. `shares` has the numbers of such shares."""

    def __init__(self, message: str, shares: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.shares = shares


class TrainingModeError(HPSError, RuntimeError):
    """A layer of `hps.torch` was called in training mode; its vectors have no gradient."""


class WorkspaceTimeoutError(HPSError, TimeoutError):
    """Every lookup workspace of the model stayed busy for the whole timeout."""


class NetworkError(HPSError, RuntimeError):
    """A dense network failed, was not opened in time, or its outputs are not what it promised."""


class NetworkBusyError(NetworkError, TimeoutError):
    """A call of a dense network takes too long; the request was not queued behind it."""


class TransformError(HPSError, RuntimeError):
    """The function that transforms the inputs of requests failed, was not done in time, or returned what it must not."""


class DeadlineError(HPSError, TimeoutError):
    """The time that the caller allowed was over before any work was done."""


class DatabaseError(HPSError, RuntimeError):
    """A volatile or persistent database failed."""


class DatabaseTimeoutError(DatabaseError, TimeoutError):
    """A database did not answer in time."""


class DatabaseLockedError(DatabaseError):
    """Another process holds the database's directory."""


class DatabaseCorruptError(DatabaseError):
    """A database holds bytes that were never written by it."""


class ReadOnlyError(DatabaseError):
    """A database that is configured as read-only was asked to change."""


class TableWidthError(DatabaseError, ValueError):
    """A table exists with vectors of another width."""


class UpdateLogError(HPSError, RuntimeError):
    """A log of online updates failed, or cannot be reached."""


class UpdateFormatError(HPSError, ValueError):
    """A message of a log of online updates cannot be parsed as changes of a table."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """The reason, as a label of the metric `hps_update_dead_letters_total`."""


class PartialWriteError(HPSError, RuntimeError):
    """Some servers of a table that is split did not acknowledge their keys; all others did.

    Attributes:
        keys: (m,) int64, those that not every server with them acknowledged. Each has its old or its new row there.
        errors: by address, the errors of servers.
    """

    def __init__(self, keys: Any, total: int, errors: Mapping[str, HPSError]) -> None:
        reasons = "; ".join(f"{server}: {error}" for server, error in errors.items()) or "No server holds them any more"
        super().__init__(f"writing {total} keys: {len(keys)} of them were not acknowledged; write these again. {reasons}")
        self.keys, self.errors = keys, dict(errors)


class RemoteError(HPSError, RuntimeError):
    """A remote server failed, or its answer does not answer the request."""


class RemoteConnectionError(RemoteError, ConnectionError):
    """A remote server cannot be reached, or disconnected before its answer was complete."""


class RemoteTimeoutError(RemoteError, TimeoutError):
    """A remote server did not answer within the timeout of the call."""


class UnauthorizedError(RemoteError, PermissionError):
    """A remote server refused the token, or requires one."""


class DeviceError(HPSError, RuntimeError):
    """A CUDA call failed."""


class DeviceMemoryError(DeviceError, MemoryError):
    """The device does not have enough memory for an embedding cache."""

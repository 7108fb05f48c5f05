"""A layer that returns the vector of every key, like `torch.nn.Embedding`."""

import operator
from contextlib import suppress

import torch
from torch import Tensor

from hps.errors import InvalidInputError, UnknownModelError
from hps.models.manifest import VERSION
from hps.torch.operators import lookup_rows
from hps.torch.servers import Server, known, place_of


def version_of(version: str | int | None) -> str:
    """Return the version that a layer is of; empty if it follows the serving one."""
    if version in (None, "latest"):
        return ""
    if not VERSION.fullmatch(text := str(version)):
        raise InvalidInputError(f"making a layer: got version {version!r}, expected a number or 'latest'")
    return text


def version_text(version: str) -> str:
    return f"version={version!r}, " if version else ""


def hold(layer: torch.nn.Module, place: str, model_name: str, version: str) -> None:
    """Keep the version of a layer in service while the layer lives, if its server is open in this process and has it."""
    server = known(place)
    if version and server is not None:
        with suppress(UnknownModelError):  # it may be deployed later
            server.hold(model_name, version, layer)


def called_directly(tensor: Tensor) -> bool:
    """Tell whether a call can bypass the dispatcher: it is not compiled, exported or traced."""
    return type(tensor) is Tensor and not torch.compiler.is_compiling() and not torch.jit.is_tracing()


class LookupLayer(torch.nn.Module):
    """Looks up keys of one table. *Thread-safe*; it has no parameters and an empty `state_dict`.

    Vectors are float32, also under autocast, without gradient.

    Args:
        ps_config_file: path of a `ps.json`, opened once per process at the first lookup; an address as `hps.connect` takes it,
            or several, of servers that look up and pool for this process; a name returned by `hps.torch.attach`; or an `HPS`
            or a `Client`, which is then attached.
        model_name: a deployed model.
        table_id: the table's id (its position in `sparse_files`) or name.
        emb_vec_size: its width.
        version: the version of the model that the layer is of; it never answers from another one. An open server keeps that
            version in service while the layer lives. Default, and `latest`: the version that serves at each call.
        max_norm: vectors with a larger L2 norm are scaled down to it. Default: no limit.
        wait: False enqueues the lookup on torch's current stream and returns at once; see `HPS.lookup_fromdlpack`. While a
            CUDA graph captures that stream, no lookup waits. Not with an address.
        timeout_s: with an address: of each call, with all its attempts. Default: that of the client, 10 s.
        fallback: with an address: each element of the output of a call while the server cannot be reached, does not answer in
            time or is not ready. Default: such calls raise.
    """

    def __init__(
        self,
        ps_config_file: Server,
        model_name: str,
        table_id: int | str,
        emb_vec_size: int,
        *,
        version: str | int | None = None,
        max_norm: float | None = None,
        wait: bool = True,
        timeout_s: float | None = None,
        fallback: float | None = None,
    ) -> None:
        super().__init__()
        self.ps_config_file: str = place_of(ps_config_file, timeout_s, fallback)
        self.model_name: str = model_name
        self.table_id: int = -1 if isinstance(table_id, str) else operator.index(table_id)
        self.table_name: str = table_id if isinstance(table_id, str) else ""
        self.emb_vec_size: int = emb_vec_size
        self.max_norm: float | None = max_norm
        self.wait: bool = wait
        self.version: str = version_of(version)
        self.training = False
        hold(self, self.ps_config_file, model_name, self.version)

    def forward(self, keys: Tensor) -> Tensor:
        """Look up keys.

        Args:
            keys: integers of any shape, on the CPU or a CUDA device of the model.

        Returns:
            (*shape, emb_vec_size) float32, on the device of the keys; absent keys get the table's default vector.

        Raises:
            TrainingModeError: the layer is in training mode.
            VersionMismatchError: its version is not in service any more.
            HPSError: as `HPS.lookup_fromdlpack`, or with an address as `Client.lookup`.
        """
        if not torch.jit.is_scripting():  # noqa: SIM102 - TorchScript skips the body only if this is the whole condition
            if self.max_norm is None and not self.training and called_directly(keys):
                table = self.table_name or self.table_id
                return lookup_rows(
                    keys, self.ps_config_file, self.model_name, table, self.emb_vec_size, self.wait, self.version
                )
        out: Tensor = torch.ops.hps.lookup(
            keys,
            self.ps_config_file,
            self.model_name,
            self.table_id,
            self.table_name,
            self.emb_vec_size,
            self.max_norm,
            self.wait,
            self.training,
            self.version,
        )
        return out

    def extra_repr(self) -> str:
        table = self.table_name or self.table_id
        return (
            f"{self.ps_config_file!r}, {self.model_name!r}, {table!r}, {self.emb_vec_size}, "
            f"{version_text(self.version)}max_norm={self.max_norm}"
        )

"""A layer that returns the vector of every key, like `torch.nn.Embedding`."""

import operator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from hps.errors import InvalidInputError, UnknownModelError
from hps.models.manifest import VERSION
from hps.torch.operators import lookup_rows
from hps.torch.served_weight import ServedWeight
from hps.torch.servers import Server, location_of, open_server


def version_of(version: str | int | None) -> str:
    """Return the version that a layer is bound to; empty if it follows the serving one."""
    if version in (None, "latest"):
        return ""
    if not VERSION.fullmatch(text := str(version)):
        raise InvalidInputError(f"making a layer: got version {version!r}, expected a number or 'latest'")
    return text


def version_text(version: str) -> str:
    return f"version={version!r}, " if version else ""


def called_directly(tensor: Tensor) -> bool:
    """Return whether a call can bypass the dispatcher: it is not compiled, exported or traced."""
    return type(tensor) is Tensor and not torch.compiler.is_compiling() and not torch.jit.is_tracing()


class ServedModule(torch.nn.Module):
    """Base of the layers. It has no parameters and an empty `state_dict`, and ignores loaded rows.

    Attributes:
        like: an empty tensor of the dtype and device of the replaced weights, if any; it follows `module.to`.
    """

    __jit_unused_properties__ = ("embedding_dim", "dtype", "device", "weight", "table")
    like: Tensor | None

    def __init__(
        self,
        ps_config_file: Server,
        model_name: str,
        version: str | int | None,
        wait: bool,
        timeout_s: float | None,
        fallback: float | None,
    ) -> None:
        super().__init__()
        self.ps_config_file: str = location_of(ps_config_file, timeout_s, fallback)
        self.model_name: str = model_name
        self.wait: bool = wait
        self.version: str = version_of(version)
        self.training = False
        self.like = None
        self.register_load_state_dict_pre_hook(ignore_rows)  # type: ignore[no-untyped-call]
        server = open_server(self.ps_config_file)
        if self.version and server is not None:
            with suppress(UnknownModelError):  # it may be deployed later
                server.hold(model_name, self.version, self)

    def stand_for(self, like: Tensor, **attributes: Any) -> None:
        """Take over dtype, device and attributes of a trained embedding.

        Args:
            like: an empty tensor of the dtype and device of its outputs.
        """
        # A plain attribute is read faster than a buffer, so only layers that replace an embedding have the buffer.
        del self.like
        self.register_buffer("like", like, persistent=False)
        for name, value in attributes.items():
            setattr(self, name, value)

    def rounded(self, vectors: Tensor) -> Tensor:
        """Return vectors in the dtype of the trained weights."""
        like = self.like
        if like is not None:  # TorchScript understands only this form
            return vectors if like.dtype == vectors.dtype else vectors.to(like.dtype)
        return vectors

    @property
    def device(self) -> torch.device:
        """Device of the replaced weights, as moved by `module.to`; outputs are on the device of the keys."""
        return torch.device("cpu") if self.like is None else self.like.device


def ignore_rows(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Remove the entries of a layer from a trained module's `state_dict`: the rows are in the server."""
    for name in [name for name in state_dict if name.startswith(prefix)]:
        del state_dict[name]


class TableModule(ServedModule):
    """Base of the layers of one table. After `stand_for` it has the attributes of the embedding that it replaces."""

    num_embeddings: int
    norm_type = 2.0
    scale_grad_by_freq = sparse = False

    def set_table(self, table_id: int | str, emb_vec_size: int, max_norm: float | None, padding_idx: int | None) -> None:
        self.table_id: int = -1 if isinstance(table_id, str) else operator.index(table_id)
        self.table_name: str = table_id if isinstance(table_id, str) else ""
        self.emb_vec_size: int = emb_vec_size
        self.max_norm: float | None = max_norm
        self.padding_idx: int | None = padding_idx

    @property
    def embedding_dim(self) -> int:
        return self.emb_vec_size

    @property
    def dtype(self) -> torch.dtype:
        """Of the outputs."""
        return torch.float32 if self.like is None else self.like.dtype

    @property
    def weight(self) -> ServedWeight:
        """The table, for code that reads `weight` of a replaced embedding."""
        if self.like is None:
            raise AttributeError("weight")
        name = f"table {self.table!r} of model {self.model_name!r}"
        return ServedWeight(name, (self.num_embeddings, self.emb_vec_size), self.like, self._rows)

    @property
    def table(self) -> int | str:
        return self.table_name or self.table_id

    def _rows(self, keys: Tensor, max_norm: float | None) -> Tensor:
        out: Tensor = torch.ops.hps.lookup(
            keys,
            self.ps_config_file,
            self.model_name,
            self.table_id,
            self.table_name,
            self.emb_vec_size,
            max_norm,
            self.wait,
            self.training,
            self.version,
        )
        return self.rounded(out)


class LookupLayer(TableModule):
    """Looks up keys of one table. *Thread-safe*; it has no parameters and an empty `state_dict`.

    Vectors are float32, also under autocast, without gradient.

    Args:
        ps_config_file: path of a `ps.json`, opened once per process at the first lookup; one or more addresses, as for
            `hps.connect`, of servers that look up and pool; a name returned by `hps.torch.attach`; or an `HPS` or a `Client`,
            which is then attached.
        model_name: a deployed model.
        table_id: the table's id (its position in `sparse_files`) or name.
        emb_vec_size: its width.
        version: the only version that the layer looks up in; an open server keeps it in service while the layer exists.
            Default, and `latest`: the version that serves at each call.
        max_norm: vectors with a larger L2 norm are scaled down to it. Default: no limit.
        wait: False enqueues the lookup on torch's current stream and returns at once; see `HPS.lookup_fromdlpack`. While a
            CUDA graph captures that stream, no lookup waits. Not with an address.
        timeout_s: with an address: of each call, with all its attempts. Default: that of the client, 10 s.
        fallback: with an address: the value of each output element while the server is unreachable, too slow or not ready.
            Default: such calls raise.
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
        super().__init__(ps_config_file, model_name, version, wait, timeout_s, fallback)
        self.set_table(table_id, emb_vec_size, max_norm, None)

    def forward(self, keys: Tensor) -> Tensor:
        """Look up keys.

        Args:
            keys: integers of any shape, on the CPU or a CUDA device of the model.

        Returns:
            (*shape, emb_vec_size) float32, on the device of the keys; absent keys get the table's default vector.

        Raises:
            TrainingModeError: the layer is in training mode.
            VersionMismatchError: its version is no longer in service.
            HPSError: as `HPS.lookup_fromdlpack`, or with an address as `Client.lookup`.
        """
        return self.look_up(keys)

    def look_up(self, keys: Tensor) -> Tensor:
        if not torch.jit.is_scripting():  # noqa: SIM102 - TorchScript skips the body only if this is the whole condition
            if self.max_norm is None and not self.training and called_directly(keys):
                table = self.table_name or self.table_id
                rows = lookup_rows(
                    keys, self.ps_config_file, self.model_name, table, self.emb_vec_size, self.wait, self.version
                )
                return self.rounded(rows)
        return self._rows(keys, self.max_norm)

    def extra_repr(self) -> str:
        return (
            f"{self.ps_config_file!r}, {self.model_name!r}, {self.table!r}, {self.emb_vec_size}, "
            f"{version_text(self.version)}max_norm={self.max_norm}"
        )

"""Transforms: functions that turn inputs of requests, such as text ids, into keys and features of the model.

A function gets, by name, the inputs that its configuration declares: `Strings` for `bytes`, arrays for the others; and returns
arrays by the declared names of outputs. It is called once for a request, in any of several threads. A package offers one by an
entry point of the group `hps.transforms` (docs/transforms.md).
"""

import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hps.configuration.networks import DTYPES
from hps.configuration.transforms import BYTES, TransformConfig
from hps.errors import ConfigError, HPSError, InvalidDtypeError, InvalidInputError, NotReadyError, TransformError
from hps.ground.kernels.numba_kernels import compile_kernels
from hps.ground.registry import implementation
from hps.tensors import strings
from hps.tensors.bags import input_arrays
from hps.tensors.strings import Strings

TransformInputs: TypeAlias = Mapping[str, Strings | npt.NDArray[Any]]
_MOST_RANK: Final = 8
_MOST_BYTES: Final = 1 << 30


class Transform:
    """The function of a model's configuration, with checks of what it gets and returns. *Thread-safe*, as the function is.

    Args:
        trusted: `model_source.trust`: a function of any module may be named.
        imports: import the function now; else `load` does, which may take long.

    Raises:
        ConfigError: the function cannot be imported, or must not be.
    """

    def __init__(self, config: TransformConfig, model: str, *, trusted: bool, imports: bool = True) -> None:
        self.config = config
        self._doing = f"transforming a request to model {model!r}"
        self._place = f"transform {config.function!r} of model {model!r}"
        self._importing = threading.Lock()
        self._function: Callable[[TransformInputs], Any] | None = None
        self._problem = ""
        if config.runs_code and not trusted:
            raise ConfigError(
                self._place,
                [
                    "it names code, which may do whatever the server may; expected the name of an entry point of an installed "
                    "package (group hps.transforms), or, if you trust whoever writes the entries of models, "
                    "model_source.trust: true in the configuration"
                ],
            )
        if imports:
            self._function = self._imported()
        compile_kernels(*strings.KERNELS)

    def load(self) -> None:
        """Import the function unless that was tried. Other threads that load or call it wait meanwhile."""
        with self._importing:
            if self.importing:
                try:
                    self._function = self._imported()
                except HPSError as error:
                    self._problem = str(error)

    @property
    def importing(self) -> bool:
        """Whether `load` has not ended."""
        return self._function is None and not self._problem

    @property
    def loaded(self) -> bool:
        return self._function is not None

    def _imported(self) -> Callable[[TransformInputs], Any]:
        found: Any
        if not self.config.runs_code:
            found = implementation("transform", self.config.function)
        else:
            module, _, name = self.config.function.partition(":")
            try:
                found = getattr(import_module(module), name)
            except Exception as error:
                raise ConfigError(self._place, [f"cannot be imported: {error!r}"]) from error
        if not callable(found):
            raise ConfigError(self._place, [f"got {found!r}, expected a function"])
        function: Callable[[TransformInputs], Any] = found
        return function

    def applies(self, names: Mapping[str, Any]) -> bool:
        """Return whether a request has inputs of the transform; any other request has keys already.

        Raises:
            InvalidInputError: it has some and lacks others.
        """
        missing = [name for name in self.config.inputs if name not in names]
        if missing and len(missing) < len(self.config.inputs):
            raise InvalidInputError(
                f"{self._doing}: input {missing[0]!r} is missing; expected {', '.join(self.config.inputs)}, or none of them"
            )
        return not missing

    def of_call(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Transform the inputs of a call in this process: lists or arrays in host memory.

        Raises:
            As `__call__`.
        """
        if not self.applies(inputs):
            return inputs
        given: dict[str, Any] = {}
        for name, dtype in self.config.inputs.items():
            what, values = f"{self._doing}: input {name!r}", inputs[name]
            if dtype == BYTES:
                given[name] = values if isinstance(values, Strings) else Strings.of(values, what)
                continue
            found = input_arrays(name, values, dtype)
            given[name] = found[name]
            if len(found) > 1 or found[name].dtype != dtype:
                raise InvalidDtypeError(f"{what}: got {'bags' if len(found) > 1 else found[name].dtype}, expected {dtype}")
        others = {name: values for name, values in inputs.items() if name not in self.config.inputs}
        return self.merged(others, self(given))

    def merged(self, others: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of a request that are not the transform's with those that it has made.

        Raises:
            InvalidInputError: a request has an input that the transform makes.
        """
        if twice := next((name for name in made if name in others), None):
            raise InvalidInputError(f"{self._doing}: got input {twice!r}, which the transform makes of others")
        return {**others, **made}

    def __call__(self, inputs: TransformInputs) -> dict[str, npt.NDArray[Any]]:
        """Call the function.

        Raises:
            InvalidInputError: the function refuses the inputs.
            TransformError: it fails, or returns something else than it promised.
            NotReadyError: it cannot be imported in this process.
        """
        if (function := self._function) is None:
            self.load()
            if (function := self._function) is None:
                raise NotReadyError(f"{self._doing}: {self._problem}")
        try:
            made = function(inputs)
        except InvalidInputError:
            raise
        except Exception as error:
            lines = str(error).strip().splitlines()
            raise TransformError(
                f"{self._doing}: {self.config.function}: {type(error).__name__}: {lines[0][:300] if lines else ''}"
            ) from error
        if not isinstance(made, Mapping) or set(made) != {*self.config.outputs}:
            got = ", ".join(map(str, made))[:300] if isinstance(made, Mapping) else type(made).__name__
            raise TransformError(
                f"{self._doing}: {self.config.function} returned {got or 'nothing'}, expected {', '.join(self.config.outputs)}"
            )
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name in self.config.outputs:
            array = np.asarray(made[name])
            if array.dtype.name not in DTYPES or not 0 < array.ndim <= _MOST_RANK or array.nbytes > _MOST_BYTES:
                raise TransformError(
                    f"{self._doing}: {self.config.function} returned {name!r} of {array.dtype} {list(array.shape)}, expected "
                    f"1 to {_MOST_RANK} dimensions of {', '.join(DTYPES)}, of at most 1 GiB"
                )
            arrays[name] = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        return arrays

"""Judges a form: it is packaged and served as its description says, and no answer is ever another one than the module's."""

import copy
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from re import search
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

import hps
from hps.scoring.batching import ScoreCall
from hps.scoring.features import arrays_of
from hps.testing.waiting import PATIENCE_S
from hps.torch import PackagedModel, package
from tests.servers.running_service import document_of
from tests.tables.torch_forms.form import LENGTH, SAMPLES, Draw, Form, Inputs, Size

MOST_SAMPLES = 1024
_MERGED = 64  # samples of the requests that are merged
_GIVEN_ONCE = ((SAMPLES, LENGTH), (1, LENGTH), (64, LENGTH), (5, 2))


@dataclass
class Verdict:
    """What became of a form.

    Attributes:
        outcome: `exact`, `guarded` (some sizes are refused) or `refused`.
        reason: why the module was refused.
        answered: how many inputs were answered.
        guarded: sizes of inputs that were refused.
        faults: what is not as the form says; a wrong answer begins with WRONG.
        notes: of the package.
    """

    outcome: str = "exact"
    reason: str = ""
    answered: int = 0
    guarded: list[Size] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: tuple[str, ...] = ()

    @property
    def wrong(self) -> bool:
        return any(fault.startswith("WRONG") for fault in self.faults)


def call(module: nn.Module, given: Inputs) -> list[torch.Tensor]:
    """Ask the module itself: a copy of it, with copies of the inputs. Returns the tensors that it answers, in their order."""
    given = pytree.tree_map(lambda one: torch.from_numpy(one) if isinstance(one, np.ndarray) else one, copy.deepcopy(given))
    with torch.no_grad():
        with suppress(TypeError, RuntimeError):  # what cannot be copied is asked itself
            module = copy.deepcopy(module)
        module = module.eval()
        found = module(**given) if isinstance(given, dict) else module(*given)
    return [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def difference(answer: Iterable[Any], expected: list[torch.Tensor]) -> float:
    """Return the largest difference of outputs, relative to max(1, |value|); infinite if shapes or missing numbers differ."""
    worst = 0.0
    for got, wanted in zip(answer, expected, strict=True):
        number, other = np.asarray(got, np.float64), wanted.double().numpy()
        if other.ndim == 0 and number.shape == (1,):  # squeeze() takes the one sample away, which a server does not
            other = other.reshape(1)
        if number.shape != other.shape or not np.array_equal(np.isfinite(number), np.isfinite(other)):
            return np.inf
        finite = np.isfinite(other)
        each = np.abs(number - other)[finite] / np.maximum(1, np.abs(other[finite]))
        worst = max(worst, float(each.max(initial=0)))
    return worst


def judge(form: Form, directory: Path, **more: Any) -> Verdict:
    """Package a form, ask for all its inputs, alone and together, and compare the answers with the module's.

    Args:
        more: for `package`.
    """
    verdict, module = Verdict(), form.module()
    if form.name == "in_training_mode":
        module.train()
    before = _state(module)
    try:
        done = package(
            module,
            directory / form.name,
            form.examples(),
            per_request=form.per_request,
            hotness=20,
            settings={"max_batch_size": MOST_SAMPLES},
            max_queue_delay_us=30_000,
            **more,
        )
    except hps.InvalidInputError as refused:
        verdict.outcome, verdict.reason = "refused", str(refused)
        if form.within is not None and not form.refused:
            verdict.faults.append(f"refused: {refused}")
        elif not search(form.refused, str(refused)):
            verdict.faults.append(f"refused for another reason than {form.refused!r}: {refused}")
        _check_untouched(verdict, form, module, before)
        return verdict
    except Exception as error:  # noqa: BLE001 - what it is, is the fault
        verdict.outcome, verdict.reason = "failed", f"{type(error).__name__}: {error}"
        verdict.faults.append(f"package raised {verdict.reason}")
        return verdict
    if form.refused:
        verdict.faults.append(f"packaged, expected that it is refused: {form.refused}")
    verdict.notes = done.notes
    _check_untouched(verdict, form, module, before)
    with hps.HPS(document_of(model_repository=str(directory), model_source={"trust": True})) as server:
        _Asked(form, module, done, server, verdict).ask()
    return verdict


class _Request(NamedTuple):
    """Attributes:
    what: it is, for messages.
    expected: outputs of the module.
    answered: whether it was answered alone.
    """

    what: str
    inputs: dict[str, Any]
    expected: list[torch.Tensor]
    answered: bool


class _Asked:
    def __init__(self, form: Form, module: nn.Module, done: PackagedModel, server: hps.HPS, verdict: Verdict) -> None:
        self._form, self._module, self._done, self._server, self._verdict = form, module, done, server, verdict
        self._together: list[_Request] = []

    def ask(self) -> None:
        for size, given in self._form.fresh():
            self._ask_alone(size, given)
        for number, given in enumerate(self._form.others(Draw(5, LENGTH, "any", 99))):
            self._ask_other(number, given)
        if self._form.per_request:
            for place, size in enumerate(_GIVEN_ONCE):
                self._ask_given_once(Size(*size), place)
        self._ask_together()

    def _wrong(self, what: str, answer: Mapping[str, Any], expected: list[torch.Tensor]) -> bool:
        answers = [answer[name] for name in self._done.dense.outputs]
        if len(answers) != len(expected):
            self._verdict.faults.append(f"WRONG at {what}: got {len(answers)} outputs, expected {len(expected)}")
            return True
        worst = difference(answers, expected)
        if worst > self._form.tolerance:
            shapes = [tuple(np.shape(answer)) for answer in answers], [tuple(one.shape) for one in expected]
            self._verdict.faults.append(f"WRONG at {what}: differs by {worst:.2g}; shapes {shapes[0]}, expected {shapes[1]}")
            return True
        return False

    def _ask_alone(self, size: Size, given: Inputs) -> None:
        what = str(tuple(size))
        try:
            expected = call(self._module, given)
        except Exception:  # noqa: BLE001 - what the module does not take, the server may answer or not
            expected = None
        request = None
        try:
            request = self._request(given)
            answer = self._server.score(self._form.name, request)
        except hps.HPSError as refused:
            if expected is not None:
                self._refused(size, refused, expected)
                if request is not None and size.samples <= _MERGED:
                    self._together.append(_Request(what, request, expected, answered=False))
            return
        except Exception as error:  # noqa: BLE001 - of the product, whatever it is
            self._verdict.faults.append(f"at {what}: {type(error).__name__}: {error}")
            return
        if expected is not None:
            self._verdict.answered += 1
            if not self._wrong(what, answer, expected) and size.samples <= _MERGED:
                self._together.append(_Request(what, request, expected, answered=True))

    def _refused(self, size: Size, refused: hps.HPSError, expected: list[torch.Tensor]) -> None:
        if isinstance(refused, hps.NetworkError) and not all(bool(torch.isfinite(one).all()) for one in expected):
            return  # what is not a number is refused
        self._verdict.guarded.append(size)
        if self._verdict.outcome == "exact":
            self._verdict.outcome = "guarded"
        if not isinstance(refused, hps.InvalidInputError):
            self._verdict.faults.append(f"at {size}: {type(refused).__name__}: {refused}")
        elif self._form.within is not None and self._form.within(*size):
            self._verdict.faults.append(f"refused at {size}: {refused}")

    def _ask_other(self, number: int, given: Inputs) -> None:
        """Inputs of another structure than the examples'."""
        try:
            answer = self._server.score(self._form.name, self._request(given))
        except hps.InvalidInputError:
            return
        except Exception as error:  # noqa: BLE001 - of the product, whatever it is
            self._verdict.faults.append(f"at other inputs {number}: {type(error).__name__}: {error}")
            return
        self._wrong(f"other inputs {number}", answer, call(self._module, given))

    def _ask_given_once(self, size: Size, place: int) -> None:
        """Inputs that the request gives once."""
        given = self._form.draw(Draw(*size, "any", 1000 + place))
        assert isinstance(given, dict)
        for name in self._form.per_request:
            given[name] = given[name][:1].expand_as(given[name]).contiguous()
        request = self._request(given)
        request |= {name: request[name][:1] for name in self._form.per_request}
        what, expected = f"{tuple(size)} given once", call(self._module, given)
        try:
            answer = self._server.score(self._form.name, request)
        except hps.InvalidInputError as refused:
            if self._form.within is None or self._form.within(*size):
                self._verdict.faults.append(f"refused at {what}: {refused}")
            return
        if not self._wrong(what, answer, expected):
            self._together.append(_Request(what, request, expected, answered=True))

    def _ask_together(self) -> None:
        """Ask all at once: those that the server merges get what they get alone."""
        scores = self._server.model(self._form.name).scores
        assert scores is not None
        answers: dict[int, Any] = {}
        left = threading.Semaphore(0)

        def keep(place: int, answer: Any) -> None:
            answers[place] = answer
            left.release()

        for place, one in enumerate(self._together):
            try:
                read = scores.read(arrays_of(scores.opened.features, one.inputs))
            except hps.InvalidInputError as refused:
                keep(place, refused)
                continue
            scores.submit(ScoreCall(read, lambda answer, times, place=place: keep(place, answer)), 0)  # type: ignore[misc]
        for _ in self._together:
            assert left.acquire(timeout=PATIENCE_S), "a request of many has no answer"
        for place, one in enumerate(self._together):
            if not isinstance(answer := answers[place], Exception):
                self._wrong(f"{one.what} with others", answer, one.expected)
            elif one.answered:
                self._verdict.faults.append(f"WRONG at {one.what} with others: {type(answer).__name__}: {answer}")

    def _request(self, given: Inputs) -> dict[str, Any]:
        given = copy.deepcopy(given)
        return self._done.request(**given) if isinstance(given, dict) else self._done.request(*given)


def _state(module: nn.Module) -> dict[str, Any]:
    """What packaging must leave as it is."""
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        found |= {
            f"{path}.{name}": id(value) for name, value in vars(part).items() if isinstance(value, (nn.Module, torch.Tensor))
        }
        found[f"{path}.names"] = sorted(vars(part))
        found[f"{path}.training"] = part.training
    for name, value in module.state_dict().items():
        if value.device.type != "meta" and not isinstance(value, nn.UninitializedParameter):
            found[name] = (value.dtype, (value.to_dense() if value.is_sparse else value).clone())
    return found


def _check_untouched(verdict: Verdict, form: Form, module: nn.Module, before: dict[str, Any]) -> None:
    after = _state(module)
    for name, value in before.items():
        other = after.get(name)
        same = (
            torch.equal(value[1].nan_to_num(), other[1].nan_to_num()) if isinstance(value, tuple) and other else value == other
        )
        if not same:
            verdict.faults.append(f"packaging changed {name} of the module")

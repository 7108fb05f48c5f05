"""Tests that are coroutine functions, beside something that is open while they run."""

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop


@asynccontextmanager
async def _nothing(place: Path) -> AsyncIterator[tuple[Any, ...]]:
    yield ()


def beside(
    opened: Callable[..., AbstractAsyncContextManager[tuple[Any, ...]]] = _nothing, **options: Any
) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Make a test of a coroutine function: what `opened(tmp_path, **options)` yields are its parameters before the `/`, and
    those behind it are fixtures, or of `parametrize`.
    """

    def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        def run(tmp_path: Path, **given: Any) -> None:
            async def main() -> None:
                async with opened(tmp_path, **options) as parts:
                    await test(*parts, **given)

            uvloop.run(main())

        asked = [
            parameter
            for parameter in inspect.signature(test).parameters.values()
            if parameter.kind is not parameter.POSITIONAL_ONLY
        ]
        place = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = inspect.Signature([place, *asked])  # type: ignore[attr-defined]
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return run

    return decorate

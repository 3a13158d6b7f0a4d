"""Tests that are scripts, played by somebody who sets their scene."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

Script = Callable[..., Awaitable[None]]


def played_by(play: Callable[..., None], **settings: Any) -> Callable[[Script], Callable[..., None]]:
    """For pytest: a test whose first argument is the scene that `play(script, **settings)` hands its script."""

    def decorate(test: Script) -> Callable[..., None]:
        def run(**params: Any) -> None:
            play(lambda scene: test(scene, **params), **settings)

        run.__name__, run.__module__ = test.__name__, test.__module__
        parameters = list(inspect.signature(test).parameters.values())[1:]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate

"""Tests that are scripts, played by somebody who sets their scene."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

Script = Callable[..., Awaitable[None]]


def played_by(play: Callable[..., None], *shared: str, **settings: Any) -> Callable[[Script], Callable[..., None]]:
    """Make a pytest test whose first argument is the scene that `play(script, **settings)` hands its script.
    Parameters of pytest's that are `shared` are settings, too; the test may have them or not.

    Parameters of pytest's that are `shared` are settings, too; the test may have them or not.
    """

    def decorate(test: Script) -> Callable[..., None]:
        parameters = dict(list(inspect.signature(test).parameters.items())[1:])

        def run(**params: Any) -> None:
            own = {name: value for name, value in params.items() if name in parameters}
            play(lambda scene: test(scene, **own), **settings, **{name: params[name] for name in shared})

        run.__name__, run.__module__ = test.__name__, test.__module__
        both = parameters | {name: inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in shared}
        run.__signature__ = inspect.Signature(list(both.values()))  # type: ignore[attr-defined]
        run.pytestmark = list(getattr(test, "pytestmark", ()))  # type: ignore[attr-defined]
        return run

    return decorate

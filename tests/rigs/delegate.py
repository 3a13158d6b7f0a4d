"""What stands before something else, and hands on to it all that it does not do itself."""

from typing import Any


class Delegate:
    """Has every attribute of `inner` that a subclass does not define."""

    def __init__(self, inner: Any):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

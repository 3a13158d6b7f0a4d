"""A wrapper that hands on everything that it does not do itself."""

from collections.abc import Callable
from typing import Any

from twostroke.kvtransfer.link import DataLink, PendingLink


class Delegate:
    """Has every attribute of `inner` that a subclass does not define."""

    def __init__(self, inner: Any):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def with_links(pending: PendingLink, wrap: Callable[[DataLink], DataLink]) -> PendingLink:
    """The same pending link, which brings what `wrap` makes of its link."""
    established = pending.established

    async def wrapped() -> DataLink:
        return wrap(await established())

    pending.established = wrapped  # type: ignore[method-assign]
    return pending

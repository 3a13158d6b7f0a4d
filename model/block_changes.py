"""Which names got into a prefix cache, and which left it, within one window of time. No torch, no I/O.

A name that came and went within the window is not told at all. One that went and came back is told as stored: it lies
in another block now, and whoever reads the cache piece by piece may have passed that one by.
"""

from collections.abc import Callable

from twostroke.protocol.block_hashes import BlockHash
from twostroke.protocol.block_reports import NameChanges

MOST_CHANGES = 65_536
"""Names of one window. Telling more would take longer than to tell all names anew, at leisure."""


class BlockChanges:
    """Records what a block pool tells it; `began` is called with the first change of every window."""

    def __init__(self, began: Callable[[], None], *, most: int = MOST_CHANGES):
        self._began = began
        self._most = most
        self._was_there: dict[BlockHash, bool] = {}  # names that were touched: whether they were there at the beginning
        self._stored: set[BlockHash] = set()  # those of them that are there now, though they came within the window
        self._are_too_many = False

    def published(self, name: BlockHash) -> None:
        """A block has got this name, which no other had."""
        self._touch(name, was_there=False)
        self._stored.add(name)

    def evicted(self, name: BlockHash) -> None:
        """No block has this name any more."""
        self._touch(name, was_there=True)
        self._stored.discard(name)

    def take(self) -> NameChanges | None:
        """End the window, and begin another. None where too much has changed to be told."""
        was_there, stored, are_too_many = self._was_there, self._stored, self._are_too_many
        self._was_there, self._stored, self._are_too_many = {}, set(), False
        if are_too_many:
            return None
        removed = [name for name, was in was_there.items() if was and name not in stored]
        return NameChanges(list(stored), removed)

    def _touch(self, name: BlockHash, *, was_there: bool) -> None:
        if not self._was_there:
            self._began()
        if len(self._was_there) < self._most:
            self._was_there.setdefault(name, was_there)
        elif name not in self._was_there:
            self._are_too_many = True

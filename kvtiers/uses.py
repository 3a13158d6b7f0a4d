"""Counts of the uses of objects. Most prompts never come again, so an object is written when it is used once more,
unless writing is cheap (KVTiers.request_ended).

Pure. Without it every prompt's KV would be written, and traffic without reuse would pay for tiers.
"""

from collections import OrderedDict

MOST_NAMES = 1 << 18
"""Objects whose uses are remembered, at about 150 bytes each: of 256 tokens, 67 million tokens."""


class UseCounts:
    """Uses of the objects that were used last."""

    def __init__(self, most_names: int = MOST_NAMES):
        self._most_names = most_names
        self._uses: OrderedDict[bytes, int] = OrderedDict()  # by the name's first bytes; the oldest first

    def use(self, name: bytes) -> int:
        """Count a use of an object; return its uses so far, this one included."""
        key = name[:8]
        uses = self._uses.pop(key, 0) + 1
        self._uses[key] = uses
        if len(self._uses) > self._most_names:
            self._uses.popitem(last=False)
        return uses

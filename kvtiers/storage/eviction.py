"""S3-FIFO: which blob to drop first. Pure; every operation takes constant time, amortised over the insertions.

The source is "FIFO queues are all you need for cache eviction" (Yang et al., SOSP 2023). There are two queues of
blobs, and one of names:

- `small` takes what is new. Blobs that nobody asks for again leave it soon, so a scan costs a tenth of the room.
- `main` takes what was used more than once while it was in `small`, and what comes back. A blob at its end that was
  used goes back to its beginning.
- `ghosts` are the names of what left `small` unused, as many as their bytes would fit into `main`.

The paper counts blobs; this counts bytes, because objects of several models differ in size.
"""

from collections import OrderedDict

SMALL_SHARE = 0.1
"""Share of the room for what is new: the paper's."""
MAX_USES = 3
"""Uses that count: the paper's two bits."""
MIN_USES = 2
"""Uses in `small` that take a blob to `main`: the paper's."""


class S3Fifo:
    """An order in which blobs leave. It limits nothing: its user asks for victims while there is too little room."""

    def __init__(self, max_bytes: int):
        """`max_bytes`: the room, of which the queues have their shares."""
        self._small_bytes = int(max_bytes * SMALL_SHARE)
        self._ghost_bytes = max_bytes - self._small_bytes
        self._small: OrderedDict[str, int] = OrderedDict()  # bytes by key, the oldest first
        self._main: OrderedDict[str, int] = OrderedDict()
        self._ghosts: OrderedDict[str, int] = OrderedDict()
        self._uses: dict[str, int] = {}  # of blobs in `small` and `main`, where there are any
        self._in_small = 0  # bytes
        self._in_main = 0
        self._in_ghosts = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all blobs."""
        return self._in_small + self._in_main

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, key: str) -> bool:
        return key in self._small or key in self._main

    def keys(self) -> set[str]:
        """Return the keys of all blobs."""
        return self._small.keys() | self._main.keys()

    def bytes_of(self, key: str) -> int | None:
        """Return the blob's bytes, or None where it is not there."""
        return self._small.get(key, self._main.get(key))

    def insert(self, key: str, num_bytes: int, *, is_proven: bool = False) -> None:
        """Add a blob, or give it another size. `is_proven`: it goes to `main`, as one that has outlived others."""
        if self.bytes_of(key) is not None:
            self._resize(key, num_bytes)
            return
        ghost = self._ghosts.pop(key, None)
        if ghost is not None:
            self._in_ghosts -= ghost
        if is_proven or ghost is not None:
            self._main[key] = num_bytes
            self._in_main += num_bytes
        else:
            self._small[key] = num_bytes
            self._in_small += num_bytes

    def use(self, key: str) -> None:
        """Note that a blob was used. Harmless where it is not there."""
        if key in self:
            self._uses[key] = min(MAX_USES, self._uses.get(key, 0) + 1)

    def remove(self, key: str) -> None:
        """Forget a blob that is deleted. Harmless where it is not there."""
        self._uses.pop(key, None)
        self._in_small -= self._small.pop(key, 0)
        self._in_main -= self._main.pop(key, 0)

    def evict(self) -> tuple[str, int] | None:
        """Return the key and the bytes of the blob that leaves next, which is forgotten; None where there is none."""
        while self._small or self._main:
            if self._small and (self._in_small > self._small_bytes or not self._main):
                key, num_bytes = self._small.popitem(last=False)
                self._in_small -= num_bytes
                if self._uses.pop(key, 0) < MIN_USES:
                    self._remember(key, num_bytes)
                    return key, num_bytes
                self._main[key] = num_bytes
                self._in_main += num_bytes
            else:
                key, num_bytes = self._main.popitem(last=False)
                uses = self._uses.pop(key, 0)
                if not uses:
                    self._in_main -= num_bytes
                    return key, num_bytes
                self._main[key] = num_bytes
                if uses > 1:
                    self._uses[key] = uses - 1
        return None

    def _remember(self, key: str, num_bytes: int) -> None:
        self._ghosts[key] = num_bytes
        self._in_ghosts += num_bytes
        while self._in_ghosts > self._ghost_bytes:
            self._in_ghosts -= self._ghosts.popitem(last=False)[1]

    def _resize(self, key: str, num_bytes: int) -> None:
        if key in self._small:
            self._in_small += num_bytes - self._small[key]
            self._small[key] = num_bytes
        else:
            self._in_main += num_bytes - self._main[key]
            self._main[key] = num_bytes

"""Which units of a prompt may be sent next. Pure: no I/O, no clock."""

from collections import deque

from twostroke.protocol.messages import Run


class ChunkPlan:
    """Every unit of every layer exactly once, but for the skipped ones, and none before it is full.

    Nothing is cut into runs before it is asked for: what becomes ready while the link is busy, or the grant is late,
    goes in as few chunks as their size allows, several layers in one.
    """

    def __init__(self, *, num_layers: int, num_tokens: int, num_ready_tokens: int):
        self._num_tokens = num_tokens
        self._ready = [num_ready_tokens] * num_layers  # tokens, from the first on
        self._num_unready = 0 if num_ready_tokens == num_tokens else num_layers  # layers
        self._unit_tokens = 0  # until `begin`
        self._num_units = 0
        self._taken = [0] * num_layers  # units, from the first on
        self._num_untaken = num_layers  # layers
        self._waiting: deque[int] = deque()  # layers with full units, in the order in which they became full

    def begin(self, unit_tokens: int, skip_tokens: int) -> None:
        """Units have this size, and the peer has those of the first `skip_tokens`. Once, before the first run.

        Raises ValueError for more tokens than there are, and for part of a unit.
        """
        if not 0 <= skip_tokens <= self._num_tokens:
            raise ValueError(f"{skip_tokens} tokens are skipped of {self._num_tokens}")
        if skip_tokens % unit_tokens and skip_tokens != self._num_tokens:
            raise ValueError(f"{skip_tokens} skipped tokens end within a unit of {unit_tokens}")
        self._unit_tokens = unit_tokens
        self._num_units = -(-self._num_tokens // unit_tokens)
        skipped = self._full_units(skip_tokens)
        self._taken = [skipped] * len(self._taken)
        self._num_untaken = len(self._taken) if skipped < self._num_units else 0
        self._waiting.extend(layer for layer, ready in enumerate(self._ready) if self._full_units(ready) > skipped)

    def add_ready(self, layer: int, num_tokens: int) -> None:
        """The first `num_tokens` tokens of `layer` are in the blocks. Raises ValueError for more than there are."""
        if not 0 <= num_tokens <= self._num_tokens:
            raise ValueError(f"{num_tokens} tokens are ready of {self._num_tokens}")
        before, taken = self._ready[layer], self._taken[layer]
        if num_tokens <= before:
            return
        self._ready[layer] = num_tokens
        self._num_unready -= num_tokens == self._num_tokens
        if self._unit_tokens and self._full_units(before) <= taken < self._full_units(num_tokens):
            self._waiting.append(layer)

    def next_runs(self, max_units: int) -> tuple[Run, ...]:
        """Takes the runs of the next chunk, of `max_units` units at most; none where no unit is full now."""
        runs: list[Run] = []
        while self._waiting and max_units:
            layer = self._waiting[0]
            first, full = self._taken[layer], self._full_units(self._ready[layer])
            count = min(full - first, max_units)
            runs.append(Run(layer, first, count))
            max_units -= count
            self._taken[layer] = first + count
            self._num_untaken -= first + count == self._num_units
            if first + count == full:
                self._waiting.popleft()
        return tuple(runs)

    @property
    def has_runs(self) -> bool:
        """A unit is full and not taken."""
        return bool(self._waiting)

    @property
    def all_ready(self) -> bool:
        """Every token of every layer is in its block."""
        return self._num_unready == 0

    @property
    def all_taken(self) -> bool:
        """Every unit of every layer was taken or skipped."""
        return self._num_untaken == 0

    def _full_units(self, num_tokens: int) -> int:
        return self._num_units if num_tokens == self._num_tokens else num_tokens // self._unit_tokens

"""The time that rows of drafts add to steps, measured beside what the worker's step costs say. Pure.

Step costs are linear in rows, which serves schedulers well. Kernels are not: one row may be a product of a matrix and a
vector, and two a product of matrices that takes as long as eight. So steps with drafts are compared with what the same
step would take without, by how many rows decode and how many are drafts, each up to the next power of two.
"""

WEIGHT = 0.2
"""Weight of a new step beside all earlier ones of its kind."""
FORGET = 0.998
"""Share of a correction that is left after one more decision: one slow step must not end all drafts for good."""
_LEAST, _MOST = 0.1, 30.0  # of a correction


class DraftRowCosts:
    """Corrections to the seconds that drafts add to a step, of one worker."""

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}  # by requests that decode: measured over expected, without drafts
        self._corrections: dict[tuple[int, int], float] = {}  # by these and by rows of drafts

    def note(self, num_decodes: int, num_drafted: int, seconds: float, plain_s: float, drafted_s: float) -> None:
        """Learn from a step of decodes and drafts alone.

        By the step costs it takes `plain_s` without drafts, and `drafted_s` more with them.
        """
        kind = num_decodes.bit_length()
        if plain_s <= 0:
            return
        if not num_drafted:
            self._plain[kind] = _moved(self._plain.get(kind), seconds / plain_s)
        elif drafted_s > 0 and kind in self._plain:
            added_s = seconds - self._plain[kind] * plain_s
            place = kind, num_drafted.bit_length()
            correction = min(_MOST, max(_LEAST, added_s / drafted_s))
            self._corrections[place] = _moved(self._corrections.get(place), correction)

    def correction(self, num_decodes: int, num_drafted: int) -> float:
        """Return the factor to the seconds that drafts add by the step costs; 1 where it is not known."""
        return self._corrections.get((num_decodes.bit_length(), num_drafted.bit_length()), 1.0)

    def forget(self) -> None:
        """Let corrections fade a little."""
        for place, correction in self._corrections.items():
            self._corrections[place] = 1.0 + FORGET * (correction - 1.0)


def _moved(before: float | None, new: float) -> float:
    return new if before is None else (1.0 - WEIGHT) * before + WEIGHT * new

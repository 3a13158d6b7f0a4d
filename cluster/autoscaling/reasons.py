"""Why a role has the number of workers that it was given: a closed set, for logs, metrics and `twostroke status`."""

from enum import StrEnum


class Reason(StrEnum):
    """One for each role and decision."""

    # More workers
    DEMAND = "demand"  # what arrives, and what of late arrived, needs more
    BACKLOG = "backlog"  # what waits would not be worked off in time
    BELOW_MIN = "below_min"  # fewer than the configuration allows
    COSTS_UNKNOWN = "costs_unknown"  # requests wait, and nobody knows yet how long steps take: one more
    TAKEN = "taken"  # the budget is used up, and the other role could spare one

    # Fewer
    SPARE = "spare"  # the last `cooldown_s` would have been served by fewer
    IDLE = "idle"  # nothing came for `cooldown_s`
    GIVEN = "given"  # the budget is used up, and the other role needs it more
    ABOVE_MAX = "above_max"  # more than the configuration or the budget allows

    # As many
    STEADY = "steady"  # as many as are needed
    COOLDOWN = "cooldown"  # fewer would do, but the last change was less than `cooldown_s` ago
    REVERSALS = "reversals"  # fewer would do, but this role has gone down and up too often in the last hour
    PENDING = "pending"  # fewer would do, but the last change is still under way
    LIMIT = "limit"  # more are needed than `max` allows
    BUDGET = "budget"  # more are needed than the budget allows
    BETWEEN = "between"  # the next decision is not due yet

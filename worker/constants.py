"""The constants that decide in this room, in one table. Values that an operator may want to change are settings.

The constants of the fit of step costs stand with their explanation in step_costs.py.
"""

# --- Queue order and class shares ---

MIN_SHARE = 0.02
"""Least share of a class, so that it progresses."""
MAX_SHARE = 0.9
"""Largest share of a class."""
UNPROMISED_S = 60.0
"""Deadline of requests without a TTFT promise: after all others, and yet finite."""
PROMPT_TOKENS_PER_S = 512.0
"""Prompt tokens that count as a second of later arrival with `sjf`."""
ANSWER_TOKENS_PER_S = 16.0
"""Answer tokens that count as a second of later arrival with `sjf`: each takes a step."""
MAX_OVERTAKING_S = 60.0
"""Longest later arrival by which a shorter request still overtakes with `sjf`."""
MIN_CLASS_CHUNK = 64
"""Tokens of the smallest chunk that a class gets before higher ones, unless a smaller one ends a prompt."""

# --- Predicted lengths of answers ---

FIRST_ANSWER_TOKENS = 100.0
"""Expected tokens of an answer before any answer has ended."""
ANSWER_MEAN_WEIGHT = 0.05
"""Weight of an answer that has ended in a mean of many."""

# --- Steps ---

CHUNK_MULTIPLE = 16
"""Rows that kernels compute together: chunks of prompts are multiples of it where time is short."""
MAX_BROKEN_REQUESTS = 16
"""Requests in a row without sound logits after which the model counts as broken. One request alone may cause its own
broken logits, by a prompt whose activations overflow."""
AHEAD_S = 0.003
"""Seconds before the expected end of a step with prompts at which the next one is scheduled behind it.

This is enough for the event loop and for the launch of a GPU's first kernels. Requests that arrive later are not in the
next step."""
WATCH_S = 0.25
"""Seconds between two looks at the step under way. A look that comes later by more than this shows that the process
stood still."""

# --- Reports ---

UTILIZATION_WINDOW_S = 10.0
"""Length of the window over which utilisation is averaged."""
UTILIZATION_MARK_S = 1.0
"""Resolution of that window."""

# --- Experts ---

EXPERT_MEMORY_S = 60.0
"""Seconds after which a choice counts 1/e."""
EXPERT_EXAMINE_S = 10.0
"""Seconds between examinations of all layers."""
MIN_CHOICES = 4.0
"""Recent choices of each expert, in the mean, that are needed for a decision."""
MIN_GAIN = 0.1
"""Part of the mean load by which the busiest rank's load must fall for copies to change.

The next counts may differ, and weights that move make steps longer. No expert is copied from a rank that is this near
to the mean."""

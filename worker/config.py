"""Settings of workers of both roles, and of speculative decoding; each role's own config adds to them.

A file of its own, so that loading a configuration imports neither an engine nor the step loop.
"""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt
from pydantic import Field, NonNegativeFloat, model_validator

from twostroke.protocol.settings import Count, Interval, Section, TokenCount
from twostroke.worker.token_server import TokenServerConfig

SpeculationMethod = Literal["auto", "off", "suffix", "ngram", "mtp"]


class SpeculationConfig(Section):
    """Source and bounds of drafted tokens. A string in its place is the method alone."""

    method: SpeculationMethod = "auto"
    """Source of drafts: the request's own prompt and answer (`ngram`), these and earlier answers to the same tenant
    (`suffix`), these and the checkpoint's own MTP head (`mtp`, for both roles alike), or none (`off`). auto: `suffix`
    wherever the model's layers allow it. Drafts never change an answer: each token is drawn as without them."""
    num_speculative_tokens: Annotated[int, Ge(1), Le(64)] = 12
    """Drafted tokens of one request in one step, at most. How many a step has follows from the worker's step costs and
    from how often drafts were right."""
    corpus_tokens: Annotated[int, Ge(0), Le(1 << 24)] = 1 << 18
    """Tokens of earlier answers that the worker keeps for drafts, over all tenants; each takes about 120 bytes. Tenants
    with different cache salts never share them."""

    @model_validator(mode="before")
    @classmethod
    def _from_method(cls, value: Any) -> Any:
        if value is False:  # YAML reads `off` as false
            return {"method": "off"}
        return {"method": value} if isinstance(value, str) else value

    @property
    def is_on(self) -> bool:
        """True where drafts may be made."""
        return self.method != "off"

    @property
    def uses_answers(self) -> bool:
        """True where earlier answers are a source of drafts."""
        return self.method in ("auto", "suffix", "mtp") and self.corpus_tokens > 0

    @property
    def uses_mtp(self) -> bool:
        """True where the model's MTP head is a source of drafts."""
        return self.method == "mtp"


QueuePolicy = Literal["edf", "sjf", "fcfs"]
PreemptionMode = Literal["recompute", "swap", "auto"]


class WorkerConfig(Section):
    """Bounds of one step, and the worker's housekeeping."""

    max_step_tokens: TokenCount
    """Tokens of one step."""
    max_batch: Count
    """Requests in one step."""
    tpot_safety: Annotated[float, Ge(0.01), Le(1)] = 0.9
    """Share of the promised time per token that a step is planned to take at most. Less where streams miss their
    promise, more to fill batches further."""
    max_stall_s: Interval | None = None
    """Longest step, in seconds, with prompts beside streams without a TPOT promise. Lower it for smoother streams,
    raise it to compute prompts sooner. null, where `stall_factor` is null too: the time of a step with 384 prompt
    tokens on decode workers and 2048 on prefill workers by the worker's own step costs, within 0.05 s (which GPUs keep
    to) and 0.25 s or 0.5 s (on CPUs), and never less than 1.75 times the step's time without prompts."""
    stall_factor: Annotated[float, Ge(1)] | None = None
    """`max_stall_s` as a multiple of the step's time without prompts. Where both are set, the tighter one counts; null:
    only `max_stall_s` does."""
    min_chunk_tokens: Count = 8
    """Prompt tokens that a step computes beside streams however long it takes, so that prompts always progress."""
    watermark: Annotated[float, Ge(0), Lt(1)] = 0.01
    """Share of the blocks that is left free on admission, for running streams to grow into. Raise it where requests
    are preempted often."""
    run_ahead: bool = True
    """Schedule a step while the one before it runs (behind prompts, shortly before their step's expected end), so that
    the engine never waits for the event loop. Without it, requests that have just arrived join one step sooner."""
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    """Tokens that are guessed and drawn several in one step. A method's name in its place sets that alone; `off` turns
    it off. Answers are the same either way."""
    router_wait_s: Interval = 30.0
    """Seconds after a failed KV transfer in which its router decides about the request; without a decision the worker
    computes the prompt then. For a transfer that has not begun it waits as long as the router lives."""
    max_waiting: Count = 1024
    """Requests that wait for their first step; a worker refuses further ones with status 429."""
    queue: QueuePolicy = "edf"
    """Order of requests of one priority: the one with the least time left first (`edf`), the shortest by its prompt
    and, on decode workers, its predicted answer (`sjf`), or the first that arrived (`fcfs`); see
    docs/design/routing.md#queues-on-the-workers. `sjf` shortens the mean wait where KV memory is short
    and answers differ by SLO class or by the prompt's length."""
    pull_wait_s: Interval = 0.5
    """Seconds that a prompt whose prefix is pulled waits for the other worker's offer; then it is computed here."""
    min_pull_tokens: Count = 64
    """An offer that would spare fewer tokens is declined: more may be cached here than the router knew. The router
    requests no pulls that spare less than `router.pull_min_tokens`. Raise it where the wire is slow and the worker is
    fast."""
    max_step_s: Interval = 60.0
    """Seconds after which any step is hung: the worker ends its requests, which go on elsewhere, and is replaced. It
    is the bound of steps whose shape is new, since their kernels may still be compiled. Raise it for huge steps on slow
    machines."""
    hang_factor: Annotated[float, Ge(2)] = 10.0
    """A step of a known shape is hung after this multiple of the time that the worker expects of it by earlier steps,
    within `min_hang_s` and `max_step_s`."""
    min_hang_s: Interval = 5.0
    """Seconds that every step may take before it is hung. Lower it for shorter gaps where an engine hangs, raise it
    where other programs hold up the machine for seconds."""
    integrity_interval_s: NonNegativeFloat = 10.0
    """Seconds between checks of an idle worker's block accounting, at least."""
    token_channel: TokenServerConfig = Field(default_factory=TokenServerConfig)

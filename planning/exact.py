"""A load test's plan, served event by event, as the records that the load test would have left."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from twostroke.loadtests.plan import Chat, Closed, Plan, Session
from twostroke.loadtests.run_folder import Record
from twostroke.loadtests.workloads.prompts import token_ids
from twostroke.loadtests.workloads.sessions import TEMPLATE_TOKENS, sessions
from twostroke.planning.layouts import Layout, router_settings
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.requests import Promise
from twostroke.router.slo.classes import SLOConfig
from twostroke.simulator.deployment import TracedRequest, Users, WorkerCrash, serve
from twostroke.simulator.sim_fleet import PROMISE_NOTHING
from twostroke.worker.config import QueuePolicy

VOCABULARY = 32_000


@contextmanager
def unheard() -> Iterator[None]:
    """Silence the logs of simulated routers and workers."""
    logger = logging.getLogger("twostroke")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def simulate_plan(
    plan: Plan,
    layout: Layout,
    *,
    slo: SLOConfig = PROMISE_NOTHING,
    most: int | None = None,
    faults: Sequence[WorkerCrash] = (),
    progress: Callable[[int], None] | None = None,
    warm: int = 0,
    queue: QueuePolicy = "edf",
) -> list[Record]:
    """Return a record of each request, in the order of arrival. `most` bounds the sessions; the rest is as in `serve`.

    Raises ConfigError where none comes.
    """
    one = slo.default_class
    promise = Promise(one.name, one.priority, one.share, one.ttft_s, one.tpot_s)
    arrivals, users = plan.arrivals, None
    if isinstance(arrivals, Closed):
        users = Users(arrivals.users, arrivals.think_s, plan.seconds)
    with unheard():
        run = serve(
            _traced(plan, islice(sessions(plan), most), promise),
            "kv_aware",
            layout.decode,
            users=users,
            **router_settings(layout.mode),
            prefill_profile=layout.prefill,
            prefill=layout.num_prefill,
            decode=layout.num_decode,
            prefill_cache_tokens=(layout.prefill or layout.decode).kv_tokens,
            decode_cache_tokens=layout.decode.kv_tokens,
            seed=plan.seed,
            slo=slo,
            faults=faults,
            progress=progress,
            max_context=plan.max_context,
            until_s=plan.seconds,
            warm=warm,
            queue=queue,
        )
    if not run.served:
        raise ConfigError("no request comes in that time")
    return [
        record_of(
            number,
            one.at_s,
            one.num_prompt_tokens,
            one.num_output_tokens,
            None if one.refused else one.token_s,
            one.num_cached_tokens,
        )
        for number, one in enumerate(run.served)
    ]


def _traced(plan: Plan, sessions: Iterator[Session], promise: Promise) -> Iterator[TracedRequest]:
    """Yield requests in which a chat template's own text counts as ordinary tokens."""
    around = TEMPLATE_TOKENS if isinstance(plan.workload, Chat) else 0
    for session in sessions:
        turns = [
            TracedRequest(
                turn.think_s,
                (*token_ids(turn.prompt, VOCABULARY), *range(around)),
                turn.output_tokens,
                promise,
            )
            for turn in session.turns
        ]
        first = turns[0]
        yield TracedRequest(session.at_s, first.token_ids, first.num_output_tokens, promise, tuple(turns[1:]))


def record_of(
    number: int,
    at_s: float,
    prompt_tokens: int,
    output_tokens: int,
    token_s: tuple[float, ...] | None,
    cached_tokens: int | None = None,
) -> Record:
    """`token_s`: when its tokens were there; None: it was refused."""
    is_refused = token_s is None
    return Record(
        session=number,
        turn=0,
        scheduled_s=at_s,
        sent_s=at_s,
        end_s=token_s[-1] if token_s else at_s,
        status="refused" if is_refused else "ok",
        http_status=429 if is_refused else 200,
        error="overloaded" if is_refused else None,
        planned_input_tokens=prompt_tokens,
        planned_output_tokens=output_tokens,
        input_tokens=None if is_refused else prompt_tokens,
        output_tokens=None if is_refused else output_tokens,
        cached_tokens=None if is_refused else cached_tokens,
        token_s=token_s or (),
    )

"""The three ways to spend the same machine on one model, as servers of this machine, and what each of them costs.

aggregated     decode workers alone, which read the prompts, too
disaggregated  prefill workers read, decode workers write
hybrid         the same, and a decode worker reads a prompt itself where that is predicted to be quicker

A way's costs are learnt on its own server, by requests whose steps are known: prompts and streams by themselves, then,
where there are both roles, prompts while streams run. So they hold what a bench of one engine leaves out: workers that
share cores and memory, a router beside them, HTTP and calls.
"""

import asyncio
import contextlib
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from twostroke.benchmarks.clients import completion_body, random_prompt, record_of, stream_completion
from twostroke.cluster.local.asking import ask, fetch_status
from twostroke.cluster.local.server_process import ServerProcess, twostroke_server
from twostroke.loadtests.run_folder import Record
from twostroke.planning.neighbours import Neighbours, share
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.stats import StepCosts
from twostroke.worker.profile import WorkerProfile
from twostroke.worker.step_costs import PAIR_SHARE, Array, StepContent

Mode = Literal["aggregated", "disaggregated", "hybrid"]
MODES: tuple[Mode, ...] = get_args(Mode)
READY_S = 120.0  # from the first word of a server until its workers take requests
POLL_S = 0.25

PROMPTS = (32, 128, 400)  # tokens
ROUNDS = 3  # of each prompt
STREAMS = ((1, 32), (6, 32), (3, 400))  # how many at a time, and tokens of their prompts
STREAMED = 24  # tokens of each
FEW, MANY = 32, 600  # tokens of a stream beside prompts
CALL_S = 0.004  # to a worker and back, where the server doesn't tell a prompt's own time
TIE = 0.05


@dataclass(frozen=True)
class Counts:
    """Workers of a mode."""

    prefill: int
    decode: int


class Fleet(msgspec.Struct, frozen=True):
    """A mode's workers, and what they are like."""

    mode: Mode
    counts: Counts
    profile: WorkerProfile


def counts_of(mode: Mode, prefill: int, decode: int, aggregated: int) -> Counts:
    """`aggregated`: how many workers take the place of the others."""
    return Counts(0, aggregated) if mode == "aggregated" else Counts(prefill, decode)


@contextlib.contextmanager
def server_in(mode: Mode, counts: Counts, settings: Mapping[str, Any], port: int | None = None) -> Iterator[str]:
    """A server's URL, once its workers take requests; it has ended when the context has.

    `settings` are those of a configuration file. Raises ServerFailed.
    """
    said = {
        **settings,
        "prefill": {**(settings.get("prefill") or {}), "replicas": counts.prefill},
        "decode": {**(settings.get("decode") or {}), "replicas": counts.decode},
        "router": {**(settings.get("router") or {}), "decodes_alone": mode != "disaggregated"},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "serving.yaml"
        path.write_text(json.dumps(said))  # which is YAML, too
        with twostroke_server(["--config", str(path)], port=port) as server:
            _await_ready(server)
            yield server.url


def _await_ready(server: ServerProcess) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            with ask(server.url, "ready", timeout_s=2.0):
                return
        except (OSError, HTTPException) as error:
            if time.monotonic() > deadline:
                raise ConfigError(f"the server's workers are not ready after {READY_S:g} s: {error}") from error
            time.sleep(POLL_S)


# --- what requests of known steps tell ---


@dataclass(frozen=True)
class Timed:
    """A step of known content, or, where the server tells no more, a prompt's whole way through it."""

    content: StepContent
    seconds: float


def fit(timed: Sequence[Timed]) -> tuple[StepCosts, float]:
    """The costs, and what any prompt takes beyond them: least squares of the relative error, none below 0.

    Of steps alike the mean counts: errors relative to each alone would believe the quick ones. A few kinds of steps say
    little of pairs and of context: these are tied to what a token and the constant cost, as on most machines
    (worker/step_costs.py), with less force than steps that tell them apart. What comes out negative is taken for 0, and
    the others are fitted again. Raises ValueError for too few steps.
    """
    alike: dict[StepContent, list[float]] = defaultdict(list)
    for one in timed:
        alike[one.content].append(one.seconds)
    rows = np.array([[float(content.prompt_tokens > 0), 1.0, *content] for content in alike])
    seconds = np.array([statistics.fmean(values) for values in alike.values()])
    if len(rows) < 4:
        raise ValueError(f"{len(rows)} measured steps are too few to learn costs from")
    steps = np.vstack([rows / seconds[:, None], _ties(rows, seconds)])
    wanted = np.concatenate([np.ones(len(rows)), np.zeros(len(steps) - len(rows))])
    found, scale = np.zeros(rows.shape[1]), np.abs(steps).max(axis=0)
    free = [index for index, value in enumerate(scale) if value > 0]
    while free:
        solution = np.linalg.lstsq(steps[:, free] / scale[free], wanted, rcond=None)[0] / scale[free]
        if (solution >= 0).all():
            found[free] = solution
            break
        del free[int(np.argmin(solution * scale[free]))]
    prompt_s, base_s, token_s, pair_s, row_s, context_s = found.tolist()
    return StepCosts(base_s, token_s, pair_s, row_s, context_s, len(rows)), prompt_s


def _ties(rows: Array, seconds: Array) -> Array:
    """Rows that are 0 where a pair costs PAIR_SHARE of a token, and a token of context as much of the constant.

    One that is ten times as dear counts as much as a step that is TIE off.
    """
    ties: list[Array] = []
    for tied, to, of in ((3, 2, 2), (5, 1, 4)):  # and the feature that steps which tell of it have
        has_some = rows[:, of] > 0
        if has_some.any():
            tie = np.zeros(rows.shape[1])
            usual_s = float(np.median(seconds[has_some] / (rows[has_some, of] if of == to else 1.0)))
            tie[tied], tie[to] = TIE / 10 / (PAIR_SHARE * usual_s), -TIE / 10 / usual_s
            ties.append(tie)
    return np.array(ties).reshape(len(ties), rows.shape[1])


class Learner:
    """Asks one server."""

    def __init__(self, url: str, model: str, seed: int):
        self._url = url
        self._model = model
        self._draw = random.Random(seed)
        self.http_s: list[float] = []
        self.admit_s: list[float] = []
        self.call_s: list[float] = []  # where the server tells a prompt's own time, all else of its way

    async def ask(self, prompt_tokens: int, output_tokens: int) -> Record:
        """Raises ConfigError where the answer is not whole."""
        prompt = random_prompt(self._draw, prompt_tokens)
        body = {**completion_body(self._model, prompt, output_tokens), "return_stages": True}
        record = record_of(await stream_completion(self._url, body), body, 0.0)
        if record.status != "ok":
            raise ConfigError(f"a request of {prompt_tokens} tokens failed while costs were learnt: {record.error}")
        return record

    async def prompt(self, tokens: int) -> Timed:
        """One that is read, its queues left out."""
        record = await self.ask(tokens, 1)
        stages, ttft_s = record.stages or {}, record.ttft_s or 0.0
        server_s = min(ttft_s, stages.get("ttft_s", ttft_s))
        self.http_s.append(ttft_s - server_s)
        self.admit_s.append(stages.get("admit_s", 0.0))
        content = StepContent(tokens, tokens * tokens / 2, 0, 0)
        left_s = server_s - stages.get("admit_s", 0.0)
        if "prefill_s" not in stages:
            return Timed(content, max(left_s - stages.get("decode_queue_s", 0.0), 1e-6))
        self.call_s.append(max(0.0, left_s - stages.get("prefill_queue_s", 0.0) - stages["prefill_s"]))
        return Timed(content, max(stages["prefill_s"], 1e-6))

    async def streams(self, count: int, prompt_tokens: int, output_tokens: int) -> list[Record]:
        """So many at once."""
        return list(await asyncio.gather(*(self.ask(prompt_tokens, output_tokens) for _ in range(count))))


def steps_of(records: Sequence[Record], begin_s: float = -math.inf, end_s: float = math.inf) -> Timed | None:
    """The mean step in which all of these streams wrote, within those moments; None where there are too few."""
    begin_s = max(begin_s, *(one.token_s[0] for one in records))
    end_s = min(end_s, *(one.token_s[-1] for one in records))
    gaps = [
        (after - before, number)
        for one in records
        for number, (before, after) in enumerate(zip(one.token_s, one.token_s[1:], strict=False))
        if begin_s < before and after <= end_s
    ]
    if len(gaps) < 2:
        return None
    written = statistics.fmean(number for _, number in gaps) + 2
    context = sum((one.input_tokens or 0) + written for one in records)
    return Timed(StepContent(0, 0.0, len(records), round(context)), statistics.fmean(gap for gap, _ in gaps))


async def _alone(learner: Learner, longest: int) -> list[Timed]:
    timed = [await learner.prompt(min(tokens, longest)) for _ in range(ROUNDS) for tokens in PROMPTS]
    for count, tokens in STREAMS:
        step = steps_of(await learner.streams(count, min(tokens, longest), STREAMED))
        timed += [] if step is None else [step] * ROUNDS
    return timed


async def _beside(learner: Learner, longest: int, alone: StepCosts) -> list[Timed]:
    """Prompts, of which one always waits, while streams run."""
    timed: list[Timed] = []
    asked = [min(tokens, longest) for _ in range(ROUNDS) for tokens in PROMPTS]
    prompts_s = sum(alone.prefill_s(tokens, 0, 1 << 20) for tokens in asked)
    for count, tokens in STREAMS[:2]:
        answer = math.ceil(2.0 * prompts_s / max(1e-4, alone.base_s + count * alone.row_s))
        streaming = asyncio.create_task(learner.streams(count, tokens, min(max(answer, FEW), MANY, 2 * longest)))
        before = len(timed)
        await learner.prompt(tokens)  # behind those of the streams
        began, left = time.perf_counter(), iter(asked)

        await asyncio.gather(*(_read_all(learner, left, timed) for _ in range(2)))
        ended = time.perf_counter()
        records = await streaming
        if min(one.token_s[-1] for one in records) < ended:  # the last prompts had nobody beside them
            del timed[before + len(asked) // 2 :]
        step = steps_of(records, began, ended)
        timed += [] if step is None else [step] * ROUNDS
    return timed


def beside_of(alone: StepCosts, prompt_s: float, timed: Sequence[Timed]) -> StepCosts:
    """The costs of steps beside others: as those alone, but prompts and decode steps each slower by one factor."""

    def factor(is_prompt: bool) -> float:
        ratios = [
            one.seconds / (one.content.expected_s(alone) + (prompt_s if is_prompt else 0.0))
            for one in timed
            if (one.content.prompt_tokens > 0) == is_prompt
        ]
        return statistics.fmean(ratios) if ratios else 1.0

    return slowed(alone, factor(True), factor(False))


async def _read_all(learner: Learner, left: Iterator[int], timed: list[Timed]) -> None:
    for tokens in left:
        timed.append(await learner.prompt(tokens))


def learn_kind(url: str, mode: Mode, *, seed: int) -> WorkerProfile:
    """What the workers of the server at `url` cost. Raises ConfigError where it doesn't answer."""
    status = fetch_status(url)
    workers = status["workers"]
    longest = min(worker["max_context"] for worker in workers) // 4
    learner = Learner(url, status["model"], seed)

    async def learn() -> tuple[list[Timed], list[Timed]]:
        await learner.streams(2, 16, 8)  # the first of anything is slow
        for tokens in PROMPTS:
            await learner.prompt(min(tokens, longest))
        learner.http_s.clear()
        learner.admit_s.clear()
        learner.call_s.clear()
        alone = await _alone(learner, longest)
        http_s, admit_s, call_s = list(learner.http_s), list(learner.admit_s), list(learner.call_s)
        beside = [] if mode == "aggregated" else await _beside(learner, longest, fit(alone)[0])
        learner.http_s, learner.admit_s, learner.call_s = http_s, admit_s, call_s
        return alone, beside

    with Neighbours() as neighbours:
        alone, beside = asyncio.run(learn())
    costs, prompt_s = fit(alone)
    one, after = workers[0], fetch_status(url)["workers"]
    sent_tokens = sum(worker["stats"]["computed_tokens"] for worker in after if worker["role"] == "prefill")
    sent_bytes = sum(worker["stats"]["transfer_bytes"] for worker in after if worker["role"] == "prefill")
    return WorkerProfile(
        name=f"{status['model']}-{mode}",
        costs=costs,
        kv_bytes=sent_bytes / sent_tokens if sent_tokens and sent_bytes else 1.0,
        kv_tokens=min(worker["num_blocks"] * worker["block_size"] for worker in workers),
        link_bytes_per_s=1e9,
        step_tokens=2048,
        max_batch=256,
        source=f"requests of known steps to a server of {len(workers)} workers, {one['kv_dtype']}",
        num_layers=12,
        beside=beside_of(costs, prompt_s, beside) if beside else None,
        http_s=statistics.median(learner.http_s),
        admit_s=statistics.median(learner.admit_s),
        prompt_s=prompt_s,
        call_s=statistics.fmean(learner.call_s) if learner.call_s else CALL_S,
        others=neighbours.others,
        threads=max(1, len(os.sched_getaffinity(0)) // len(workers)),
    )


def slowed(costs: StepCosts, prompts: float, steps: float) -> StepCosts:
    """Prompts' tokens take `prompts` times as long, all else of a step `steps` times."""
    return msgspec.structs.replace(
        costs,
        base_s=costs.base_s * steps,
        token_s=costs.token_s * prompts,
        pair_s=costs.pair_s * prompts,
        row_s=costs.row_s * steps,
        context_s=costs.context_s * steps,
    )


def beside_others(profile: WorkerProfile, others: float, cores: int) -> WorkerProfile:
    """The same workers, while so many threads of other programs want the machine's `cores`.

    All takes as much longer, or shorter, as the share of a core is smaller, or larger, that a thread gets: with one
    worker's threads running `costs` and what is no step, with two workers' `beside`.
    """

    def pace(running: int) -> float:
        return share(running, profile.others, cores) / share(running, others, cores)

    alone, both = pace(profile.threads), pace(2 * profile.threads)
    return msgspec.structs.replace(
        profile,
        costs=slowed(profile.costs, alone, alone),
        beside=None if profile.beside is None else slowed(profile.beside, both, both),
        prompt_s=profile.prompt_s * alone,
        http_s=profile.http_s * alone,
        admit_s=profile.admit_s * alone,
        call_s=None if profile.call_s is None else profile.call_s * alone,
        others=others,
    )


PACE_PROMPT, PACE_STREAMS, PACE_ROUNDS = 128, 3, 3


def pace_of(url: str, model: str, profile: WorkerProfile, *, seed: int) -> float:
    """How much longer, or shorter, than was learnt the same takes now: a shared machine changes from minute to minute.

    The mean of prompts' and of steps' ratios. Raises ConfigError where the server doesn't answer.
    """
    learner = Learner(url, model, seed)

    async def probe() -> float:
        prompts = [await learner.prompt(PACE_PROMPT) for _ in range(PACE_ROUNDS)]
        step = steps_of(await learner.streams(PACE_STREAMS, 32, STREAMED))
        expected_s = (profile.call_s or 0.0) + (profile.prompt_s or 0.0) + prompts[0].content.expected_s(profile.costs)
        ratios = [statistics.median(one.seconds for one in prompts) / expected_s]
        if step is not None:
            ratios.append(step.seconds / step.content.expected_s(profile.costs))
        return statistics.geometric_mean(ratios)

    return asyncio.run(probe())


def write_kind(profile: WorkerProfile, path: Path) -> None:
    """A file that `simulate --costs` reads."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")

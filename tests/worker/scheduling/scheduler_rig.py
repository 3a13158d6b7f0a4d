"""A scheduler of either role with its pool, and an engine that always draws the same token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.decode_worker.config import DecodeConfig
from twostroke.decode_worker.policy import DecodePolicy
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.prefill_worker.policy import PrefillPolicy
from twostroke.protocol.kv_layout import ONE_GROUP, KVGroups
from twostroke.protocol.requests import GenerateRequest, Promise, SampledToken, SamplingParams
from twostroke.protocol.stats import StepCosts
from twostroke.worker.config import PreemptionMode, QueuePolicy, SpeculationConfig
from twostroke.worker.scheduling.block_pool import BlockPool
from twostroke.worker.scheduling.scheduler import Admitted, NewTokens, ScheduledStep, Scheduler, Swapping
from twostroke.worker.scheduling.step_policy import StepBudget
from twostroke.worker.speculator import Speculator

BLOCK = 4
MAX_CONTEXT = 200
TOKEN = SampledToken(7)
STOP = 9
NOTHING = Promise()
ROLES = ("prefill", "decode")


def a_step_budget(max_step_tokens: int = 512, costs: StepCosts | None = None, **settings: Any) -> StepBudget:
    """A step budget; without costs only `max_step_tokens` counts, up to 64 tokens."""
    values = {"max_batch": 1, "tpot_safety": 1.0, "stall_factor": 2.0, "min_chunk_tokens": 1} | settings
    config = DecodeConfig(max_step_tokens=max_step_tokens, **values)
    return StepBudget(config, lambda: costs, DecodePolicy.longest_chunk, DecodePolicy.most_stall_s)


@dataclass
class HostMemory:
    """The part of a swap space that schedulers see."""

    num_blocks: int
    block_bytes: int = 1
    num_bytes: int = 0
    seconds: float = 0.0


class Rig:
    """`role` is whose scheduler it is. Requests' prompts are unlike each other, unless they begin at the same token."""

    def __init__(
        self,
        role: str = "decode",
        num_blocks: int = 64,
        *,
        max_batch: int = 8,
        max_step_tokens: int = 16,
        max_waiting: int = 1024,
        min_pull_tokens: int = 1,
        queue: QueuePolicy = "edf",
        watermark_blocks: int = 0,
        swap_blocks: int = 0,
        preemption: PreemptionMode = "swap",
        costs: StepCosts | None = None,
        groups: KVGroups = ONE_GROUP,
        has_drafts: bool = False,
        speculation: SpeculationConfig | None = None,
    ):
        self.pool = BlockPool(num_blocks, BLOCK, groups)
        memory = HostMemory(swap_blocks) if swap_blocks and role == "decode" else None
        self.swapping = Swapping(memory, preemption, BLOCK)
        self.scheduler: Any
        common: dict[str, Any] = {
            "max_batch": max_batch,
            "max_waiting": max_waiting,
            "min_pull_tokens": min_pull_tokens,
            "queue": queue,
        }
        self._is_decode = role == "decode"
        if self._is_decode:
            watermark = watermark_blocks and (watermark_blocks + 0.5) / num_blocks
            budget = a_step_budget(max_step_tokens, costs, watermark=watermark, **common)
            policy = DecodePolicy(budget.config, budget.costs, self.pool)
            self.speculator = Speculator(speculation or SpeculationConfig(), budget.costs, 1.0) if has_drafts else None
            self.scheduler = Scheduler(self.pool, budget.config, MAX_CONTEXT, policy, self.swapping, self.speculator)
        else:
            config = PrefillConfig(max_step_tokens=max_step_tokens, **common)
            policy = PrefillPolicy(config, lambda: costs, self.pool)
            self.scheduler = Scheduler(self.pool, config, MAX_CONTEXT, policy, self.swapping)
        self._num_requests = 0

    def add(
        self,
        length: int,
        max_tokens: int = 1,
        first: int | None = None,
        *,
        promise: Promise = NOTHING,
        now: float = 0.0,
        transfer: bool = False,
        is_offered: bool = True,
        awaits_offer: bool = False,
        num_outputs: int = 0,
        sampling: SamplingParams | None = None,
    ) -> Any:
        """Queue a request; with `transfer`, its KV comes from a prefill worker, whose offer is here already."""
        first = 1000 * self._num_requests if first is None else first
        self._num_requests += 1
        request = GenerateRequest(
            request_id=f"{self._num_requests}",
            router_id="router-0",
            token_ids=tuple(range(first, first + length)),
            num_prompt_tokens=length - num_outputs,
            sampling=sampling or SamplingParams(),
            max_tokens=max_tokens,
            stop_token_ids=(STOP,),
            promise=promise,
        )
        if not self._is_decode:
            return self.scheduler.add(request, now=now, is_prefill_only=True, awaits_offer=awaits_offer)
        job = self.scheduler.add(request, now=now, wants_transfer=transfer, awaits_offer=awaits_offer)
        if transfer and is_offered:
            self.scheduler.offered(job)
        return job

    def cache(self, length: int, first: int = 0) -> None:
        """Have the first whole blocks of a prompt in the cache."""
        self.add(length, first=first)
        while self.run():
            pass

    def schedule(self) -> ScheduledStep:
        return self.scheduler.schedule()  # type: ignore[no-any-return]

    def end(self, step: ScheduledStep, token: SampledToken = TOKEN) -> list[NewTokens]:
        """The step has run, and has drawn `token` for all who draw."""
        drawn = self.scheduler.complete(step, [None if one.draw is None else token for one in step.batch])
        self.check()
        return drawn  # type: ignore[no-any-return]

    def run(self) -> list[tuple[Any, int]]:
        """Run a step; each job in it with its tokens."""
        step = self.schedule()
        self.end(step)
        return parts(step)

    def num_tokens_to_compute(self) -> int:
        """Tokens to compute before the requests decode."""
        return sum(num_tokens for _, num_tokens in self.scheduler.waiting_work())

    def check(self) -> None:
        """The books are right."""
        self.pool.check_integrity()
        if self.swapping.pool is not None:
            self.swapping.pool.check_integrity()

    def owned_blocks(self) -> tuple[int, int]:
        """Owned blocks of the cache, and of host memory."""
        return self.pool.owned_blocks, 0 if self.swapping.pool is None else self.swapping.pool.owned_blocks


def parts(step: ScheduledStep) -> list[tuple[Any, int]]:
    """Each job of a step with its tokens."""
    return [(entry.job, len(entry.step.token_ids)) for entry in step.entries]


def jobs(step: ScheduledStep | Sequence[tuple[Any, int]]) -> list[Any]:
    """The jobs of a step."""
    return [job for job, _ in (parts(step) if isinstance(step, ScheduledStep) else step)]


def receiving(admitted: Admitted) -> tuple[Any, ...]:
    """The jobs whose transfer is to begin now."""
    return tuple(job for job in admitted.jobs if job.is_receiving)


def idle(scheduler: Scheduler) -> bool:
    """True where no request is left."""
    return scheduler.num_waiting == scheduler.num_running == 0 == len(list(scheduler.waiting_work()))

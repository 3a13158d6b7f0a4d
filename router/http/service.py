"""The service behind the HTTP app: one model, its tokenizer, the fleet, and every request under way."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import RequestError
from twostroke.protocol.messages import ChangeRole
from twostroke.protocol.requests import Peer
from twostroke.protocol.stats import Role, WorkerInfo, WorkerStats, role_of
from twostroke.router.fleet import Fleet, NoPath
from twostroke.router.generate.pipeline import Pipeline
from twostroke.router.http.config import HttpConfig
from twostroke.router.http.tenants import Tenants
from twostroke.router.observe.feed import Feed
from twostroke.router.observe.metrics import RouterMetrics
from twostroke.router.observe.request_log import RequestLog
from twostroke.router.observe.scaling import Expected, LastScaling, planned_families, scaling_status
from twostroke.router.observe.scrape import (
    OtherRouters,
    RouterMetricsSample,
    dropped_lines_family,
    hangs_family,
    no_other_routers,
    other_versions_family,
    own_collections_family,
    path_families,
)
from twostroke.router.openai.fields import shown
from twostroke.router.openai.generation import ChoiceRunner
from twostroke.router.openai.jobs import JobMaker
from twostroke.router.openai.schemas import ModelRequest, UnknownFields
from twostroke.router.routing.role_changes import role_changes
from twostroke.router.slo.admission import Admission, Gate
from twostroke.router.slo.classes import Demand, SLOConfig, fleet_numbers
from twostroke.router.text.generation_config import SamplingDefaults
from twostroke.router.text.tokenizer import TextTokenizer
from twostroke.router.token_channels import TokenChannels

if TYPE_CHECKING:
    from twostroke.router.observe.opentelemetry_traces import OpenTelemetryTraces

_log = logging.getLogger(__name__)

ROLE_TOLD_S = 2.0
"""Seconds in which a worker that was told its role is not told again."""
_IN_FEED = (
    "owned_blocks",
    "num_running",
    "num_waiting",
    "num_waiting_tokens",
    "num_transfers",
    "computed_tokens",
    "generated_tokens",
    "transfer_bytes",
    "is_draining",
)
_OF_TIER_IN_FEED = ("name", "lookups", "hits", "num_bytes", "max_bytes")


@dataclass(frozen=True)
class ServiceConfig:
    """Settings of the HTTP side."""

    model_name: str  # the `model` that clients name
    expects_prefill: bool = True  # False: aggregated, a decode worker alone is a whole path
    http: HttpConfig = field(default_factory=HttpConfig)
    router_id: str = "router"  # of this replica, in metrics
    own_hosts: tuple[str, ...] = ()  # names and addresses of this machine, by which requests may come
    follow_s: float = 0.5  # how often the fleet is looked at between requests
    version: str = field(default_factory=partial(version, "twostroke"))


@dataclass(kw_only=True)
class RouterService:
    """Serves one model. `start` and `close` it on the event loop that it serves on.

    `admission` is the one that `pipeline` asks; without one nothing is refused for being late. Without `tenants`
    no key is needed; `keys_age_s` tells since when their file was not read. `expected` tells how many replicas there
    are to be, `scaling` what the autoscaler decided last. `other_versions` names the workers that run
    another version, by role: they are never called.
    """

    config: ServiceConfig
    tokenizer: TextTokenizer
    fleet: Fleet
    channels: TokenChannels
    pipeline: Pipeline
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    slo: SLOConfig = field(default_factory=SLOConfig)
    admission: Admission | None = None
    tenants: Tenants | None = None
    keys_age_s: Callable[[], float] | None = None
    traces: "OpenTelemetryTraces | None" = None
    other_routers: OtherRouters = no_other_routers
    other_versions: Callable[[], Mapping[Role, Collection[str]]] = dict
    expected: Expected = dict
    scaling: LastScaling = lambda: None
    dropped_log_lines: Callable[[], int] = lambda: 0
    clock: Clock = time.monotonic
    wall_clock: Clock = time.time

    def __post_init__(self) -> None:
        admission = self.admission or Admission(config=self.slo, stats=self.channels.stats, clock=self.clock)
        self._metrics = RouterMetrics(
            self.config.model_name,
            self.slo.classes,
            admission,
            self.clock,
            is_ready=lambda: not self.missing(),
            keys_age_s=self.keys_age_s,
        )
        self._demand = Demand(self.slo.classes, self.clock)
        self.jobs = JobMaker(
            self.tokenizer, self.sampling_defaults, self.config.http.max_response_items, vocab_size=self.vocab_size
        )
        self.runner = ChoiceRunner(self.tokenizer, self.pipeline, self._metrics, self._demand, admission, self.clock)
        self.gate = Gate(self.config.http.max_choices_in_flight, self._demand.turned_away, self.clock)
        self.feed = Feed(self.config.router_id, self._worker_rows, self.clock, is_over=lambda: self.gate.is_draining)
        self.started_at = int(self.wall_clock())
        self._began_s = self.clock()
        self._unknown_fields = UnknownFields(strict=self.config.http.strict)
        self._following: asyncio.Task[None] | None = None
        self._told_roles: dict[Peer, float] = {}  # when workers were told their roles last
        self.one_order = asyncio.Lock()
        """Held while a worker is given an operator's order: two at once could leave nobody who writes answers."""

    async def start(self) -> None:
        """Connect to the workers, and keep following the fleet."""
        if self._following is None:
            self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Close the channels; requests under way fail."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
            self._following = None
        await self.channels.close()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)

    def began(self, log: RequestLog) -> None:
        """A request has come."""
        if self.traces is not None:
            self.traces.begin(log)
        self.feed.began(log)

    def over(self, log: RequestLog) -> None:
        """A request has ended: count it, and hand it to those who trace."""
        if log.refusal is not None:
            self._metrics.refused(log.refusal)
        self.feed.over(log)
        if self.traces is not None:
            self.traces.record(log)

    def now(self) -> int:
        """Seconds since 1970, for `created`."""
        return int(self.wall_clock())

    def check(self, body: ModelRequest) -> None:
        """Raises RequestError for another model than the one served, and where unknown fields are refused."""
        if body.model is not None:
            self.check_model(body.model)
        self._unknown_fields.check(body)

    def check_model(self, name: str) -> None:
        """Raises RequestError (404) for another model than the one served."""
        if name != self.config.model_name:
            raise RequestError(
                f"model: {shown(name)!r} is not served here, but {self.config.model_name!r} is",
                param="model",
                code="model_not_found",
                status=404,
            )

    def max_context(self) -> int:
        """Tokens that a request may have, output included. Raises NoPath where nobody is known who writes answers."""
        is_flexible = self.pipeline.is_flexible
        contexts = [info.max_context for info in self.fleet.workers() if is_flexible or info.role == "decode"]
        if not contexts:
            raise NoPath("no decode worker is available; try again shortly")
        return max(contexts)

    def vocab_size(self) -> int:
        """All token ids are below it: the workers' word, and before there are any what the folder says."""
        numbers = (info.vocab_size for info in self.fleet.workers())
        return min((size for size in numbers if size is not None), default=self.tokenizer.vocab_size)

    def missing(self) -> list[str]:
        """Return what a whole path lacks, in words; empty when ready. A flexible worker is a whole path by itself."""
        if self.gate.is_draining:
            return ["the server is about to end"]
        workers = self.fleet.workers()
        reachable = {info.role for info in workers if self.channels.is_connected(info.peer)}
        if reachable and self.pipeline.is_flexible:
            return []
        wanted: Sequence[Role] = ("prefill", "decode") if self.config.expects_prefill else ("decode",)
        others = {role: len(names) for role, names in self.other_versions().items() if names}
        return [
            f"no {role} worker can be reached" + (f" ({others[role]} of another version)" if role in others else "")
            for role in wanted
            if role not in reachable
        ]

    def status(self) -> dict[str, Any]:
        """All workers and their numbers, for people and for `twostroke status`."""
        ejected = self.pipeline.ejected()
        return {
            "model": self.config.model_name,
            "version": self.config.version,
            "ready": not self.missing(),
            "sampling_defaults": self.sampling_defaults.model_dump(),
            "end_token_ids": self.tokenizer.eos_token_ids,
            "response_template": self.tokenizer.response_template,
            "places_held": self.pipeline.in_flight,
            "slo_classes": [
                {"name": one.name, "attainment": self._metrics.attainment(one.name)} for one in self.slo.classes
            ],
            "paths": dict(self.pipeline.paths),
            "tier_reads": self.pipeline.num_tier_reads,
            "moves": dict(self.pipeline.moves.num_moved),
            "autoscaling": self._scaling_status(),
            "other_versions": {role: sorted(names) for role, names in self.other_versions().items() if names},
            "workers": [
                {
                    "role": role_of(info, self.channels.stats(info.peer)),
                    "home_role": info.role,
                    "worker_id": info.peer.worker_id,
                    "epoch": f"{info.peer.epoch:016x}",
                    "node": info.token_address.host,
                    "nodes": sorted({address.host for address in info.transfer_addresses}),
                    "reachable": self.channels.is_connected(info.peer),
                    "ejected": info.peer in ejected,
                    "kv_dtype": info.layout.dtype,
                    "weights": info.weights,
                    "ranks": info.layout.num_ranks,
                    "block_size": info.layout.block_size,
                    "num_blocks": info.num_blocks,
                    "max_context": info.max_context,
                    "full_contexts": round(info.full_contexts, 2),
                    "stats": msgspec.to_builtins(self.channels.stats(info.peer)),
                }
                for info in self.fleet.workers()
            ],
        }

    def _worker_rows(self) -> list[dict[str, Any]]:
        """The workers and the few numbers of theirs that change from moment to moment, for the feed."""
        ejected = self.pipeline.ejected()
        rows = []
        for info in self.fleet.workers():
            stats = self.channels.stats(info.peer)
            numbers = {} if stats is None else {name: getattr(stats, name) for name in _IN_FEED}
            if stats is not None and stats.tiers:
                numbers["tiers"] = [{name: getattr(tier, name) for name in _OF_TIER_IN_FEED} for tier in stats.tiers]
            row = {
                "role": role_of(info, stats),
                "id": info.peer.worker_id,
                "epoch": f"{info.peer.epoch:016x}",
                "reachable": self.channels.is_connected(info.peer),
                "ejected": info.peer in ejected,
                "max_batch": info.max_batch,
                "total_blocks": info.num_blocks,
            }
            rows.append({**row, **numbers})
        return rows

    def _scaling_status(self) -> dict[str, Any] | None:
        scaling = self.scaling()
        if scaling is None:
            return None
        running = Counter(role_of(*one) for one in self._worker_numbers() if not one[1].is_draining)
        return scaling_status(scaling, running, self.wall_clock())

    def demand(self) -> dict[str, float]:
        """Return the demand on the server and the load of its workers (router/slo/classes.py)."""
        own = {"uptime_s": self.clock() - self._began_s, **self._demand.numbers()}
        return own | fleet_numbers(self._worker_numbers())

    def sample(self) -> RouterMetricsSample:
        """This router's numbers."""
        moves = self.pipeline.moves
        planned = planned_families(self.expected(), self.scaling())
        left_out = other_versions_family(self.other_versions())
        return RouterMetricsSample(
            self.config.router_id,
            (
                *self._metrics.registry.collect(),
                *path_families(self.pipeline.paths, self.pipeline.num_tier_reads, moves.num_moved, moves.num_failed),
                *planned,
                left_out,
                hangs_family(self.channels.num_hung),
                dropped_lines_family(self.dropped_log_lines()),
                own_collections_family(),
            ),
            tuple(self._worker_numbers()),
            frozenset(self.pipeline.ejected()),
        )

    async def samples(self) -> list[RouterMetricsSample]:
        """The numbers of all routers that answer, this one's first."""
        return [self.sample(), *await self.other_routers()]

    def _worker_numbers(self) -> Iterator[tuple[WorkerInfo, WorkerStats]]:
        """Yield the workers that have sent their numbers, with those."""
        for info in self.fleet.workers():
            stats = self.channels.stats(info.peer)
            if stats is not None:
                yield info, stats

    def _change_roles(self) -> None:
        """Have workers change their roles as the autoscaler decided last."""
        scaling, now = self.scaling(), self.clock()
        if scaling is None or scaling.homes is None:
            return
        self._told_roles = {worker: at for worker, at in self._told_roles.items() if now - at < ROLE_TOLD_S}
        for worker, role in role_changes(self._worker_numbers(), scaling.targets).items():
            if worker not in self._told_roles:
                _log.info("worker %s is to change its role to %s", worker.worker_id, role)
                self._told_roles[worker] = now
                self.channels.send(worker, ChangeRole(role))

    async def _follow(self) -> None:
        while True:
            try:
                self.channels.follow(self.fleet.workers())
                self._change_roles()
            except Exception:
                _log.exception("the fleet can't be followed; the channels stay as they are until the next look")
            await asyncio.sleep(self.config.follow_s)

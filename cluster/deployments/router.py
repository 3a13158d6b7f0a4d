"""The router as a Serve deployment: the application's ingress. Its process never imports torch.

Also, for a scrape that has reached one router, the numbers of the others; and how the routers of an application that
is to end let go of what they have under way.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from twostroke.cluster.autoscaling.decision_watch import DecisionWatch, published
from twostroke.cluster.autoscaling.serve_policy import ROUTER
from twostroke.cluster.config.config import ClusterConfig, api_keys
from twostroke.cluster.config.model_folder import chat_template_text, resolve_model_folder, served_name
from twostroke.cluster.config.process_logs import LoggingConfig, log_as_replica, num_dropped_lines
from twostroke.cluster.config.sections import ModelSection, RouterSection
from twostroke.cluster.deployments.fleet import ServeFleet, worker_directory
from twostroke.cluster.deployments.key_watch import KeyWatch
from twostroke.cluster.deployments.proxies import exposure_warning, forgotten_switches
from twostroke.protocol.clock import Clock, draw_epoch
from twostroke.protocol.garbage import freeze_start_up
from twostroke.protocol.messages import PROTOCOL
from twostroke.protocol.network import TcpNetwork
from twostroke.protocol.requests import Peer
from twostroke.protocol.stats import Role
from twostroke.router.generate.pipeline import FleetKnowledge, Pipeline
from twostroke.router.http.app import build_app
from twostroke.router.http.doctor import Doctor
from twostroke.router.http.service import RouterService, ServiceConfig
from twostroke.router.http.tenants import AuthConfig, Tenants
from twostroke.router.observe.scaling import Scaling
from twostroke.router.observe.scrape import RouterMetricsSample, no_other_routers
from twostroke.router.observe.tracing import request_traces
from twostroke.router.slo.admission import Admission
from twostroke.router.slo.classes import SLOConfig
from twostroke.router.text.generation_config import read_sampling_defaults
from twostroke.router.text.tokenizer import TextTokenizer

ANSWER_S = 1.0
"""A router that takes longer is left out of the scrape: Prometheus, too, waits only so long."""


class OtherRouters:
    """Asks all replicas of the deployment behind `routers`, of which `own` is the one that asks."""

    def __init__(self, routers: DeploymentHandle, own: str):
        self._routers = routers
        self._own = own

    async def readings(self) -> Sequence[RouterMetricsSample]:
        """Return the samples of routers that answer in time."""
        try:
            # What is public waits for all replicas, or fails with any of them.
            calls = await asyncio.wait_for(
                self._routers.broadcast("reading")._fetch_replica_results_async(), timeout=ANSWER_S
            )
        except (RayError, RayServeException, TimeoutError) as error:
            _log.warning("the other routers' numbers are missing in a scrape: %s", error or type(error).__name__)
            return ()
        answers = await asyncio.gather(
            *(asyncio.wait_for(call.get_async(), timeout=ANSWER_S) for call in calls), return_exceptions=True
        )
        readings: list[RouterMetricsSample] = []
        for answer in answers:
            if isinstance(answer, RouterMetricsSample):
                if getattr(answer, "protocol", None) != PROTOCOL:
                    _log.warning("a router of another version is left out of a scrape")
                elif answer.router != self._own:
                    readings.append(answer)
            elif isinstance(answer, BaseException):
                _log.warning("a router's numbers are missing in a scrape: %s", answer or type(answer).__name__)
        return readings


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RouterSettings:
    """Settings of a router replica."""

    model: ModelSection
    router: RouterSection
    expected: dict[Role, int]  # how many workers of each role are to be there, to begin with
    least: dict[Role, int]  # and at any time
    chat_template: str | None = None  # its text; None: the model's own
    scaling_interval_s: float | None = None  # between the autoscaler's decisions; None: the number of workers is fixed
    slo: SLOConfig = field(default_factory=SLOConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @classmethod
    def of(cls, config: ClusterConfig) -> "RouterSettings":
        """Reads the file of a chat template, which only this machine needs to have. Raises ConfigError."""
        return cls(
            model=config.model,
            router=config.router,
            expected={role: counts.first for role, counts in config.counts.items()},
            least={role: counts.least for role, counts in config.counts.items()},
            chat_template=chat_template_text(config.model),
            scaling_interval_s=config.autoscaling.interval_s if config.autoscaling.enabled else None,
            slo=config.slo,
            auth=config.auth,
            logging=config.logging,
        )


@serve.ingress()
class RouterReplica:
    """One router: HTTP in, token channels and Serve calls out."""

    _service: RouterService | None = None
    _decisions: DecisionWatch | None = None
    _keys: KeyWatch | None = None
    _is_draining = False

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: RouterSettings,
        secret: bytes,
        decode: DeploymentHandle,
        prefill: DeploymentHandle | None = None,
    ):
        self._notice_s = settings.router.drain_notice_s
        folder = resolve_model_folder(settings.model.path, revision=settings.model.revision)
        replica = serve.get_replica_context()
        peer = Peer(replica.replica_id.unique_id, draw_epoch())
        log_as_replica(settings.logging, "router", peer)
        fleet = ServeFleet(prefill, decode, grace_s=settings.router.drain_grace_s)
        knowledge = FleetKnowledge(
            network=TcpNetwork(secret),
            router=peer,
            clock=time.monotonic,
            config=settings.router.pipeline,
            channel=settings.router.token_channel,
        )
        channels = knowledge.channels
        replicas = settings.router.replicas
        admission = Admission(config=settings.slo, stats=channels.stats, clock=time.monotonic, num_routers=replicas)
        others = OtherRouters(serve.get_deployment_handle(replica.deployment, replica.app_name), own=peer.worker_id)
        host = await asyncio.to_thread(_host)
        source = ClusterConfig(slo=settings.slo, auth=settings.auth)
        tenants = Tenants(
            await asyncio.to_thread(api_keys, source),
            clock=time.monotonic,
            num_routers=replicas,
            is_needed=settings.auth != AuthConfig(),
        )
        self._keys = KeyWatch(source, tenants)
        self._keys.start()
        warning = exposure_warning(host, has_keys=bool(tenants))
        if warning is not None:
            _log.warning(warning)
        forgotten = forgotten_switches(os.environ)
        if forgotten is not None:
            _log.warning(forgotten)
        if settings.scaling_interval_s is not None:
            self._decisions = DecisionWatch(
                partial(published, replica.app_name), interval_s=settings.scaling_interval_s
            )
            await self._decisions.check()  # a router that is new knows how many workers there are to be
            self._decisions.start()
            for handle in (decode, prefill):
                if handle is not None:  # a worker that leaves may do so because of a decision
                    worker_directory(handle.deployment_name).watch(lambda _workers, _how: self._look_soon())
        self._expected = settings.expected
        self._service = RouterService(
            config=ServiceConfig(
                model_name=served_name(settings.model, folder),
                expects_prefill=settings.least["prefill"] > 0,
                http=settings.router.http,
                router_id=peer.worker_id,
                own_hosts=(host, *await asyncio.to_thread(_own_names)),
            ),
            tokenizer=TextTokenizer.load(folder, settings.chat_template, settings.model.response_template),
            sampling_defaults=read_sampling_defaults(folder, settings.model.generation_config),
            fleet=fleet,
            channels=channels,
            pipeline=Pipeline(fleet=fleet, knowledge=knowledge, secret=secret, admit=admission.admit),
            slo=settings.slo,
            admission=admission,
            tenants=tenants,
            keys_age_s=self._keys.age_s if settings.auth.keys_file is not None else None,
            traces=request_traces(
                settings.router.tracing, replica=peer.worker_id, model=served_name(settings.model, folder)
            ),
            other_versions=fleet.other_versions,
            other_routers=others.readings if replicas > 1 else no_other_routers,
            expected=lambda: {"router": replicas, **{str(role): count for role, count in self._workers().items()}},
            scaling=self._scaling,
            dropped_log_lines=num_dropped_lines,
        )
        doctor = Doctor(fleet=fleet, stats=channels.stats, secret=secret, expected=self._workers)
        self._app = build_app(self._service, doctor)
        await self._service.start()
        freeze_start_up()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls this after the constructor, and serves what it returns."""
        return self._app

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Serve asks for this where there is an autoscaler, and hands it to the policy.

        A coroutine, since Serve would call a plain method on another thread, while the numbers change.
        """
        return {} if self._service is None else self._service.demand()

    def _look_soon(self) -> None:
        if self._decisions is not None:
            self._decisions.look_soon()

    def _scaling(self) -> Scaling | None:
        return None if self._decisions is None else self._decisions.latest()

    def _workers(self) -> Mapping[Role, int]:
        """Return how many workers of each role there should be now."""
        scaling = self._scaling()
        return self._expected if scaling is None else {**self._expected, **scaling.replicas}

    async def reading(self) -> RouterMetricsSample | None:
        """This router's numbers, for another one's scrape; None until it has any."""
        return None if self._service is None else self._service.sample()

    async def drain(self) -> int:
        """Be not ready, and soon take nothing new; returns how many choices are under way. May be called again."""
        if self._service is None:
            return 0
        if not self._is_draining:
            self._is_draining = True
            self._service.gate.drain(self._notice_s)
        return self._service.gate.num_choices

    async def cut(self) -> int:
        """End what is under way, with an error; returns how many choices that is."""
        return 0 if self._service is None else self._service.gate.cut()

    async def __del__(self) -> None:
        """Serve awaits this once the replica has drained."""
        for watch in (self._decisions, self._keys):
            if watch is not None:
                await watch.close()
        if self._service is not None:
            await self._service.close()


def _own_names() -> set[str]:
    """Return the names of this machine. DNS may take its time."""
    return {socket.gethostname().lower(), socket.getfqdn().lower()}


def _host() -> str:
    """Return the address of Serve's proxies, which no public function tells."""
    client = _get_global_client()
    assert client is not None  # this is one of its replicas
    return client.http_config.host or ""


def router_options(router: RouterSection) -> dict[str, Any]:
    """Serve's options for the router's deployment, but for how many replicas it has."""
    return {
        # A stream holds its place for as long as it runs; the router itself refuses what is too much.
        "max_ongoing_requests": 100_000,
        "ray_actor_options": {"num_cpus": 0, **router.actor_options()},
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_wait_loop_s": 0.1,
        # Nobody can go on with a stream whose router ends: they get more time than those of workers.
        "graceful_shutdown_timeout_s": router.stream_grace_s,
        "max_constructor_retry_count": 2,
        "logging_config": {"enable_access_log": False},
    }


FAREWELL_S = 0.5
"""Seconds before the end in which errors that end streams reach their clients."""
DRAIN_LOOK_S = 0.2

Ask = Callable[[Literal["drain", "cut"]], Awaitable[int]]
"""Calls this method of every router; returns how many choices all of them have under way."""


async def drain_routers(
    ask: Ask, grace_s: float, notice_s: float, tell: Callable[[str], None], clock: Clock = time.monotonic
) -> None:
    """Have the routers say that they are not ready, and let answers end for as long as `grace_s`; the rest is cut.

    New requests are taken for `notice_s`, and so long this takes at least. `tell` is given lines for people.
    """
    began = clock()
    under_way = await ask("drain")
    if under_way > 0:
        tell(f"Waiting up to {grace_s:g} s for {_choices(under_way)} under way ...")
    while (under_way := await ask("drain")) > 0 or clock() - began < notice_s:
        if clock() - began >= grace_s - min(FAREWELL_S, grace_s / 2):
            break
        await asyncio.sleep(DRAIN_LOOK_S)
    if under_way == 0:
        return
    tell(f"Cut {_choices(await ask('cut'))} that had not ended in time.")
    while await ask("drain") > 0 and clock() - began < grace_s:  # noqa: ASYNC110  (the routers are other processes)
        await asyncio.sleep(DRAIN_LOOK_S / 4)


async def drain_application(app_name: str, grace_s: float, notice_s: float, tell: Callable[[str], None]) -> None:
    """Drain the routers of an application on the Ray that this process is connected to. Raises RayServeException."""
    routers = serve.get_deployment_handle(ROUTER, app_name)

    async def ask(method: Literal["drain", "cut"]) -> int:
        return sum(await routers.broadcast(method).results_async(timeout_s=5.0))

    await drain_routers(ask, grace_s, notice_s, tell)


def _choices(count: int) -> str:
    return "1 answer" if count == 1 else f"{count} answers"

"""The policy as Ray Serve calls it: contexts of deployments in, numbers of replicas out, and nothing that breaks it."""

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from ray.serve._private.application_state import AutoscalingPolicy
from ray.serve._private.autoscaling_state import ApplicationAutoscalingState
from ray.serve._private.common import DeploymentID, ReplicaID, ReplicaMetricReport, TimeStampedValue
from ray.serve._private.config import DeploymentConfig
from ray.serve.config import AutoscalingContext
from ray.serve.schema import ServeApplicationSchema

from twostroke.cluster.autoscaling import decision_watch as publication
from twostroke.cluster.autoscaling import serve_policy
from twostroke.cluster.autoscaling.scaling_state import ScalingOrder
from twostroke.cluster.autoscaling.serve_policy import POLICY_FUNCTION, MissingPolicy, joint_policy, router_samples
from twostroke.cluster.config.autoscaling import AutoscalingConfig, RoleLimits, WorkerCounts
from twostroke.cluster.deployments.serve_app import replica_options
from twostroke.protocol.settings import to_plain
from twostroke.router.observe.scaling import Scaling

ORDER = ScalingOrder(
    AutoscalingConfig(enabled=True, prefill=RoleLimits(min=1, max=2), decode=RoleLimits(min=2, max=4)),
    {},
    ("prefill", "decode"),
)
ROUTER, PREFILL, DECODE = (DeploymentID(name, "app") for name in ("Router", "PrefillWorker", "DecodeWorker"))


def point(at: float, value: float | None) -> TimeStampedValue:
    return TimeStampedValue(at, value)  # type: ignore[arg-type]


def test_of_a_routers_time_series_the_newest_point_counts_that_has_a_value() -> None:
    a, b = ReplicaID("a", ROUTER), ReplicaID("b", ROUTER)
    told = router_samples(
        {
            "uptime_s": {a: [point(1.0, 50.0), point(900.0, 51.0), point(3.0, 52.0)]},  # its node's clock was set
            "requests": {a: [point(1.0, 10.0), point(2.0, 30.0), point(3.0, None)]},
            "ongoing_requests": {a: [point(2.0, 5.0)], b: [point(2.0, 5.0)]},
        }
    )
    assert set(told) == {"a"}  # b counts its requests under way, and has told nothing else yet
    assert told["a"].numbers["requests"] == 30.0
    assert told["a"].uptime_s == 52.0


def context(
    deployment: DeploymentID, target: int, state: dict[str, Any] | None = None, metrics: Any = None
) -> AutoscalingContext:
    counts = WorkerCounts(target, target, target)
    return AutoscalingContext(
        deployment_id=deployment,
        deployment_name=deployment.name,
        app_name=deployment.app_name,
        current_num_replicas=target,
        target_num_replicas=target,
        running_replicas=[ReplicaID("r", deployment)],
        total_num_requests=0.0,
        total_queued_requests=0.0,
        aggregated_metrics={},
        raw_metrics=metrics or {},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=4,
        policy_state=state or {},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=replica_options(counts, ORDER)["autoscaling_config"],
    )


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[Scaling]:
    told: list[Scaling] = []

    def put(key: bytes, value: bytes, *, overwrite: bool, namespace: bytes) -> None:
        assert key == b"autoscaling/app"
        told.append(msgspec.json.decode(value, type=Scaling))

    monkeypatch.setattr(publication, "_internal_kv_put", put)
    return told


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[-1])
    monkeypatch.setattr("time.time", lambda: 1000.0 + now[-1])
    return now


def contexts(clock: list[float], state: dict[str, Any] | None = None) -> dict[DeploymentID, AutoscalingContext]:
    numbers = {"uptime_s": clock[-1], "prefill.running": 1.0, "decode.running": 1.0}
    replica = ReplicaID("r", ROUTER)
    metrics = {name: {replica: [point(1000.0 + clock[-1], value)]} for name, value in numbers.items()}
    return {
        ROUTER: context(ROUTER, 1, metrics=metrics),
        PREFILL: context(PREFILL, 1),
        DECODE: context(DECODE, 1, state),
    }


def test_a_decision_is_published_and_the_router_is_left_alone(clock: list[float], published: list[Scaling]) -> None:
    decisions, states = joint_policy(contexts(clock))
    assert decisions == {PREFILL: 1, DECODE: 2}  # fewer than its minimum
    assert [scaling.targets for scaling in published] == [{"prefill": 1, "decode": 2}]
    clock.append(clock[-1] + 0.1)
    assert joint_policy(contexts(clock, states[DECODE])) == ({}, states)  # not due yet: all stay as they are
    clock.append(clock[-1] + 1.0)
    decisions, _ = joint_policy(contexts(clock, states[DECODE]))
    assert decisions == {}  # it has looked, and the next decision is due later
    assert len(published) == 1


def test_an_application_that_is_not_whole_is_left_alone(clock: list[float]) -> None:
    whole = contexts(clock)
    assert joint_policy({PREFILL: whole[PREFILL]}) == ({}, {})
    assert joint_policy({}) == ({}, {})


def test_a_decision_that_fails_is_logged_and_all_stays(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(serve_policy, "take_sample", fails)
    decisions, states = joint_policy(contexts(clock))
    assert decisions == {}
    assert "the number of workers stays" in caplog.text
    assert "a bug of ours" in caplog.text
    clock.append(clock[-1] + 0.1)
    caplog.clear()
    joint_policy(contexts(clock, states[DECODE]))
    assert caplog.text == ""  # tried again a second later, not ten times a second


def test_a_decision_holds_though_nobody_can_be_told_of_it(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(app_name: str, scaling: Scaling) -> None:
        raise RuntimeError("no way to the head")

    monkeypatch.setattr(serve_policy, "publish", fails)
    decisions, _ = joint_policy(contexts(clock))
    assert decisions == {PREFILL: 1, DECODE: 2}
    assert "nobody is told of a decision" in caplog.text


def test_deployments_of_an_application_without_the_policy_keep_their_workers_and_say_what_is_missing(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    policy = MissingPolicy(order=msgspec.to_builtins(ORDER, enc_hook=to_plain))
    for _ in range(3):
        assert policy(context(DECODE, 3)) == (3, {})
    assert len(caplog.records) == 1
    assert POLICY_FUNCTION in caplog.text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Serve's of its own field, when it reads what it has written
def test_serves_own_bookkeeping_takes_the_policy_its_decisions_and_its_state(published: list[Scaling]) -> None:
    """The real classes of Serve's controller around ours, with options that have gone through Serve's own format."""
    app = ApplicationAutoscalingState("app")
    app.register(AutoscalingPolicy(policy_function=POLICY_FUNCTION))
    counts = {ROUTER: WorkerCounts(1, 1, 1), PREFILL: WorkerCounts(1, 1, 2), DECODE: WorkerCounts(2, 2, 4)}
    for deployment, of_role in counts.items():
        config = DeploymentConfig(num_replicas=None, max_ongoing_requests=10, **replica_options(of_role, ORDER))
        sent = DeploymentConfig.from_proto_bytes(config.to_proto_bytes())
        assert app.register_deployment(deployment, _Info(sent), 0) == of_role.first
        app.update_running_replica_ids(deployment, [ReplicaID("r", deployment)])
    report = ReplicaMetricReport(
        ReplicaID("r", ROUTER),
        timestamp=time.time(),
        metrics={
            name: [point(time.time(), value)]
            for name, value in {"uptime_s": 1.0, "prefill.running": 1.0, "decode.running": 2.0}.items()
        },
    )
    app.record_request_metrics_for_replica(report)
    targets = {ROUTER: 1, PREFILL: 1, DECODE: 1}
    assert app.get_decision_num_replicas(targets) == {PREFILL: 1, DECODE: 2}
    assert app.get_decision_num_replicas(targets) == {}  # between decisions
    assert len(published) == 1


class _Info:
    """The part of Serve's DeploymentInfo that is read."""

    target_capacity = None
    target_capacity_direction = None

    def __init__(self, config: DeploymentConfig):
        self.deployment_config = config


def test_the_serve_file_names_the_policy() -> None:
    file = yaml.safe_load((Path(__file__).parents[3] / "deploy" / "serve.yaml").read_text(encoding="utf-8"))
    (application,) = file["applications"]
    assert ServeApplicationSchema(**application).autoscaling_policy == {"policy_function": POLICY_FUNCTION}

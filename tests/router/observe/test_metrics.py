"""Scrapes of one router and its workers, and of several; docs/observability.md lists all series."""

import re
from pathlib import Path as FilePath

from prometheus_client.parser import text_string_to_metric_families

from tests.router.routing.knowing import info
from twostroke.protocol.errors import RequestError, WorkerLost
from twostroke.protocol.stats import GpuUse, QueuedWork, TierStats, WorkerStats
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.observe.metrics import RouterMetrics
from twostroke.router.observe.scrape import RouterMetricsSample, exposition
from twostroke.router.request_state import AttemptState, ChoiceJob, Path, RequestState
from twostroke.router.slo.admission import Admission
from twostroke.router.slo.classes import SLOConfig

PAGE = FilePath(__file__).parents[3] / "docs" / "observability.md"
INFO, PREFILL = info("d0"), info("p0")


def scraped(*, families=(), workers=(), ejected=frozenset()):
    """The text of a scrape where there is one router, r0."""
    return exposition([RouterMetricsSample("r0", families, workers, ejected)]).decode()


def test_what_workers_tell_is_told_under_its_name_by_role():
    damaged = WorkerStats(owned_blocks=7, transfer_digest_failures=2, broken_logit_rows=3, transfer_links_lost=5)
    workers = [(PREFILL, WorkerStats(total_blocks=64, pulled_tokens=6, is_draining=True)), (INFO, damaged)]
    text = scraped(workers=workers, ejected=frozenset({INFO.peer}))
    for line in (
        'kv_transfer_digest_failures_total{role="decode",worker="d0"} 2.0',
        'broken_logit_rows_total{role="decode",worker="d0"} 3.0',
        'kv_transfer_links_lost_total{role="decode",worker="d0"} 5.0',
        'kv_pulled_tokens_total{role="prefill",worker="p0"} 6.0',
        'kv_blocks_owned{role="prefill",worker="p0"} 0.0',
        'kv_blocks_owned{role="decode",worker="d0"} 7.0',
        'worker_ejected{role="decode",router="r0",worker="d0"} 1.0',
        'worker_ejected{role="prefill",router="r0",worker="p0"} 0.0',
        'worker_draining{role="prefill",worker="p0"} 1.0',
        'worker_draining{role="decode",worker="d0"} 0.0',
    ):
        assert f"twostroke:{line}" in text


def test_what_a_worker_gets_of_its_machine_is_told_of_those_that_know_it_alone():
    known = WorkerStats(flops=3e9, peak_flops_per_s=1e12, mfu=0.25, mbu=0.5, gpu=GpuUse(30, 80, 0.75))
    text = scraped(workers=[(PREFILL, WorkerStats()), (INFO, known)])
    for line in (
        'worker_flops_total{role="decode",worker="d0"} 3e+09',
        'worker_peak_flops_per_second{role="decode",worker="d0"} 1e+12',
        'model_flops_utilization{role="decode",worker="d0"} 0.25',
        'model_bandwidth_utilization{role="decode",worker="d0"} 0.5',
        'gpu_memory_used_bytes{role="decode",worker="d0"} 30.0',
        'gpu_memory_total_bytes{role="decode",worker="d0"} 80.0',
        'gpu_utilization{role="decode",worker="d0"} 0.75',
    ):
        assert f"twostroke:{line}" in text
    assert 'utilization{role="prefill"' not in text


def test_the_skew_of_a_mixtures_experts_is_told_by_layer_once_there_are_hits():
    text = scraped(workers=[(PREFILL, WorkerStats()), (INFO, WorkerStats(expert_skews=(0.0, 1.5, 2.0)))])
    assert text.count("twostroke:expert_skew{") == 2
    assert 'twostroke:expert_skew{layer="1",role="decode",worker="d0"} 1.5' in text
    assert 'twostroke:expert_skew{layer="2",role="decode",worker="d0"} 2.0' in text


def test_tiers_are_told_by_name_of_those_workers_alone_that_have_any():
    numbers = [field for field in TierStats.__struct_fields__ if field not in ("name", "read_s", "read_token_s")]
    disk = TierStats("disk", **{name: number for number, name in enumerate(numbers, 2)})
    stats = WorkerStats(tiers=(TierStats("host", lookups=9), disk))
    text = scraped(workers=[(PREFILL, WorkerStats()), (INFO, stats)])
    labels = 'role="decode",tier="disk",worker="d0"'
    told = dict(re.findall(rf"^twostroke:kv_tier_(\w+){{{labels}}} (\S+)$", text, re.MULTILINE))
    assert [float(value) for value in told.values()] == [*range(2, 2 + len(numbers))]
    assert 'twostroke:kv_tier_lookups_total{role="decode",tier="host",worker="d0"} 9.0' in text
    assert 'role="prefill",tier=' not in text


def test_queues_are_told_by_class_once_whatever_its_requests_priorities():
    queued = (QueuedWork("fast", 1, 0.0, 100, 2), QueuedWork("fast", 5, 0.0, 30, 1), QueuedWork("slow", 0, 0.0, 7, 1))
    text = scraped(workers=((PREFILL, WorkerStats(queued=queued)),))
    for line in (
        'queued_tokens{role="prefill",slo_class="fast",worker="p0"} 130.0',
        'queued_requests{role="prefill",slo_class="fast",worker="p0"} 3.0',
        'queued_tokens{role="prefill",slo_class="slow",worker="p0"} 7.0',
    ):
        assert text.count(f"twostroke:{line}") == 1


def router_metrics():
    slo = SLOConfig()
    admission = Admission(config=slo, stats=lambda peer: None, clock=float)
    return RouterMetrics("tiny", slo.classes, admission, clock=float, is_ready=bool, keys_age_s=lambda: 7.0)


def test_errors_are_counted_by_status_and_code_and_failed_attempts_by_kind(a_request):
    metrics = router_metrics()
    metrics.refused(RequestError("a client's own words", code="overloaded", status=429))
    metrics.refused(WorkerLost("w1 has died"))
    path = Path(PREFILL, INFO)
    attempts = [AttemptState(0.5, path, 1.0, "WorkerLost"), AttemptState(1.5, path, 2.0)]
    metrics.begun(a_request())
    metrics.ended(RequestState(ChoiceJob(a_request()), 0.0, admit=0.5, attempts=attempts), "stop", None)
    text = scraped(families=tuple(metrics.registry.collect()))
    for line in (
        'requests_refused_total{code="overloaded",model_name="tiny",router="r0",status="429"} 1.0',
        'requests_refused_total{code="worker_lost",model_name="tiny",router="r0",status="503"} 1.0',
        'request_attempt_failures_total{error="WorkerLost",model_name="tiny",router="r0"} 1.0',
        'request_resumes_total{model_name="tiny",router="r0"} 1.0',
        'request_admission_time_seconds_sum{model_name="tiny",router="r0"} 0.5',
    ):
        assert f"twostroke:{line}" in text
    assert "w1" not in text


def test_a_request_that_takes_as_long_as_any_may_falls_into_a_bucket(a_request):
    metrics, most_s = router_metrics(), PipelineConfig().request_timeout_s
    state = RequestState(ChoiceJob(a_request()), 0.0, admit=most_s, first_token=most_s, finish=most_s)
    metrics.begun(a_request())
    metrics.ended(state, "stop", None)
    samples = [one for family in metrics.registry.collect() for one in family.samples]
    for name in ("time_to_first_token", "e2e_request_latency", "request_admission_time"):
        counts = {
            float(one.labels["le"]): one.value for one in samples if one.name == f"twostroke:{name}_seconds_bucket"
        }
        assert min(le for le, count in counts.items() if count) < 2 * most_s
        assert len(counts) < 25  # each is a series, in every router


def sample_of(router, num_refused, *workers):
    """Return the sample of a router that has refused so many requests."""
    metrics = router_metrics()
    for _ in range(num_refused):
        metrics.refused(RequestError("no"))
    return RouterMetricsSample(router, tuple(metrics.registry.collect()), workers, frozenset())


def test_a_scrape_tells_the_same_of_all_routers_whichever_is_asked():
    one, two = sample_of("r1", 3), sample_of("r2", 5)
    text = exposition([one, two]).decode()
    for line in (
        'requests_refused_total{code="invalid_value",model_name="tiny",router="r1",status="400"} 3.0',
        'requests_refused_total{code="invalid_value",model_name="tiny",router="r2",status="400"} 5.0',
        'router_ready{model_name="tiny",router="r2"} 0.0',
        'api_keys_age_seconds{model_name="tiny",router="r2"} 7.0',
    ):
        assert text.count(f"\ntwostroke:{line}\n") == 1
    assert sorted(text.splitlines()) == sorted(exposition([two, one]).decode().splitlines())
    assert "_created" not in text


def test_series_of_a_name_stand_together_as_prometheus_asks():
    text = exposition(
        [sample_of("r1", 1, (INFO, WorkerStats())), sample_of("r2", 1, (PREFILL, WorkerStats()))]
    ).decode()
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types)) > 50
    series = [line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series))
    assert {sample.name for family in text_string_to_metric_families(text) for sample in family.samples} >= {
        "twostroke:worker_ejected",
        "twostroke:time_to_first_token_seconds_bucket",
    }


def test_a_worker_is_told_once_as_the_router_tells_that_heard_last_of_it():
    old, new = WorkerStats(steps=7, generated_tokens=70), WorkerStats(steps=8, generated_tokens=80)
    for samples in (
        [sample_of("r1", 0, (INFO, old)), sample_of("r2", 0, (INFO, new))],
        [sample_of("r1", 0, (INFO, new)), sample_of("r2", 0, (INFO, old))],
        [sample_of("r1", 0), sample_of("r2", 0, (INFO, new))],
    ):
        text = exposition(samples).decode()
        (line,) = [line for line in text.splitlines() if line.startswith("twostroke:worker_generation_tokens_total{")]
        assert line.endswith('{role="decode",worker="d0"} 80.0')


def names_on_the_page():
    """The first cells of the rows whose second cell is a type."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > 2 and cells[1] in ("counter", "gauge", "histogram"):
            for name in re.findall("`([^`]+)`", cells[0]):
                head, brace, rest = name.partition("{")
                several, _, tail = rest.partition("}")
                yield from (f"{head}{one}{tail}" for one in (several.split(",") if brace else [""]))


async def test_every_series_is_on_the_page_and_no_other(site_of):
    async with site_of(1, 1) as site:
        text = (await site.http.get("/metrics")).text
    told = re.findall(r"^# TYPE twostroke:(\w+) (counter|gauge|histogram)$", text, re.MULTILINE)
    series = {name.removesuffix("_total") if kind == "counter" else name for name, kind in told}
    assert sorted(names_on_the_page()) == sorted(name for name in series if not name.endswith("_created"))

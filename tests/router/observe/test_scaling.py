"""The autoscaler's decisions as a router shows them."""

from twostroke.router.observe.scaling import RoleScaling, Scaling, planned_families, scaling_status
from twostroke.router.observe.scrape import RouterMetricsSample, exposition

SCALING = Scaling(
    decided_at=1000.0,
    roles={
        "prefill": RoleScaling(2, "demand", changed_at=990.0, change="backlog"),
        "decode": RoleScaling(1, "steady"),
    },
    demand={"prompt_tokens_per_s": 512.5},
    decisions={"prefill": {"steady": 7, "backlog": 1}, "decode": {"steady": 8}},
)


def test_the_status_tells_targets_reasons_and_their_age():
    status = scaling_status(SCALING, {"prefill": 1, "decode": 1}, now=1004.0)
    assert status["age_s"] == 4.0
    assert status["roles"]["prefill"] == {
        "running": 1,
        "target": 2,
        "reason": "demand",
        "last_change": "backlog",
        "changed_ago_s": 14.0,
    }
    assert status["roles"]["decode"]["changed_ago_s"] is None
    assert SCALING.targets == {"prefill": 2, "decode": 1}


def test_a_clock_that_is_behind_makes_no_negative_age():
    assert scaling_status(SCALING, {}, now=900.0)["age_s"] == 0.0


def test_a_scrape_has_targets_decisions_by_reason_and_demand():
    families = tuple(planned_families({"router": 2}, SCALING))
    text = exposition([RouterMetricsSample("r0", families, (), frozenset())]).decode()
    for line in (
        'replicas_expected{role="router",router="r0"} 2.0',
        'autoscaling_target{role="prefill",router="r0"} 2.0',
        'autoscaling_target{role="decode",router="r0"} 1.0',
        'autoscaling_decisions_total{reason="backlog",role="prefill",router="r0"} 1.0',
        'autoscaling_demand{quantity="prompt_tokens_per_s",router="r0"} 512.5',
        'autoscaling_last_decision_timestamp_seconds{router="r0"} 1000.0',
    ):
        assert f"twostroke:{line}" in text


async def test_status_tells_of_the_autoscaler_only_where_there_is_one(site_of, until):
    async with site_of(1, 1) as site:
        assert (await site.http.get("/status")).json()["autoscaling"] is None
    async with site_of(1, 2, scaling=lambda: SCALING) as site:
        await until(lambda: site.service.demand()["decode.running"] == 2)
        told = (await site.http.get("/status")).json()["autoscaling"]
        assert told["roles"]["decode"]["running"] == 2
        assert "twostroke:autoscaling_target" in (await site.http.get("/metrics")).text

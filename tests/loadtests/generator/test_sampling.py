"""The server's queues, read from its metrics."""

from twostroke.loadtests.generator.sampling import samples_of
from twostroke.loadtests.run_folder import Sample

OURS = """\
# HELP twostroke:num_requests_running Requests that take part in steps.
# TYPE twostroke:num_requests_running gauge
twostroke:num_requests_running{role="prefill",worker="p1"} 1.0
twostroke:num_requests_running{role="decode",worker="d1"} 12.0
twostroke:num_requests_waiting{role="prefill",worker="p1"} 3.0
twostroke:num_waiting_tokens{role="prefill",worker="p1"} 4096.0
twostroke:kv_cache_usage_perc{role="decode",worker="d1"} 0.25
twostroke:router_requests_in_flight{model_name="m"} 13.0
"""
VLLM = """\
vllm:num_requests_running{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.5
"""


def test_each_worker_of_ours_has_a_sample() -> None:
    assert samples_of(OURS, 2.5) == [
        Sample(2.5, "decode", "d1", running=12, waiting=0, waiting_tokens=0, kv_usage=0.25),
        Sample(2.5, "prefill", "p1", running=1, waiting=3, waiting_tokens=4096, kv_usage=0),
    ]


def test_an_engine_of_vllm_is_a_worker_that_decodes() -> None:
    assert samples_of(VLLM, 1.0) == [Sample(1.0, "decode", "0", running=5, waiting=2, waiting_tokens=0, kv_usage=0.5)]


def test_a_server_that_tells_nothing_has_none() -> None:
    assert samples_of("<html>not found</html>\nprocess_cpu_seconds_total 4.0\n", 1.0) == []

"""Step times of a machine: never below its peaks, never faster for more work, and in the schedulers' form the same."""

from dataclasses import replace

import pytest

from twostroke.model.costs.operations import MachineLimits, decode_work, prefill_operations, prefill_work
from twostroke.model.costs.sizes import weight_bytes
from twostroke.model.published.hardware import HARDWARE, Efficiency
from twostroke.model.published.models import published_model
from twostroke.planning.costs.roofline import (
    Interference,
    WorkerHardware,
    as_mha,
    batch_limits,
    cached_flops,
    flops_of,
    knee,
    kv_bytes,
    largest_batch,
    request_usd,
    step_costs,
    tpot_floor_s,
    transfer_s,
    ttft_floor_s,
    uncached_flops,
    usd_per_million,
)
from twostroke.planning.layouts import HANDOVER_S, late_s
from twostroke.planning.search import PlanConstraints, profiles_of
from twostroke.planning.workload import Workload
from twostroke.protocol.errors import ConfigError

H100 = HARDWARE["h100-80gb"]
PROFILES = ("Llama-3.1-8B", "Qwen3-30B-A3B", "DeepSeek-V3", "gemma-3-12b")


@pytest.mark.parametrize("name", PROFILES)
def test_a_step_takes_longer_with_more_in_it_and_less_on_a_faster_machine(name: str) -> None:
    shape, machine = published_model(name), WorkerHardware(H100, 4)
    wider = replace(machine, hardware=replace(H100, read_bytes_per_s=2 * H100.read_bytes_per_s))
    decode_s = machine.decode_s(shape, 8, 1000)
    assert machine.decode_s(shape, 9, 1000) > decode_s
    assert machine.decode_s(shape, 8, 1100) > decode_s
    assert wider.decode_s(shape, 8, 1000) < decode_s
    assert replace(machine, ranks=8).decode_s(shape, 64, 4000) < machine.decode_s(shape, 64, 4000)
    assert machine.prefill_s(shape, 1025) > machine.prefill_s(shape, 1024)
    assert machine.prefill_s(shape, 4096, 512) > machine.prefill_s(shape, 4096)


@pytest.mark.parametrize("name", PROFILES)
def test_no_step_is_below_what_its_whole_work_takes_at_the_peaks(name: str) -> None:
    shape, machine = published_model(name), WorkerHardware(H100).at_peak()
    limits = MachineLimits(H100.flops_per_s["bf16"], H100.read_bytes_per_s)
    assert machine.decode_s(shape, 16, 2000) >= decode_work(shape, 16, 2000, "none").floor_s(limits)
    assert ttft_floor_s(machine, shape, 1000) >= prefill_work(shape, 1000, "none").floor_s(limits)


@pytest.mark.parametrize("name", PROFILES)
def test_schedulers_and_rooflines_agree_on_prompts_and_batches(name: str) -> None:
    shape, machine = published_model(name), WorkerHardware(H100, 4)
    costs = step_costs(machine, shape, 2000, 2048)
    assert costs.prefill_s(2048, 0, 2048) == pytest.approx(machine.prefill_s(shape, 2048), rel=1e-3)
    assert costs.prefill_s(8192, 0, 2048) == pytest.approx(machine.prefill_s(shape, 8192, 2048), rel=0.05)
    for batch in (1, 8, 64, 128):
        seconds = costs.reading_s(batch) + costs.decode_s(batch, batch * 2000)
        assert seconds == pytest.approx(machine.decode_s(shape, batch, 2000), rel=0.03), batch


def test_the_largest_batch_is_the_last_that_keeps_the_time() -> None:
    shape, machine = published_model("Llama-3.1-8B"), WorkerHardware(H100)
    batch = largest_batch(lambda batch: machine.decode_s(shape, batch, 2000), 0.03)
    assert machine.decode_s(shape, batch, 2000) <= 0.03 < machine.decode_s(shape, batch + 1, 2000)
    assert (
        largest_batch(lambda batch: machine.decode_s(shape, batch, 2000), tpot_floor_s(machine, shape, 2000) / 2) == 0
    )


def test_fp8_checkpoints_multiply_in_fp8_and_int8_weights_do_not() -> None:
    shape, machine = published_model("DeepSeek-V3"), WorkerHardware(H100, 8)
    auto, int8 = (replace(machine, held=replace(machine.held, quantization=profile)) for profile in ("auto", "int8"))
    assert (auto.number(shape), int8.number(shape)) == ("fp8", "bf16")
    assert auto.prefill_s(shape, 4096) < int8.prefill_s(shape, 4096)


def test_ranks_that_share_contexts_have_more_room_and_are_quicker_where_contexts_are_long() -> None:
    shape, copies = published_model("DeepSeek-V3"), WorkerHardware(HARDWARE["h200"], 8)
    parts = replace(copies, shares_contexts=True)
    assert parts.decode_s(shape, 64, 16_000) < 0.85 * copies.decode_s(shape, 64, 16_000)
    assert parts.decode_s(shape, 64, 500) > copies.decode_s(shape, 64, 500)
    assert parts.prefill_s(shape, 4096) > copies.prefill_s(shape, 4096)
    costs = step_costs(parts, shape, 2000, 2048)
    assert costs.prefill_s(65536, 0, 2048) == pytest.approx(parts.prefill_s(shape, 65536, 2048), rel=0.05)
    link = replace(parts, hardware=replace(parts.hardware, kernel_s=0.0, link_bytes_per_s=1.0))
    # All heads' absorbed queries, and their mixtures of latents, but for this rank's own.
    assert link.exchange_s(shape, 3, 0) == pytest.approx(3 * 61 * 7 / 8 * 128 * (576 + 512) * 2)
    assert link.exchange_s(shape, 0, 1000) == pytest.approx(1000 * 61 * 7 / 8 * 576 * 2)
    workload = Workload("short", ((1000, 100),))
    profiles = {
        profile.name: profile for profile in profiles_of(shape, parts.hardware, ("auto",), workload, PlanConstraints())
    }
    assert profiles["h200 x8 auto cp"].kv_tokens == pytest.approx(8 * profiles["h200 x8 auto"].kv_tokens, rel=1e-3)
    assert [profiles[name].copies for name in ("h200 x8 auto", "h200 x8 auto cp")] == [8, 1]
    sender = profiles["h200 x8 auto"]
    once, often = (late_s(sender, 4096, 0.0, 1.0, copies) - HANDOVER_S for copies in (1, 8))
    assert often == pytest.approx(8 * once)
    llama = published_model("Llama-3.1-70B")
    assert not any(
        profile.shares_contexts for profile in profiles_of(llama, H100, ("auto",), workload, PlanConstraints())
    )


def test_kv_and_money_are_counted_in_bytes_seconds_and_dollars() -> None:
    assert transfer_s(25e9, 12.5e9) == 2.0
    assert usd_per_million(3.6, 1000.0) == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="efficiency"):
        Efficiency(compute=1.2, read=0.5)


def test_the_limit_of_a_batch_that_binds_is_the_smallest() -> None:
    shape, machine = published_model("Llama-3.1-70B"), WorkerHardware(HARDWARE["a100-80gb"], 8).at_peak()
    weights = weight_bytes(shape, 2, "none")
    long, short = (batch_limits(machine, shape, weights, context, 0.05) for context in (4096, 512))
    assert (long.binds, long.batch) == ("memory", int(long.memory))
    assert (short.binds, short.batch) == ("compute", int(short.compute))
    assert long.memory == pytest.approx((8 * 80 * 2**30 - weights) / (1.25 * 2**30))
    hurried = batch_limits(machine, shape, weights, 4096, 0.011)
    assert (hurried.binds, hurried.memory) == ("bandwidth", long.memory)
    assert batch_limits(replace(machine, ranks=1), shape, weights, 4096, 0.05).batch == 0


def test_the_knee_is_the_last_batch_whose_doubling_paid() -> None:
    assert knee([1, 2, 4, 8, 16], [10, 19, 36, 66, 70]) == 8
    assert knee([1, 2, 4], [10, 11, 12]) == 1
    assert knee([1, 2, 4], [10, 20, 40]) == 4
    assert knee([1, 2, 4, 8, 16], [10, 13, 18, 30, 32]) == 8  # as of experts, of which more rows read more


def test_without_a_cache_a_request_computes_each_of_its_prefixes() -> None:
    shape = published_model("Llama-3.1-8B")
    each = [flops_of(prefill_operations(shape, 1000 + written)) for written in range(10)]
    assert uncached_flops(shape, 1000, 10) == pytest.approx(sum(each))
    assert uncached_flops(shape, 1000, 1) == cached_flops(shape, 1000, 1) == each[0]
    assert cached_flops(shape, 1000, 10) < 1.02 * each[0]
    mha = as_mha(shape)
    assert kv_bytes(mha) == 4 * kv_bytes(shape)
    assert uncached_flops(mha, 1000, 10) > uncached_flops(shape, 1000, 10)


def test_layers_with_windows_keep_the_last_tokens_alone() -> None:
    mistral, gpt_oss = published_model("Mistral-7B-v0.1"), published_model("gpt-oss-20b")
    assert kv_bytes(mistral, 100_000) == kv_bytes(mistral, 4096)
    assert kv_bytes(gpt_oss, 100_000) == pytest.approx(kv_bytes(gpt_oss, 1) * (100_000 + 128) / 2)


def test_a_transfer_that_takes_what_others_prompts_would_is_at_the_border() -> None:
    found = Interference(prefill_s=0.2, answer=256, step_s=0.01, batch=8, kv_bytes=2**28)
    assert found.waits_s == pytest.approx(8 * 0.2)
    assert found.rate * (256 * 0.01 + found.waits_s) == pytest.approx(8)
    assert transfer_s(found.kv_bytes, found.slowest_link) == pytest.approx(found.waits_s)
    assert found.shortest_answer(found.slowest_link) == pytest.approx(256)
    assert found.shortest_answer(10 * found.slowest_link) == pytest.approx(25.6)


def test_a_request_pays_for_its_prompt_and_its_part_of_the_steps() -> None:
    assert request_usd(3600.0, 0.5, 8.0, 16) == pytest.approx(1.0)

"""`twostroke capacity`: the literature's cases come out, by name and by bare numbers, and errors name flags."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from twostroke.cluster.cli import main
from twostroke.loadtests.generator.run_facts import machine_facts
from twostroke.model import machine_limits
from twostroke.model.costs.sizes import num_parameters
from twostroke.model.published.hardware import HARDWARE
from twostroke.model.published.models import published_model
from twostroke.planning.commands.options import amount
from twostroke.planning.costs.capacity import continuous_gain, model_of_numbers, shown

NUMBERS = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--dtype", "fp16")


def told(capsys: pytest.CaptureFixture[str], *arguments: str, simulates: bool = False) -> dict[str, Any]:
    assert main(["capacity", *arguments, "--json", *([] if simulates else ["--formulas"])]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line, parse_constant=pytest.fail)
    return found


def test_of_70b_on_eight_gpus_memory_binds_and_not_the_promise(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("Llama-3.1-70B", "--gpu", "a100-80gb", "--gpus", "8", "--tpot", "0.05", "--context", "512,4096")
    found = told(capsys, *asked)
    assert found["weight_bytes_of_each_gpu"] == pytest.approx(17.5e9, rel=0.01)
    short, long = found["requests"]
    assert (long["largest"], long["binds"]) == (406, "memory")
    assert (long["by_bandwidth"], long["by_compute"]) == (502, 833)
    assert (short["largest"], short["binds"]) == (short["by_compute"], "compute")
    assert long["expected"] == min(long["expected_to_fit"], long["expected_in_tpot"]) < long["largest"]


def test_of_7b_at_2_terabytes_a_second_one_sequence_has_at_most_143_tokens_a_second(
    capsys: pytest.CaptureFixture[str],
) -> None:
    by_parameters = ("--layers", "32", "--kv-heads", "32", "--head-dim", "128", "--parameters", "7e9")
    found = told(capsys, *by_parameters, "--dtype", "fp16", "--memory", "80GB", "--bandwidth", "2TB")
    assert found["most_tokens_per_s_of_one_sequence"] == pytest.approx(142.9, rel=0.01)
    assert found["floors"][0]["ttft_floor_s"] is None  # nobody said how fast it computes
    assert found["requests"][0]["by_compute"] is None
    assert not {"costs", "ridges", "hours"} & found.keys()


def test_the_floors_of_llama_2_7b_on_an_a100_are_below_what_is_told_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    floors = told(capsys, "Llama-2-7b", "--gpu", "a100-80gb", "--context", "2048")["floors"][0]
    assert floors["ttft_floor_s"] == pytest.approx(0.0888, rel=0.01)
    assert floors["tpot_floor_s"] == pytest.approx(0.0070, rel=0.01)
    assert floors["tpot_floor_s"] < floors["tpot_expected_s"] < 0.012
    asked = ("Llama-2-7b", "--gpu", "a100-80gb", "--context", "2048", "--efficiency", "1,1")
    at_peak = told(capsys, *asked)["floors"][0]
    assert at_peak["tpot_expected_s"] == pytest.approx(floors["tpot_floor_s"] + 0.001)  # and the host's


def test_405b_without_a_cache_is_told_with_its_heads_and_as_mha(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("Llama-3.1-405B", "--gpu", "h200", "--gpus", "8", "--context", "100000")
    rows = {(row["heads"], row["what"]): row for row in told(capsys, *asked)["without_kv_cache"]}
    as_it_is, mha = (rows[heads, "a token at 100,000"] for heads in ("as they are", "MHA"))
    assert as_it_is["flops"] == pytest.approx(8.0e16 + 8.26e16 / 2, rel=0.01)
    assert mha["flops"] > 1.1 * as_it_is["flops"]
    assert as_it_is["hours"] == pytest.approx(as_it_is["flops"] / (8 * 989.5e12) / 3600)
    assert as_it_is["with_cache_flops"] == pytest.approx(1.635e12, rel=0.01)
    alone = ("--mha", "--memory", "8TB", "--bandwidth", "27TB", "--flops", "8e15", "--context", "100000")
    found = told(capsys, "Llama-3.1-405B", *alone)
    assert found["kv_bytes_per_token"] == 8064 * 1024
    assert {row["heads"] for row in found["without_kv_cache"]} == {"as they are"}


def test_a_batch_keeps_a_promise_longer_where_answers_repeat_earlier_text(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("Llama-3.1-8B", "--gpu", "h100-80gb", "--tpot", "0.012", "--context", "2048")
    plain, drafted = told(capsys, *asked), told(capsys, *asked, "--repeated", "0.6")
    assert drafted["requests"][0]["expected_in_tpot"] > 1.5 * plain["requests"][0]["expected_in_tpot"]
    assert drafted["floors"][0]["tpot_expected_s"] < 0.7 * plain["floors"][0]["tpot_expected_s"]
    assert drafted["sweep"][0]["tokens_per_s"] > 1.5 * plain["sweep"][0]["tokens_per_s"]
    assert drafted["floors"][0]["tpot_floor_s"] == plain["floors"][0]["tpot_floor_s"]


def test_bare_numbers_tell_kv_and_what_more_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", *NUMBERS, "--context", "4096"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["kv_bytes_per_token"] == 128 * 1024
    assert json.loads(last)["kv_of_a_request"][0]["kv_bytes"] == 2**29
    assert any("give --parameters" in line for line in lines)


def test_the_numbers_of_a_model_are_that_model() -> None:
    shape, llama = model_of_numbers(32, 8, 128, 32, 4096, 14336, 128_256), published_model("Llama-3.1-8B")
    assert num_parameters(shape) == num_parameters(llama)
    guessed = model_of_numbers(32, 8, 128, parameters=8e9)
    assert num_parameters(guessed) == pytest.approx(8e9, rel=0.01)
    assert guessed.num_heads % 8 == 0


def test_intensity_sweep_and_costs_agree_with_one_another(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "Llama-3.1-8B", "--gpu", "h100-80gb", "--usd-per-hour", "3.6")
    ridges = {row["number"]: (row["dense"], row["sparse"]) for row in found["ridges"]}
    assert ridges["bf16"] == pytest.approx((295.4, 590.7), rel=1e-3)
    assert ridges["fp8"][0] == pytest.approx(ridges["bf16"][1])
    prefill, *decode = [row for row in found["intensity"] if row["context"] == 512]
    assert prefill["bound_by"] == "FLOPs"
    assert [row["MLP"] == pytest.approx(row["batch"], rel=0.2) for row in decode] == [True] * 3
    assert all(row["attention"] == pytest.approx(4, rel=0.02) for row in decode)
    rates = [row["tokens_per_s"] for row in found["sweep"]]
    assert (found["sweep"][0]["batch"], found["sweep"][-1]["batch"]) == (1, 512)
    assert rates == sorted(rates)
    assert 32 <= found["knee"] <= 256
    costs = {row["batch"]: row for row in found["costs"]}
    assert [row["batch"] for row in costs.values() if row["is_best"]] == [256]
    assert costs[1]["usd_per_million_tokens"] > 5 * costs[8]["usd_per_million_tokens"]
    assert costs[8]["request_usd"] == pytest.approx(costs[8]["usd_per_million_tokens"] * 256 / 1e6)


def test_what_is_simulated_stands_beside_what_formulas_say(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "Llama-3.1-8B", "--gpu", "a100-80gb", "--prompt", "2048", simulates=True)
    batching = found["batching"]
    assert 1 < batching["simulated_gain"] < batching["longest_over_mean"]
    wastes = [row["waste"] for row in found["allocation"]]
    assert wastes == sorted(wastes, reverse=True)
    largest, *_, blocks = found["allocation"]
    assert blocks["requests_over_largest"] > 2
    assert blocks["tokens_per_s"] > 1.2 * largest["tokens_per_s"]  # memory is short, and so this matters
    border = found["transfer_border"]
    assert 1 < border["simulated_bytes_per_s"] / border["border_bytes_per_s"] < 3


def test_this_machine_is_measured_where_no_gpu_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = [machine_limits.MachineLimits(50e9, 10e9)]
    monkeypatch.setattr(machine_limits, "measure_rounds", lambda *_: (measured, machine_limits.torch.float32))
    monkeypatch.setattr(machine_limits, "available_bytes", lambda _: 64 << 30)
    found = told(capsys, "Qwen3-8B")
    row = machine_limits.hardware_row(measured, machine_limits.torch.float32, "this-cpu", 1.0, machine_facts()["cpu"])
    assert found["hardware"] == row.title
    (tmp_path / "cpu.json").write_bytes(msgspec.json.encode(row))
    assert told(capsys, "Qwen3-8B", "--gpu", str(tmp_path / "cpu.json")) == found
    cuda = machine_limits.torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=85 * 10**9))
    assert told(capsys, "Qwen3-8B")["hardware"] == HARDWARE["h100-80gb"].title
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    assert main(["capacity", "Qwen3-8B", "--gpus", "2"]) == 2
    assert "one machine's all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a MODEL, or give --layers"),
        (["--layers", "32"], "name a MODEL, or give --layers"),
        (["Llama-3.1-8B", "--layers", "32"], "--layers: beside MODEL"),
        (["Llama-3.1-8B", "--gpu", "h100"], "--gpu h100: no such GPU"),
        (["Llama-3.1-8B", "--gpu", "h200", "--memory", "80GB"], "--memory: beside --gpu"),
        (["Llama-3.1-8B", "--memory", "80GB"], "--memory and --bandwidth: give both"),
        (["Llama-3.1-8B", "--memory", "80GB", "--bandwidth", "2TB", "--report", "x"], "--report: give --flops"),
        (["Llama-3.1-8B", "--flops", "312T"], "--memory and --bandwidth: give both"),
        (["Llama-3.1-8B", "--gpu", "l4", "--efficiency", "half"], "--efficiency half: write COMPUTE,READ"),
        (["Llama-3.1-70B", "--gpu", "l4"], "leave no room for KV"),
        (["gemma-3-1b", "--gpu", "h200", "--gpus", "8"], "tensor_parallel: 8 ranks"),
    ],
)
def test_what_cannot_be_told_names_the_flag(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["capacity", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_amounts_are_read_and_shown_with_their_units() -> None:
    assert [amount(text) for text in ("80GB", "80GiB", "2TB", "2TB/s", "2e12", "312TFLOP/s", "1.5k")] == [
        *(80e9, 80 * 2**30, 2e12, 2e12, 2e12, 312e12, 1500.0)
    ]
    with pytest.raises(SystemExit):
        main(["capacity", "Llama-3.1-8B", "--memory", "80 cats", "--bandwidth", "2TB"])
    assert shown("weight_bytes", HARDWARE["h200"].memory_bytes) == "151.4 GB"
    assert (shown("kv_bytes", 2**29), shown("tpot_s", 0.0125), shown("link_bytes_per_s", 25e9)) == (
        *("512 MiB", "12.5 ms", "25 GB/s"),
    )


def test_static_batches_wait_for_their_longest_answers() -> None:
    assert continuous_gain([10, 20, 30, 100], 4) == 2.5
    assert continuous_gain([10, 20, 30, 100], 2) == pytest.approx((40 + 200) / 160)
    assert continuous_gain([7, 7, 7], 2) == 1.0

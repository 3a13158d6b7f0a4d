"""The bench for GPUs over tiny sizes in the interpreter: that all of it runs, what it says, and that it always does."""

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.model.conftest import TINY as TINY_MODEL
from tests.rigs.gpu_dry_run import DRY, TINY
from twostroke.benchmarks.gpu import command as gpu
from twostroke.benchmarks.gpu.command import Kind
from twostroke.benchmarks.gpu.limits import GpuLimits, GpuPlace, LimitRow, Sizes
from twostroke.cluster.cli import main
from twostroke.model.checkpoint.config_file import parse_model_config

Summary = dict[str, object]
GOOD, POOR = LimitRow("good", 0.9, 0.8, "1 s", "a limit", predicted=0.95), LimitRow("poor", 0.7, 0.8, "2 s", "a limit")


@pytest.fixture
def last_line(capsys: pytest.CaptureFixture[str]) -> Callable[[], Summary]:
    def read() -> Summary:
        summary: Summary = json.loads(capsys.readouterr().out.splitlines()[-1])
        return summary

    return read


ONE_OF_EACH = Sizes(
    model=parse_model_config({**TINY_MODEL, "num_hidden_layers": 1, "vocab_size": 32}, "test"),
    block_size=16,
    read_bytes=1024,
    gemm_size=16,
    attention_lengths=(8,),
    attention_tokens=16,
    prefix=8,
    chunk=8,
    prompts=(5,),
    small_prompts=((3, 0.9),),
    decode_batches=(2,),
    decode_context=5,
    decode_steps=1,
    turns=1,
    long_decodes=((2, 9),),
    skewed_decode=(30, (2, 5)),
    gated_tokens=(2,),
    gated_prompts=(3,),
    fp8_tokens=(3,),
    experts=(3, 2, 16, 32),
    expert_tokens=(2,),
    window=4,
    windowed_prompt=9,
    windowed_decodes=((2, 9),),
    sampled_rows=(2,),
    pack_blocks=(16,),
    pack_bytes=4096,
)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("sizes", [ONE_OF_EACH, pytest.param(TINY, marks=pytest.mark.wide)], ids=["thin", "whole"])
def test_a_dry_run_launches_all_rows_but_a_processs_start(sizes: Sizes, last_line: Callable[[], Summary]) -> None:
    chosen = [name for name in gpu.KINDS if name != "start"]
    assert gpu.measure_all(sizes, DRY, chosen, budget_s=600) == 0
    summary = last_line()
    assert summary["failed"] == {}
    assert summary["left_out"] == []
    ratios = summary["ratios"]
    assert isinstance(ratios, dict)
    assert summary["rows"] == len(ratios)
    for name in (
        "attention, paged, after a prefix",
        "decode attention, batch 2",
        "over FP8, batch 2",
        "FP8 by FP8, 3 tokens",
        "gate and up in one launch, 2 tokens",
        "window",
        "KV unpack",
        "top_p 0.9",
    ):
        assert any(name in row for row in ratios), name
    for name in ("prefill, 5 tokens", "GPU busy, prompt of 3 tokens", "GPU busy, batch 2", "decode in int4, batch 1"):
        assert name in ratios


def test_a_dry_run_has_as_many_rows_as_a_real_one() -> None:
    for field in dataclasses.fields(Sizes):
        real, tiny = getattr(Sizes(), field.name), getattr(TINY, field.name)
        if isinstance(real, tuple):
            assert len(tiny) == len(real), field.name


@pytest.fixture
def without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "measure_limits", lambda *_: GpuLimits(1e12, 1e12, 1e12))


@pytest.mark.usefixtures("without_limits")
def test_a_kind_of_row_that_fails_leaves_the_others_and_its_own_earlier_rows(
    last_line: Callable[[], Summary], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> Iterator[LimitRow]:
        yield GOOD
        raise RuntimeError("no room\nat all")

    def one(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> Iterator[LimitRow]:
        yield POOR

    monkeypatch.setattr(gpu, "KINDS", {"bad": Kind(fail, 1), "some": Kind(one, 1)})
    assert gpu.measure_all(TINY, DRY, ["bad", "some"], 600) == 1
    summary = last_line()
    assert summary["failed"] == {"bad": "RuntimeError: no room"}
    assert (summary["rows"], summary["missed"], summary["predicted"]) == (2, ["poor"], {"good": 0.95})


@pytest.mark.usefixtures("without_limits")
def test_a_kind_whose_share_of_the_time_is_up_leaves_the_rest_to_the_next(
    last_line: Callable[[], Summary], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: now)

    def slow(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> Iterator[LimitRow]:
        nonlocal now
        for index in range(10):
            now += 100
            yield dataclasses.replace(GOOD, name=f"slow {index}")

    def one(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> Iterator[LimitRow]:
        yield POOR

    monkeypatch.setattr(gpu, "KINDS", {"slow": Kind(slow, 3), "some": Kind(one, 1)})
    assert gpu.measure_all(TINY, DRY, ["slow", "some"], 400) == 0
    summary = last_line()
    assert summary["ratios"] == {"slow 0": 0.9, "slow 1": 0.9, "slow 2": 0.9, "poor": 0.7}
    assert summary["left_out"] == ["slow"]


@pytest.mark.usefixtures("without_limits")
def test_the_json_is_printed_when_the_time_is_up_in_the_midst_of_a_row(
    last_line: Callable[[], Summary], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, codes = threading.Event(), list[int]()

    def hang(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> Iterator[LimitRow]:
        yield GOOD
        assert left.wait(20)
        yield POOR

    def leave(code: int) -> None:
        codes.append(code)
        left.set()

    monkeypatch.setattr(gpu, "KINDS", {"hanging": Kind(hang, 1)})
    assert gpu.measure_all(TINY, DRY, ["hanging"], 0.05, leave) == 1
    summary = last_line()
    assert codes == [1]
    assert summary["failed"] == {"hanging": "not ended in time"}
    assert summary["rows"] == 1


@pytest.mark.usefixtures("without_limits")
def test_the_json_is_printed_when_somebody_interrupts(
    last_line: Callable[[], Summary], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> Iterator[LimitRow]:
        yield GOOD
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "KINDS", {"some": Kind(interrupted, 1)})
    with pytest.raises(KeyboardInterrupt):
        gpu.measure_all(TINY, DRY, ["some"], 600)
    assert last_line()["rows"] == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="for hosts without a GPU")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu"]) == 2
    assert capsys.readouterr().err == ("twostroke: bench gpu needs a CUDA device, and torch finds none here\n")
    for arguments, fault in ((["--only", "prefil"], "prefil is none of steps"), (["--budget", "0"], "--budget: 0 is")):
        assert main(["bench", "gpu", *arguments]) == 2
        assert fault in capsys.readouterr().err

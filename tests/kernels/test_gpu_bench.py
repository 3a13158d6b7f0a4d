"""The bench for GPUs, whole, over tiny sizes in the interpreter: that it runs, and what it says."""

import json
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.model.conftest import TINY as TINY_MODEL
from tests.model.test_captured_steps import Repeating
from twostroke.benchmarks.gpu import command as gpu
from twostroke.benchmarks.gpu.limits import GpuLimits, GpuPlace, Row, Sizes
from twostroke.cluster.cli import main
from twostroke.model.checkpoint.config_file import parse_model_config
from twostroke.model.cuda.kernels.launch import H100

TINY = Sizes(
    model=parse_model_config({**TINY_MODEL, "num_hidden_layers": 1, "vocab_size": 32}, "test"),
    block_size=16,
    read_bytes=1024,
    gemm_size=16,
    attention_lengths=(8,),
    attention_tokens=16,
    prefix=8,
    chunk=8,
    prompts=(5,),
    decode_batches=(2,),
    decode_context=5,
    decode_steps=2,
    long_decodes=((2, 9),),
    window=4,
    windowed_prompt=9,
    windowed_decodes=((2, 9),),
    sampled_rows=(2,),
    pack_blocks=(16,),
    pack_bytes=4096,
)


class WallClock:
    """Once is enough here."""

    def seconds(self, run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    queued_seconds = seconds


@pytest.fixture
def place(interpreter: None) -> GpuPlace:
    return GpuPlace(torch.device("cpu"), H100, WallClock(), Repeating)


def test_all_rows_are_measured_and_summed_up_in_the_last_line(
    place: GpuPlace, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [name for name in gpu.MEASURES if name != "start"]
    assert gpu.measure_all(TINY, place, chosen, seconds=600) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out.splitlines()[-1])
    assert summary["failed"] == {}
    assert {
        "prefill attention, 2 x 8",
        "prefill attention, paged, after a prefix",
        "decode attention, batch 2, context 9",
        "prefill attention, 9, window 4",
        "decode attention, 2 x 9, window 4",
        "KV unpack, blocks of 16",
        "sampling 2 rows, top_p 0.9",
        "prefill, 5 tokens",
        "decode, batch 2",
        "GPU busy, batch 2",
        "decode in int4, batch 1",
    } <= set(summary["ratios"])
    assert len(out.splitlines()) == len(summary["ratios"]) + 2
    assert all(name in err for name in chosen)


def test_a_kind_of_row_that_fails_leaves_the_others(
    place: GpuPlace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> list[Row]:
        raise RuntimeError("no room\nat all")

    def two(sizes: Sizes, place: GpuPlace, limits: GpuLimits) -> list[Row]:
        return [Row("good", 0.9, 0.8, "1 s", "a limit"), Row("poor", 0.7, 0.8, "2 s", "a limit")]

    monkeypatch.setattr(gpu, "MEASURES", {"bad": fail, "some": two})
    assert gpu.measure_all(TINY, place, ["bad", "some"], seconds=600) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["failed"] == {"bad": "RuntimeError: no room"}
    assert summary["missed"] == ["poor"]
    assert gpu.measure_all(replace(TINY, read_bytes=2048), place, ["some"], seconds=0) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failed"] == {"some": "not begun in time"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="for hosts without a GPU")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu"]) == 2
    assert capsys.readouterr().err == "twostroke: bench gpu needs a CUDA device, and torch finds none here\n"
    assert main(["bench", "gpu", "--only", "prefil"]) == 2
    assert "prefil is none of attention" in capsys.readouterr().err

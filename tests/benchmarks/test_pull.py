"""The part `pull` of `bench transfer`, on the CPU: all of it but for the device's own calls."""

import json

import pytest
import torch

from twostroke.benchmarks.transfers import pull
from twostroke.benchmarks.transfers.pull import DRY, PromptOrder, PullSizes, Source, measure_pulls
from twostroke.benchmarks.transfers.worker_process import _Manager
from twostroke.cluster.cli import main
from twostroke.protocol.errors import TransferFailed, WorkerLost


def test_a_dry_run_has_all_of_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--device", "cuda", "--dry-run"]) == 0
    told = capsys.readouterr()
    figures = json.loads(told.out.splitlines()[-1])
    rates = {"copy_gb_s", "pull_gb_s", "pull_at_once_gb_s", "pull_under_load_gb_s", "load_tflop_s", "load_kept"}
    times = {f"{name}_p{percent}_s" for name in ("pulled_alone", "pulled_under_load") for percent in (50, 99)}
    assert figures.keys() == rates | times
    assert all(value > 0 for value in figures.values())
    assert "pulled_under_load_p50_s" in told.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="for hosts without a GPU")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transfer", "--device", "cuda"]) == 2
    assert "--device cuda needs a CUDA device, and torch finds none here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--device", "cuda", "--parts", "exposed", "pull"], "exposed is none of pull, handover"),
        (["--dry-run", "--parts", "handover"], "handover is none of pull"),
    ],
)
def test_parts_that_can_not_be_had_there_are_refused(
    options: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "transfer", *options]) == 2
    assert fault in capsys.readouterr().err


class _Ending(Source):
    def send(self, order: PromptOrder) -> float:
        raise TransferFailed("no KV today")


async def test_a_source_that_fails_fails_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Manager, "_registry", {}, raising=False)  # which is pickled by its classes' names
    monkeypatch.setattr(pull, "Source", _Ending)
    with pytest.raises(WorkerLost, match="no KV today"):
        await measure_pulls("cpu", DRY)


async def test_kv_that_is_not_the_sources_fails_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "fill", lambda layer, seed: layer.fill_(seed))  # here, not in the source's process
    with pytest.raises(TransferFailed, match="not what the source has"):
        await measure_pulls("cpu", DRY)


@pytest.mark.parametrize("sizes", [*pull.SIZES.values(), DRY])
def test_what_is_pulled_fits_into_the_cache(sizes: PullSizes) -> None:
    assert pull.AT_ONCE * sizes.prompt_tokens <= sizes.num_blocks * sizes.block_size

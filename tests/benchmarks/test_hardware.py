"""A measured CPU is a row of the planner's table: what was measured comes back from the file, and is planned with."""

import json
from pathlib import Path

import msgspec
import pytest
import torch

from twostroke.cluster.cli import main
from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.costs.operations import MachineLimits
from twostroke.model.machine_limits import hardware_row
from twostroke.model.published.hardware import known_hardware
from twostroke.planning.search import PlanConstraints, profiles_of, worker_hardware
from twostroke.planning.workload import Workload
from twostroke.protocol.errors import ConfigError

ROUNDS = [MachineLimits(gemm, read) for gemm, read in ((40e9, 9e9), (60e9, 12e9), (50e9, 50e9))]


def test_the_row_is_the_medians_and_comes_back_from_its_file(tmp_path: Path) -> None:
    row = hardware_row(ROUNDS, torch.float32, "this-cpu", 0.1)
    assert (row.native, row.flops_per_s, row.read_bytes_per_s) == ("fp32", {"fp32": 50e9}, 12e9)
    assert row.ridge() == pytest.approx(50 / 12)
    file = tmp_path / "cpu.json"
    file.write_bytes(msgspec.json.encode(row))
    assert known_hardware(str(file)) == row
    held = worker_hardware(row, 1, "auto", PlanConstraints()).held
    assert (held.itemsize, held.kv_itemsize) == (4.0, 4.0)
    assert hardware_row(ROUNDS, torch.bfloat16, "this-cpu", 0.1).itemsize == 2.0


def test_a_measured_cpu_is_planned_with_one_rank_a_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cpu.json"
    file.write_bytes(msgspec.json.encode(hardware_row(ROUNDS, torch.float32, "this-cpu", 0.1)))
    asked = ["plan", "bundled", "--gpu", str(file), "--gpus", "3", "--formulas", "--json", "--workload", "fixed"]
    served = [*asked, "--slo", "ttft_p90_s=2,tpot_p90_s=0.2", "--output", str(tmp_path / "serving.yaml")]
    assert main(served) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    shape, workload = load_model_config(BUNDLED_MODEL_DIR), Workload("short", ((100, 10),))
    assert [
        kind.ranks for kind in profiles_of(shape, known_hardware(str(file)), ("auto",), workload, PlanConstraints())
    ] == [1]
    assert set(best["hardware"].values()) == {"this-cpu"}
    assert "num_gpus" not in (tmp_path / "serving.yaml").read_text()


@pytest.mark.parametrize("content", ["{", '{"name": "x"}', None])
def test_a_file_that_is_no_row_says_how_one_is_made(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "cpu.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="twostroke bench machine --hardware"):
        known_hardware(str(file))


def test_a_row_without_a_figure_is_refused(tmp_path: Path) -> None:
    row = hardware_row([MachineLimits(0.0, 1e9)], torch.float32, "this-cpu", 0.1)
    file = tmp_path / "cpu.json"
    file.write_bytes(msgspec.json.encode(row))
    with pytest.raises(ConfigError, match="above 0"):
        known_hardware(str(file))

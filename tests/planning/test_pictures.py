"""Pictures are drawn, and say what they are."""

from pathlib import Path

import pytest

from twostroke.model.published.hardware import HARDWARE
from twostroke.model.published.models import published_model
from twostroke.planning.costs.capacity import CapacityCase
from twostroke.planning.costs.pictures import batch_sweep, case_pictures, phases, roofline, write_pictures
from twostroke.planning.costs.roofline import WorkerHardware
from twostroke.planning.search import PlanConstraints, worker_hardware
from twostroke.protocol.errors import ConfigError

PNG = b"\x89PNG"


def test_equal_data_draw_equal_pictures() -> None:
    shape, machine = published_model("Llama-3.1-8B"), WorkerHardware(HARDWARE["h100-80gb"])
    drawn = [roofline(machine, shape, phases(shape, machine.held, 2048, 32, 2048)) for _ in range(2)]
    assert drawn[0].png.startswith(PNG)
    assert drawn[0] == drawn[1]
    assert batch_sweep([1, 2, 4], {"a": [99.0, 180.0, 300.0], "b": [90.0, 160.0, 200.0]}, {"knee": 2}).png.startswith(
        PNG
    )


def test_a_case_is_drawn_in_four_pictures(tmp_path: Path) -> None:
    terms = PlanConstraints()
    machine = worker_hardware(HARDWARE["h100-80gb"], 1, "auto", terms)
    case = CapacityCase("Llama-3.1-8B", published_model("Llama-3.1-8B"), machine, terms, (4096,), 0.05, 512, 256)
    write_pictures(tmp_path / "report", case_pictures(case))
    drawn = {file.name: file.read_bytes() for file in (tmp_path / "report").iterdir()}
    assert drawn.keys() == {"roofline.png", "batch_sweep.png", "kv_by_context.png", "intensity_by_phase.png"}
    assert all(png.startswith(PNG) for png in drawn.values())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--report"):
        write_pictures(tmp_path / "file" / "report", [])

"""Pictures are drawn, and say what they are."""

from twostroke.advisor.pictures import batch_sweep, phases, roofline
from twostroke.planner.floors import Machine
from twostroke.planner.hardware import HARDWARE
from twostroke.planner.models import published_model

PNG = b"\x89PNG"


def test_equal_data_draw_equal_pictures() -> None:
    shape, machine = published_model("Llama-3.1-8B"), Machine(HARDWARE["h100-80gb"])
    drawn = [roofline(machine, shape, phases(shape, machine.held, 2048, 32, 2048)) for _ in range(2)]
    assert drawn[0].png.startswith(PNG)
    assert drawn[0] == drawn[1]
    assert batch_sweep([1, 2, 4], [0.01, 0.011, 0.013], most=4).png.startswith(PNG)

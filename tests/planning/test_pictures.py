"""Pictures are drawn, and say what they are."""

from twostroke.model.published.hardware import HARDWARE
from twostroke.model.published.models import published_model
from twostroke.planning.pictures import batch_sweep, phases, roofline
from twostroke.planning.roofline import Machine

PNG = b"\x89PNG"


def test_equal_data_draw_equal_pictures() -> None:
    shape, machine = published_model("Llama-3.1-8B"), Machine(HARDWARE["h100-80gb"])
    drawn = [roofline(machine, shape, phases(shape, machine.held, 2048, 32, 2048)) for _ in range(2)]
    assert drawn[0].png.startswith(PNG)
    assert drawn[0] == drawn[1]
    assert batch_sweep([1, 2, 4], [0.01, 0.011, 0.013], most=4).png.startswith(PNG)

"""What a fake engine is to answer."""

from tests.simulation.fake_model import expected_tokens
from tests.simulation.worker_rig import LAYERS
from twostroke.protocol.requests import GenerateRequest


def expected(request: GenerateRequest) -> list[tuple[int, int]]:
    return list(enumerate(expected_tokens(request, LAYERS)))

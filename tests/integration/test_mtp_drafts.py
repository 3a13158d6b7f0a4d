"""Answers with drafts of a checkpoint's MTP head are those without, on real engines; and the drafts do take part.

The text is no source of drafts here. Layers add so little to the embedding that the head, which sees the embedding
alone, is mostly right.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.local_fleet import Shape
from tests.integration.test_speculation import KINDS, OFF, answers_of
from tests.model.architectures.test_mtp import SHAPES, write_mtp_checkpoint
from twostroke.model.checkpoint.weights import SINGLE_FILE
from twostroke.worker.speculator import SuffixTokens

MTP = {"speculation": {"method": "mtp", "corpus_tokens": 0}}
BASE = Shape(None, num_blocks=512)
FLEETS = {
    "aggregated": BASE,
    "disaggregated": replace(BASE, transport="tcp"),
    "pressure": replace(BASE, num_blocks=40, block_size=4, decode={"preemption": "recompute"}),
    "swap": replace(
        BASE, num_blocks=40, block_size=4, swap_bytes=2**20, decode={"preemption": "swap", "swap_gib": 1.0}
    ),
    "ranks": replace(BASE, transport="tcp", decode_ranks=2),
}
IN_MAKE_TEST = ("disaggregated", "pressure")
CASES = [
    *(
        pytest.param("glm4_moe", fleet, id=fleet, marks=[] if fleet in IN_MAKE_TEST else pytest.mark.models)
        for fleet in FLEETS
    ),
    pytest.param("deepseek_v3", "disaggregated", id="deepseek_v3", marks=pytest.mark.models),
    pytest.param("deepseek_v32", "disaggregated", id="deepseek_v32", marks=pytest.mark.models),
]


def make_head_right(folder: Path) -> None:
    """Let the next token follow from the embedding alone, nearly, in the model as in its head."""
    tensors = load_file(folder / SINGLE_FILE)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.005)
        if name.endswith("eh_proj.weight"):
            hidden = len(tensor)
            tensor.copy_(torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1))
        if name.endswith(("enorm.weight", "shared_head.norm.weight")):
            tensor.fill_(1.0)
    tensors["model.norm.weight"].fill_(1.0)
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})


@pytest.mark.parametrize(("model", "fleet"), CASES)
async def test_drafts_of_the_head_change_no_answer(
    model: str, fleet: str, write_checkpoint: Any, cheap_rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SuffixTokens, "longest_match", lambda self, *args: None)
    folder = write_mtp_checkpoint(write_checkpoint, SHAPES[model])
    make_head_right(folder)
    shape = FLEETS[fleet]
    plain, drafted, _ = await answers_of(folder, replace(shape, decode={**shape.decode, **OFF}))
    assert drafted == 0
    answers, drafted, accepted = await answers_of(folder, replace(shape, has_mtp=True, decode={**shape.decode, **MTP}))
    for name, answer, expected in zip(KINDS, answers, plain, strict=True):
        assert answer.is_like(expected), name
    assert accepted > 0.4 * drafted > 100, f"{accepted} of {drafted}"

"""Experts in each form of weights, on each unit that this CPU can multiply bf16 with, against the reference."""

from typing import Any

import pytest
import torch

from tests.model.architectures.test_experts import choices, close, expert_weights
from tests.model.cpu.test_linears import FORMS, PoisonedLauncher, needs_avx512_bf16
from tests.rigs import reference
from twostroke.model.backend import Chosen
from twostroke.model.config import Routing
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.cpu.experts import make_experts

WEIGHTS = ["bf16", *FORMS, "fp4 by 32"]


def weights_of(form: str) -> Any:
    """Return weights with outputs that fill no panel, and inputs that fill neither a depth of AMX's tiles nor a
    group."""
    return expert_weights(torch.bfloat16, form="" if form == "bf16" else form, size=72, hidden=328)


@needs_avx512_bf16
@pytest.mark.usefixtures("on_each_unit")
@pytest.mark.parametrize("form", WEIGHTS)
def test_experts_with_few_and_with_many_rows_compute_what_the_reference_does(form: str) -> None:
    weights = weights_of(form)
    for tokens in (1, 9, 50, 700):  # so experts have from one row to more than a task may
        generator = torch.Generator().manual_seed(tokens)
        x, chosen = torch.randn(tokens, 328, generator=generator).bfloat16(), choices(tokens, 5, 2)
        actual = make_experts(weights, "silu", "auto", torch.bfloat16, PoisonedLauncher())(x, chosen)
        close(actual, reference.experts(x, chosen, weights, "silu"))


@needs_avx512_bf16
@pytest.mark.usefixtures("on_each_unit")
@pytest.mark.parametrize("form", ["bf16", "int8 by rows", "int4 by 32", "fp4 by 32"])
def test_a_tokens_bits_are_the_same_at_experts_with_few_and_with_many_rows(form: str) -> None:
    experts = make_experts(weights_of(form), "silu", "auto", torch.bfloat16, CpuBackend().launcher)
    x, chosen = torch.randn(700, 328).bfloat16(), choices(700, 5, 2)
    together = experts(x, chosen)
    for part in (slice(0, 1), slice(7, 40), slice(80, 200)):
        alone = Chosen(chosen.experts[part].contiguous(), chosen.weights[part].contiguous())
        assert torch.equal(experts(x[part].contiguous(), alone), together[part])


@needs_avx512_bf16
@pytest.mark.usefixtures("on_each_unit")
@pytest.mark.parametrize("form", ["bf16", "int8 by rows", "int4 by 32"])
def test_a_replay_gives_experts_the_rows_of_its_own_tokens(form: str) -> None:
    """Rows per expert vary from one each to all on one."""
    backend = CpuBackend()
    experts = make_experts(weights_of(form), "silu", "auto", torch.bfloat16, backend.launcher)
    x, logits, routing = torch.empty(90, 328, dtype=torch.bfloat16), torch.empty(90, 5), Routing(5, 2)
    with torch.inference_mode(), backend.launcher.recording() as program:
        out = experts(x, backend.route(logits, None, routing))
    for spread in (0.0, 1.0, 9.0):
        x.copy_(torch.randn(90, 328))
        logits.copy_(torch.randn(90, 5) + spread * torch.arange(5.0))
        program.replay()
        assert torch.equal(out, experts(x, backend.route(logits, None, routing)))

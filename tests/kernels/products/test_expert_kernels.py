"""Routing and experts in Triton's interpreter, against the references."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from tests.kernels.paged_cases import ReferenceBackend
from tests.model.architectures.test_experts import (
    EXPERTS,
    V2,
    V3,
    choices,
    close,
    expert_weights,
    filled_with_nan,
    some_of,
)
from tests.model.parallel.test_expert_slots import FORMS, check_copies
from tests.rigs import reference
from twostroke.model.backend import Chosen
from twostroke.model.checkpoint.quantization import quantize
from twostroke.model.config import Activation, Routing
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.cuda.backend import CudaBackend
from twostroke.model.cuda.kernels.experts import experts_config, order
from twostroke.model.cuda.kernels.launch import H100

pytestmark = pytest.mark.usefixtures("interpreter")
ROUTINGS = [Routing(EXPERTS, 3), Routing(6, 4, normalises=True, scale=2.0), V2, V3]


@pytest.mark.parametrize("is_corrected", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_tokens_take_the_experts_that_the_reference_chooses(routing: Routing, is_corrected: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, routing.num_experts)
    logits[3], logits[4] = 0.0, 1e30
    correction = torch.randn(routing.num_experts) * 0.2 if is_corrected else None
    scales = torch.rand(routing.num_experts) if is_corrected else None
    backends = (CudaBackend(H100), ReferenceBackend())
    actual, expected = (backend.route(logits, correction, routing, scales) for backend in backends)
    assert torch.equal(actual.experts, expected.experts)
    torch.testing.assert_close(actual.weights, expected.weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_whatever_the_logits_are_those_chosen_are_different_experts(routing: Routing) -> None:
    logits = torch.zeros(2, routing.num_experts)
    logits[:, 1] = float("nan")
    for row in CudaBackend(H100).route(logits, None, routing).experts.tolist():
        assert len(set(row)) == routing.top_k
        assert all(0 <= expert < routing.num_experts for expert in row)


@pytest.mark.parametrize("tile_rows", [16, 64])
@pytest.mark.parametrize("tokens", [1, 40, 700])
def test_choices_come_in_the_order_of_their_experts_and_of_the_tokens(tokens: int, tile_rows: int) -> None:
    chosen = choices(tokens, 9, 3).experts
    hits = torch.arange(9) * 2**40
    starts, ordered, tiles = order(chosen, hits, tile_rows)
    assert torch.equal(hits - torch.arange(9) * 2**40, torch.bincount(chosen.flatten(), minlength=9))
    expected = chosen.flatten().sort(stable=True)
    assert torch.equal(ordered.long(), expected.indices)
    assert starts.tolist() == [int((expected.values < expert).sum()) for expert in range(10)]
    counts = torch.bincount(chosen.flatten(), minlength=9)
    needed = -(-counts // tile_rows)
    given = torch.bincount(tiles, minlength=10)[:9]
    assert (needed <= given).all()
    assert (given <= needed + 1).all()
    assert len(tiles) == -(-3 * tokens // tile_rows) + 9


@pytest.mark.parametrize("tokens", [1, 40, 700])
def test_programs_are_as_many_as_tiles_of_all_choices_and_one_more_an_expert(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids: list[tuple[int, ...]] = []
    launch = GridExecutor.__call__

    def count(self: Any, *arguments: Any, **options: Any) -> None:
        grids.append(self.grid)
        launch(self, *arguments, **options)

    weights, chosen = (
        expert_weights(torch.bfloat16, number=5, size=64, hidden=64, has_bias=False),
        choices(tokens, 5, 2),
    )
    experts, x = CudaBackend(H100).make_experts(weights, "silu", "none", torch.bfloat16), torch.randn(tokens, 64)
    experts(x.bfloat16(), chosen)  # compiles
    monkeypatch.setattr(GridExecutor, "__call__", count)
    experts(x.bfloat16(), chosen)
    config = experts_config(torch.bfloat16, 2 * tokens, 5)
    tiles = -(-2 * tokens // config.block_t) + 5
    assert [grid for grid in grids if len(grid) > 1 and grid[0] == 64 // config.block_n] == [
        (64 // config.block_n, tiles)
    ] * 2


@pytest.mark.parametrize(
    ("dtype", "form", "tokens", "activation"),
    [
        (torch.float32, "", 3, "silu"),
        (torch.float32, "fp4 by 32", 40, "clamped"),
        (torch.bfloat16, "", 1, "clamped"),
        (torch.bfloat16, "", 70, "gelu_tanh"),
        (torch.bfloat16, "int4 by 16 with offsets", 5, "silu"),
        (torch.bfloat16, "int8 by rows", 50, "silu"),
        (torch.bfloat16, "", 70, "relu2"),
        (torch.bfloat16, "int8 by rows", 5, "relu2"),
        (torch.bfloat16, "fp4 by 32", 5, "clamped"),
    ],
)
def test_experts_compute_what_the_reference_does(
    dtype: torch.dtype, form: str, tokens: int, activation: Activation
) -> None:
    is_clamped, has_gate = activation == "clamped", activation != "relu2"
    weights = expert_weights(dtype, number=3, form=form, size=48, hidden=72, has_bias=is_clamped, has_gate=has_gate)
    x, chosen = torch.randn(tokens, 72).to(dtype), choices(tokens, 3, 2)
    expected = reference.experts(x, chosen, weights, activation)
    experts = CudaBackend(H100).make_experts(weights, activation, "auto", dtype)
    close(experts(x, chosen), expected)
    experts.hits.zero_()  # of what was compiled
    experts(x, chosen)
    assert torch.equal(experts.hits, torch.bincount(chosen.experts.flatten(), minlength=3))


@pytest.mark.parametrize("tokens", [1, 40])
def test_experts_that_are_elsewhere_add_nothing_and_are_counted(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, chosen = expert_weights(torch.float32, number=5, size=24, hidden=40), choices(tokens, 5, 2)
    x = torch.randn(tokens, 40)
    for first, end in ((0, 2), (2, 5)):
        here = some_of(weights, first, end)
        experts = CudaBackend(H100).make_experts(here, "silu", "none", torch.float32)
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", filled_with_nan)
            experts(x, chosen)
            experts.hits.zero_()  # of what was compiled
            close(experts(x, chosen), reference.experts(x, chosen, here, "silu"))
        assert torch.equal(experts.hits, torch.bincount(chosen.experts.flatten(), minlength=5))


def test_experts_are_quantised_as_projections_are_and_one_may_take_all_tokens() -> None:
    weights = expert_weights(torch.bfloat16, number=3, has_bias=False)
    quantized: dict[str, Any] = {
        name: quantize(weight, 8)
        for name, weight in (("gate_up", weights.gate_up), ("down", weights.down))
        if isinstance(weight, Tensor)
    }
    x = torch.randn(60, 64).bfloat16()
    chosen = Chosen(torch.tensor([[2, 0]], dtype=torch.int32).expand(60, 2).contiguous(), torch.rand(60, 2))
    meant = replace(weights, **quantized)
    actual = CudaBackend(H100).make_experts(weights, "silu", "int8", torch.bfloat16)(x, chosen)
    close(actual, reference.experts(x, chosen, meant, "silu"))


@pytest.mark.parametrize(("dtype", "form"), FORMS)
def test_an_experts_copy_computes_its_share(dtype: torch.dtype, form: str) -> None:
    check_copies(lambda weights: CudaBackend(H100).make_experts(weights, "silu", "auto", dtype), dtype, form)


def test_a_shared_result_is_gated_by_a_sigmoid() -> None:
    x, logits = torch.randn(5, 1100).bfloat16(), torch.tensor([[-200.0], [-1.0], [0.0], [2.0], [200.0]])
    expected = reference.gate_by_sigmoid(x, logits)
    close(CudaBackend(H100).gate_by_sigmoid(x.clone(), logits), expected)


def test_an_input_is_gated_by_its_highest_logits_sigmoid() -> None:
    x, logits = torch.randn(7, 300).bfloat16(), 4 * torch.randn(7, 5)
    expected = reference.gate_by_sigmoid(x, logits)
    close(CudaBackend(H100).gate_by_sigmoid(x.clone(), logits), expected)
    close(CpuBackend().gate_by_sigmoid(x.clone(), logits), expected)

"""Experts that a token takes, on the CPU and by the reference, against the routers of transformers; and the experts'
results on the CPU, in every form of weights, against the reference."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, Glm4MoeConfig, GptOssConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from tests.model.cpu.test_linears import FORMS, random_quantized
from tests.rigs import reference
from twostroke.model.backend import Chosen, ExpertWeights
from twostroke.model.checkpoint.quantization import QuantizedWeight, fp4_codes, fp4_values, quantize
from twostroke.model.config import Activation, Quantization, Routing
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.cpu.experts import CpuExperts, PlainExperts

BACKEND = CpuBackend()
EXPERTS, HIDDEN = 16, 24
V2 = Routing(EXPERTS, 3, scale=1.5, groups=4, top_groups=2)
V3 = Routing(EXPERTS, 3, "sigmoid", True, 1.7, groups=4, top_groups=2, summed=2)
ROUTERS: dict[str, tuple[Any, Any, dict[str, Any], Routing]] = {
    "softmax": (Qwen3MoeTopKRouter, Qwen3MoeConfig, {"num_experts": EXPERTS}, Routing(EXPERTS, 3)),
    "normalised": (
        Qwen3MoeTopKRouter,
        Qwen3MoeConfig,
        {"num_experts": EXPERTS, "norm_topk_prob": True},
        Routing(EXPERTS, 3, normalises=True),
    ),
    "of the chosen ones' logits": (
        GptOssTopKRouter,
        GptOssConfig,
        {"num_local_experts": EXPERTS},
        Routing(EXPERTS, 3, normalises=True),
    ),
    "best of groups": (
        DeepseekV2TopkRouter,
        DeepseekV2Config,
        {
            **{"n_routed_experts": EXPERTS, "topk_method": "group_limited_greedy"},
            **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
        },
        V2,
    ),
    "corrected, two best of groups": (
        Glm4MoeTopkRouter,
        Glm4MoeConfig,
        {"n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7},
        V3,
    ),
    "corrected": (Glm4MoeTopkRouter, Glm4MoeConfig, {"n_routed_experts": EXPERTS}, replace(V3, scale=1.0, groups=1)),
}


def both(logits: Tensor, correction: Tensor | None, routing: Routing) -> Chosen:
    """The CPU's choice, which is the reference's."""
    expected = reference.route(logits, correction, routing)
    actual = BACKEND.route(logits, correction, routing)
    assert torch.equal(actual.experts, expected.experts)
    torch.testing.assert_close(actual.weights, expected.weights, rtol=1e-5, atol=1e-7)
    return actual


@pytest.mark.parametrize("name", ROUTERS)
def test_tokens_take_the_experts_that_transformers_routers_choose(name: str) -> None:
    make, config, fields, routing = ROUTERS[name]
    torch.manual_seed(0)
    router = make(config(hidden_size=HIDDEN, num_attention_heads=4, num_experts_per_tok=3, **fields))
    for tensor in (*router.parameters(), *router.buffers()):
        torch.nn.init.normal_(tensor, std=0.3)
    x = torch.randn(500, HIDDEN)
    correction = getattr(router, "e_score_correction_bias", None)
    with torch.no_grad():
        logits, weights, experts = router(x)
    chosen = both(logits.float(), correction, routing)
    expected = torch.zeros(500, EXPERTS).scatter_(1, experts, weights)
    torch.testing.assert_close(torch.zeros(500, EXPERTS).scatter_(1, chosen.experts.long(), chosen.weights), expected)


@pytest.mark.parametrize("routing", [Routing(EXPERTS, 3), V2, V3])
def test_of_equal_scores_the_lower_number_wins(routing: Routing) -> None:
    assert both(torch.zeros(2, EXPERTS), None, routing).experts.tolist() == [[0, 1, 2]] * 2
    logits = torch.full((1, EXPERTS), -2.0)
    logits[0, [5, 9, 10, 13]] = 1.0  # the last one's group is as good as the first one's
    assert both(logits, None, routing).experts.tolist() == [[5, 9, 10]]


def test_a_correction_chooses_and_does_not_weigh() -> None:
    logits, correction = torch.zeros(1, EXPERTS), torch.zeros(EXPERTS)
    correction[15], correction[7] = 0.5, 0.25
    chosen = both(logits, correction, replace(V3, groups=1))
    assert chosen.experts.tolist() == [[15, 7, 0]]
    assert chosen.weights[0].tolist() == pytest.approx([1.7 / 3] * 3, rel=1e-5)


@pytest.mark.parametrize("routing", [Routing(EXPERTS, 3), V2, V3])
def test_whatever_the_logits_are_those_chosen_are_different_experts(routing: Routing) -> None:
    for value in (float("nan"), float("inf"), -float("inf"), 1e30):
        chosen = BACKEND.route(torch.full((2, EXPERTS), value), None, routing)
        for row in chosen.experts.tolist():
            assert len(set(row)) == 3
            assert all(0 <= expert < EXPERTS for expert in row)


def expert_weights(
    dtype: torch.dtype,
    *,
    number: int = 5,
    hidden: int = 64,
    size: int = 40,
    form: str = "",
    has_bias: bool = True,
    has_gate: bool = True,
) -> ExpertWeights:
    generator = torch.Generator().manual_seed(0)

    def weight(rows: int, columns: int) -> Tensor | QuantizedWeight:
        if form == "fp4 by 32":
            codes = torch.randint(16, (rows, columns), generator=generator)
            scales = torch.randint(1, 4, (rows, -(-columns // 32)), generator=generator).float()
            return QuantizedWeight(fp4_values(codes), scales / 128, 32, 4)
        if form:
            return random_quantized(form, rows, columns)
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).to(dtype)

    inner = 2 * size if has_gate else size
    biases = [torch.randn(number, rows, generator=generator).to(dtype) for rows in (inner, hidden)]
    gate_up_bias, down_bias = biases if has_bias else (None, None)
    return ExpertWeights(number, weight(number * inner, hidden), weight(number * hidden, size), gate_up_bias, down_bias)


def choices(tokens: int, number: int, top_k: int, seed: int = 0) -> Chosen:
    """Some experts are taken often, some never."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, number, generator=generator) + torch.linspace(-3, 3, number)
    return reference.route(logits, None, Routing(number, top_k))


def close(actual: Tensor, expected: Tensor, factor: float = 1.0) -> None:
    assert actual.dtype == expected.dtype
    tolerance = 2e-5 if actual.dtype == torch.float32 else 1.6e-2
    size = float(expected.float().abs().max())
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * size * factor)


@pytest.mark.parametrize("activation", ["silu", "clamped", "relu2"])
@pytest.mark.parametrize(("tokens", "size"), [(1, 40), (3, 64), (77, 33), (700, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_compute_what_the_reference_does(
    dtype: torch.dtype, tokens: int, size: int, activation: Activation
) -> None:
    has_gate = activation != "relu2"
    weights = expert_weights(dtype, size=size, has_bias=activation == "clamped", has_gate=has_gate)
    x, chosen = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(1)).to(dtype), choices(tokens, 5, 2)
    expected = reference.experts(x, chosen, weights, activation)
    hits = torch.bincount(chosen.experts.flatten(), minlength=5)
    for experts in (
        BACKEND.make_experts(weights, activation, "none", dtype),
        PlainExperts(weights, activation, "none", dtype, BACKEND.launcher),
    ):
        close(experts(x, chosen), expected)
        assert torch.equal(experts.hits, hits)
        experts(x, chosen)
        assert torch.equal(experts.hits, 2 * hits)


def some_of(weights: ExpertWeights, first: int, end: int) -> ExpertWeights:
    """Those of a rank that holds some experts whole."""
    assert isinstance(weights.gate_up, Tensor)
    assert isinstance(weights.down, Tensor)
    gate_up, down = (
        each.view(weights.number, -1, each.shape[1])[first:end].flatten(0, 1)
        for each in (weights.gate_up, weights.down)
    )
    biases = (None if each is None else each[first:end] for each in (weights.gate_up_bias, weights.down_bias))
    return ExpertWeights(end - first, gate_up, down, *biases, first, weights.number)


def filled_with_nan(*shape: Any, **kind: Any) -> Tensor:
    """Replaces torch.empty: memory that is never written must not be used."""
    made = torch.zeros(*shape, **kind)
    return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(-77)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_are_elsewhere_add_nothing_and_are_counted(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, chosen = expert_weights(dtype), choices(77, 5, 2)
    x, hits = torch.randn(77, 64).to(dtype), torch.bincount(chosen.experts.flatten(), minlength=5)
    monkeypatch.setattr(torch, "empty", filled_with_nan)
    for first, end in ((0, 2), (2, 3), (3, 5)):
        here = some_of(weights, first, end)
        is_here = (chosen.experts >= first) & (chosen.experts < end)
        expected = reference.experts(x, Chosen(chosen.experts, chosen.weights * is_here), weights, "silu")
        close(reference.experts(x, chosen, here, "silu"), expected)
        for experts in (
            BACKEND.make_experts(here, "silu", "none", dtype),
            PlainExperts(here, "silu", "none", dtype, BACKEND.launcher),
        ):
            close(experts(x, chosen), expected)
            assert torch.equal(experts.hits, hits)


@pytest.mark.parametrize("form", [*FORMS, "fp4 by 32"])
def test_quantised_experts_compute_with_the_dequantised_weights(form: str) -> None:
    weights = expert_weights(torch.bfloat16, form=form, size=64, hidden=128)
    for tokens in (1, 40):
        x, chosen = torch.randn(tokens, 128).bfloat16(), choices(tokens, 5, 2)
        expected = reference.experts(x, chosen, weights, "silu")
        close(BACKEND.make_experts(weights, "silu", "auto", torch.bfloat16)(x, chosen), expected)
        close(PlainExperts(weights, "silu", "auto", torch.bfloat16, BACKEND.launcher)(x, chosen), expected)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_are_quantised_as_projections_are(quantization: Quantization) -> None:
    weights = expert_weights(torch.bfloat16, size=64, hidden=128)
    assert isinstance(weights.gate_up, Tensor)
    assert isinstance(weights.down, Tensor)
    bits: Any = 8 if quantization == "int8" else 4
    meant = replace(weights, gate_up=quantize(weights.gate_up, bits), down=quantize(weights.down, bits))
    x, chosen = torch.randn(30, 128).bfloat16(), choices(30, 5, 2)
    close(
        BACKEND.make_experts(weights, "silu", quantization, torch.bfloat16)(x, chosen),
        reference.experts(x, chosen, meant, "silu"),
    )


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_token_gets_the_same_bits_whoever_is_beside_it(quantization: Quantization) -> None:
    experts = BACKEND.make_experts(expert_weights(torch.bfloat16, hidden=128), "silu", quantization, torch.bfloat16)
    x, chosen = torch.randn(300, 128).bfloat16(), choices(300, 5, 2)
    together = experts(x, chosen)
    for part in (slice(0, 1), slice(7, 20), slice(250, 300)):
        alone = experts(
            x[part].contiguous(), Chosen(chosen.experts[part].contiguous(), chosen.weights[part].contiguous())
        )
        assert torch.equal(alone, together[part])


def test_a_replayed_step_takes_the_experts_of_its_own_tokens() -> None:
    backend = CpuBackend()
    experts = backend.make_experts(expert_weights(torch.float32), "silu", "none", torch.float32)
    if not isinstance(experts, CpuExperts):
        pytest.skip("this CPU has no kernels for them")
    x, logits, routing = torch.empty(4, 64), torch.empty(4, 5), Routing(5, 2)
    with torch.inference_mode(), backend.launcher.recording() as program:
        out = experts(x, backend.route(logits, None, routing))
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        x.copy_(torch.randn(4, 64, generator=generator))
        logits.copy_(torch.randn(4, 5, generator=generator))
        before = experts.hits.clone()
        program.replay()
        replayed = experts.hits - before
        assert torch.equal(out, experts(x, backend.route(logits, None, routing)))
        assert torch.equal(experts.hits, before + 2 * replayed)
        assert replayed.sum() == 4 * 2


def test_codes_of_fp4_are_its_numbers() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert fp4_values(codes).float().tolist() == [*values, *(-value for value in values)]
    assert torch.equal(fp4_codes(fp4_values(codes)), codes)

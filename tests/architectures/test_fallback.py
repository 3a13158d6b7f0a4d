"""Models without a decoder of ours: what decides whether transformers' modules serve them, and what is refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING

from tests.architectures.checkpoints import OTHERS, OURS, write_checkpoint
from tests.architectures.engines import make_engine, random_prompts, reference
from twostroke.cluster.cli import main
from twostroke.model.architectures.transformers_decoder import NormModule, replace_norms
from twostroke.model.backend import LoadOptions
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.engine_config import EngineConfig
from twostroke.model.load import load_engine
from twostroke.model.parallel.form import ParallelForm, Shard
from twostroke.model.parallel.tensor_parallel import SingleRank
from twostroke.model.served import open_model
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.requests import SamplingParams

CPU = torch.device("cpu")
FIELDS = {"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phi")
    write_checkpoint(folder, "phi", OTHERS["phi"])
    return folder


def changed(folder: Path, phi: Path, **fields: Any) -> Path:
    """A folder as `phi`, its config.json with other fields."""
    raw = json.loads((phi / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "model.safetensors").write_bytes((phi / "model.safetensors").read_bytes())
    return folder


@pytest.mark.parametrize(
    ("model_type", "fields", "why"),
    [
        ("bloom", {}, "2 layers called the attention 0 times.*as where it has biases .ALiBi"),
        ("mpt", {}, "don't run over a flat batch without a cache.*as where it has biases .ALiBi"),
        ("falcon", {"alibi": True}, "can't build it: KeyError.*as where it has biases .ALiBi"),
        (
            "stablelm",
            {"hidden_size": 44, "num_key_value_heads": 4},
            "heads of 11 dimensions, an odd number, are not supported$",
        ),
        ("jamba", {}, "'jamba' keeps a state beside KV"),
        ("mamba", {}, "'mamba' keeps a state beside KV"),
        ("t5", {}, "has an encoder"),
        ("vit", {}, "no decoder that writes text"),
        ("gemma3n_text", {"num_kv_shared_layers": 1}, "num_kv_shared_layers: layers that use another one's KV"),
        ("phi", {"attention_chunk_size": 64}, "attention_chunk_size: attention within chunks"),
        ("diffllama", {}, "2 layers called the attention 4 times"),
        ("doge", {}, "takes 'attention_mask', which ours does not know"),
        ("bert", {"is_decoder": False}, "attends to tokens that come later|is not the decoder"),
        ("phi", {"quantization_config": {"quant_method": "awq"}}, "quantization_config: quantised checkpoints"),
        ("phi", {"vocab_size": "many"}, "transformers can't read this phi"),
    ],
)
def test_what_our_attention_would_compute_otherwise_is_refused_by_name(
    model_type: str, fields: dict[str, Any], why: str, tmp_path: Path
) -> None:
    architectures = fields.pop("architectures", None)
    raw = {"model_type": model_type, **FIELDS, **fields} | ({"architectures": architectures} if architectures else {})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=why) as caught:
        open_model(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/config.json: ")


def test_code_of_a_models_own_is_never_run(tmp_path: Path) -> None:
    raw = {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}, "architectures": ["Mine"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ConfigError, match=r"auto_map: its own code would have to be run \(`trust_remote_code`\)"):
        open_model(tmp_path)


def test_an_architecture_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "architectures": ["Mine"]}))
    with pytest.raises(ConfigError, match="'mine' is neither a family of ours nor known to transformers 5"):
        open_model(tmp_path)


def test_another_head_than_the_one_that_writes_is_refused(tmp_path: Path, phi: Path) -> None:
    folder = changed(tmp_path, phi, architectures=["PhiForTokenClassification"])
    with pytest.raises(ConfigError, match=r"\['PhiForTokenClassification'\] is not the decoder of 'phi'"):
        open_model(folder)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.fc1.bias"), r"tensor model.layers.1.mlp.fc1.bias is missing"),
        (lambda tensors: tensors.update(more=torch.ones(3)), r"tensor more is none of PhiForCausalLM's"),
        (
            lambda tensors: tensors.update({"lm_head.bias": torch.ones(3)}),
            r"lm_head.bias has shape \[3\], config.json asks for \[101\]",
        ),
        (
            lambda tensors: tensors.update({"lm_head.bias": torch.ones(101, dtype=torch.int32)}),
            r"lm_head.bias is I32, only F32, F16, BF16",
        ),
    ],
)
def test_tensors_must_be_those_of_the_model(change: Any, why: str, tmp_path: Path, phi: Path) -> None:
    folder = changed(tmp_path, phi)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=why):
        _ = open_model(folder).dtype


def test_a_dry_run_finds_attention_that_ours_is_not(tmp_path: Path, phi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.phi import modeling_phi

    eager = modeling_phi.eager_attention_forward

    def biased(module: Any, query: Any, key: Any, value: Any, mask: Any, **others: Any) -> Any:
        distance = torch.arange(key.shape[2]) - torch.arange(query.shape[2])[:, None]
        return eager(module, query, key, value, mask + 0.02 * distance, **others)

    monkeypatch.setattr(modeling_phi, "eager_attention_forward", biased)
    with pytest.raises(ConfigError, match=r"in a dry run its logits were .* away from those of transformers' own"):
        make_engine(phi, None)


def test_only_norms_that_compute_what_ours_do_are_replaced() -> None:
    class OnePlusRMSNorm(nn.Module):
        def __init__(self, power: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-0.5, 0.5, 24))
            self.eps = 1e-3
            self.power = power

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (x.square().mean(-1, keepdim=True) + self.eps) ** self.power * (1 + self.weight)

    model = nn.Sequential(OnePlusRMSNorm(-0.5), OnePlusRMSNorm(-0.4))
    x = torch.randn(2, 3, 24)
    expected = model(x)
    replace_norms(model, CpuBackend())
    assert [type(module) for module in model] == [NormModule, OnePlusRMSNorm]
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(("quantization", "largest"), [("int8", 0.1), ("int4", 0.6)])
def test_projections_are_quantised_like_those_of_our_own_decoder(
    quantization: Any, largest: float, phi: Path, tmp_path: Path
) -> None:
    model = open_model(phi)
    tokens = torch.tensor(random_prompts(101, [40])[0])
    logits = [
        model.decoder(LoadOptions(torch.float32, CPU, 64, kind), CpuBackend(), SingleRank()).whole_logits(tokens)
        for kind in ("none", quantization)
    ]
    error = float((logits[1] - logits[0]).norm() / logits[0].norm())
    assert largest / 100 < error < largest
    assert model.weight_bytes(torch.float32, quantization) < 0.6 * model.weight_bytes(torch.float32, "none")


def test_the_digest_goes_by_config_and_weights(tmp_path: Path, phi: Path) -> None:
    first = open_model(phi).digest()
    folder = changed(tmp_path, phi)
    assert open_model(folder).digest() == first
    changed(tmp_path, phi, rope_theta=20_000.0)
    assert open_model(folder).digest() != first
    changed(tmp_path, phi)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.bias"][3] += 1
    save_file(tensors, folder / "model.safetensors")
    assert open_model(folder).digest() != first


def test_a_loaded_engine_serves_it(phi: Path) -> None:
    (prompt,) = random_prompts(101, [30])
    (expected,) = reference(phi, [prompt], 8)
    loaded = load_engine(EngineConfig(phi, dtype="float32", num_blocks=16, block_size=4, threads=1))
    layers: list[int] = []
    history = list(prompt)

    async def generate() -> None:
        start = 0
        while len(history) < len(prompt) + len(expected):
            draw = Draw(SamplingParams(temperature=0.0), history, len(prompt))
            step = SequenceStep(history[start:], start, range(10), draw)
            (token,) = await loaded.engine.step([step], layers.append if start == 0 else None)
            assert token is not None
            start = len(history)
            history.append(token.token_id)

    try:
        asyncio.run(generate())
    finally:
        loaded.engine.close()
        loaded.kv_cache.close()
    assert history[len(prompt) :] == expected
    assert layers == [0, 1]


def test_check_tells_the_way_and_what_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIG_MAPPING["dots1"](
        **{"num_hidden_layers": 2, "first_k_dense_replace": 0, "n_routed_experts": 8, "num_experts_per_tok": 2},
        **{"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 96, "intermediate_size": 96},
        **{"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000},
    )
    config.architectures = ["Dots1ForCausalLM"]
    config.save_pretrained(tmp_path)
    assert main(["check", str(tmp_path), "--json", "--dtype", "bfloat16"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["family"], told["way"], told["reason"]) == ("Dots1ForCausalLM", "transformers", None)
    experts = 2 * 8 * 3 * config.moe_intermediate_size * config.hidden_size
    assert told["parameters"] - told["active_parameters"] == experts * 6 // 8
    assert told["weight_bytes"] == 2 * told["parameters"]
    assert told["kv_bytes_per_token"] == 2 * 2 * config.num_key_value_heads * 64 * 2
    main(["check", str(tmp_path), "--dtype", "bfloat16"])
    assert "Dots1ForCausalLM through transformers" in capsys.readouterr().out
    assert main(["check", str(tmp_path), "--json", "--dtype", "bfloat16", "--tensor-parallel", "2"]) == 0
    shared = json.loads(capsys.readouterr().out)
    assert 2 * shared["kv_bytes_per_token"] == told["kv_bytes_per_token"]
    assert told["weight_bytes"] / 2 < shared["weight_bytes"] < 0.51 * told["weight_bytes"], (
        "norms and routers are whole"
    )


@pytest.mark.parametrize("name", ["vaultgemma", "starcoder2", "dots1"])
def test_a_rank_is_said_to_hold_what_it_loads(name: str, tmp_path: Path) -> None:
    class Counting(CpuBackend):
        count = 0

        def make_linear(self, weight: Any, bias: Any, quantization: Any, dtype: Any) -> Any:
            self.count += weight.numel() + (0 if bias is None else bias.numel())
            return super().make_linear(weight, bias, quantization, dtype)

    class FirstOfTwo(SingleRank):
        shard = Shard(0, 2)

    write_checkpoint(tmp_path, name, OTHERS[name] | {"num_attention_heads": 4, "num_key_value_heads": 2})
    model, backend = open_model(tmp_path), Counting()
    loaded: Any = model.decoder(LoadOptions(torch.float32, CPU, 64, "none"), backend, FirstOfTwo())
    kept = {
        id(tensor): tensor.numel()
        for module in loaded._model.modules()
        for tensor in (*module._parameters.values(), *vars(module).values())
        if isinstance(tensor, torch.Tensor)
    }
    assert model.weight_bytes(torch.float32, "none", ParallelForm(2)) == 4 * (backend.count + sum(kept.values()))


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        (
            "gpt_neox",
            {
                "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 64, 64).tril().bool(),
                "gpt_neox.layers.1.attention.masked_bias": torch.tensor(-1e9),
                "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(2),
            },
        ),
        (
            "gpt2",
            {
                "transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64).tril().to(torch.uint8),
                "transformer.h.1.attn.bias": torch.ones(1, 1, 64, 64).tril().bool(),
                "transformer.h.1.attn.masked_bias": torch.tensor(-10000.0, dtype=torch.float64),
            },
        ),
    ],
)
def test_tensors_that_nobody_reads_may_be_of_any_type(
    name: str, extra: dict[str, torch.Tensor], tmp_path: Path, generate: Any
) -> None:
    write_checkpoint(tmp_path, name, OTHERS[name])
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | extra, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prompts = random_prompts(101, (5, 40))
    runner, _ = make_engine(tmp_path, None)
    answers = generate(runner, prompts, 12, chunk=37, block_size=8)
    expected = reference(tmp_path, prompts, 12)
    assert [answer[: len(row)] for answer, row in zip(answers, expected, strict=True)] == expected


def test_qwen2_moe_is_taken_as_transformers_saves_it(tmp_path: Path, generate: Any) -> None:
    write_checkpoint(tmp_path, "qwen2_moe", OURS["qwen2_moe"])
    assert json.loads((tmp_path / "config.json").read_text())["sliding_window"] == 0
    prompts = random_prompts(101, (5, 40))
    runner, _ = make_engine(tmp_path, "native")
    answers = generate(runner, prompts, 12, chunk=37, block_size=8)
    expected = reference(tmp_path, prompts, 12)
    assert [answer[: len(row)] for answer, row in zip(answers, expected, strict=True)] == expected

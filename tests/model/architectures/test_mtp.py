"""MTP heads: drafts equal those of transformers' layers put together by DeepSeek's formula, and change no token."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.model.architectures.test_conformance import EXPERT_GROUPS, INDEX, LATENT, MIN_MARGIN, family, random_prompts
from tests.model.parallel.test_tensor_parallel import Ranks
from tests.model.test_captured_steps import Repeating
from twostroke.model.backend import LoadOptions
from twostroke.model.cache.kv_cache import make_kv_cache
from twostroke.model.captured_steps import ALL_EAGER, StepReplays
from twostroke.model.checkpoint.weights import SINGLE_FILE
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.cpu.captured_steps import CpuCapturedSteps
from twostroke.model.cuda.graphs import CudaGraphSteps
from twostroke.model.parallel.form import ParallelForm, Shard
from twostroke.model.parallel.tensor_parallel import GroupRanks, Rendezvous, SingleRank, TensorParallel
from twostroke.model.runner import ModelRunner
from twostroke.model.sampling.sampler import Sampler
from twostroke.model.served import open_model
from twostroke.model.step import Draw, MtpDrafts, SequenceStep
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.requests import SamplingParams

CPU = torch.device("cpu")
BLOCK_SIZE, MAX_CONTEXT, NEW_TOKENS = 8, 256, 12
GREEDY = SamplingParams(temperature=0.0)
MTP: dict[str, Any] = {"num_nextn_predict_layers": 1, "num_hidden_layers": 2}
SHAPES = {
    "glm4_moe": family(
        "glm4_moe",
        "Glm4Moe",
        **EXPERT_GROUPS | MTP | {"head_dim": 24, "use_qk_norm": True, "moe_intermediate_size": 20},
    ),
    "deepseek_v3": family(
        "deepseek_v3", "DeepseekV3", **LATENT | EXPERT_GROUPS | MTP, q_lora_rank=24, moe_intermediate_size=20
    ),
    "deepseek_v32": family(
        "deepseek_v32", "DeepseekV32", **LATENT | INDEX | EXPERT_GROUPS | MTP, q_lora_rank=24, moe_intermediate_size=20
    ),
}


def write_mtp_checkpoint(write_checkpoint: Callable[..., Path], fields: dict[str, Any]) -> Path:
    """A folder as published: the head's layer behind the last one, with copies of embedding and LM head."""
    layers = fields["num_hidden_layers"]
    folder: Path = write_checkpoint(**fields | {"num_hidden_layers": layers + 1})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": layers}))
    tensors = load_file(folder / SINGLE_FILE)
    hidden, prefix = raw["hidden_size"], f"model.layers.{layers}."
    generator = torch.Generator().manual_seed(5)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{norm}.weight"] = 1 + 0.2 * torch.randn(hidden, generator=generator)
    tensors[f"{prefix}eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * 1.5 / hidden**0.5
    tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    return folder


def expected_drafts(folder: Path, tokens: list[int]) -> tuple[list[int], list[float]]:
    """Return what the head expects behind each token but the first, by transformers' layers, and its margins."""
    config = AutoConfig.from_pretrained(folder)
    tensors = load_file(folder / SINGLE_FILE)
    prefix = f"model.layers.{config.num_hidden_layers}."
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    head_config = AutoConfig.from_pretrained(folder, num_hidden_layers=1, first_k_dense_replace=0)
    if getattr(head_config, "mlp_layer_types", None):
        head_config.mlp_layer_types = ["sparse"]
    if getattr(head_config, "layer_types", None):
        head_config.layer_types = head_config.layer_types[:1]
    inner = {
        name.replace(prefix, "model.layers.0."): tensor for name, tensor in tensors.items() if name.startswith(prefix)
    }
    inner |= {name: tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    inner["model.norm.weight"] = inner.pop("model.layers.0.shared_head.norm.weight")
    with_head = folder / "head"
    with_head.mkdir(exist_ok=True)
    head_config.save_pretrained(with_head)
    save_file(inner, with_head / SINGLE_FILE, metadata={"format": "pt"})
    head = AutoModelForCausalLM.from_pretrained(with_head, dtype=torch.float32).eval()
    ids = torch.tensor([tokens])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        eps = config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * tensors[f"{prefix}{name}.weight"]

    with torch.inference_mode():
        hidden = model.model(ids[:, :-1]).last_hidden_state
        embedded = model.model.embed_tokens(ids[:, 1:])
        joined = torch.cat((norm(embedded, "enorm"), norm(hidden, "hnorm")), -1)
        logits = head(inputs_embeds=joined @ tensors[f"{prefix}eh_proj.weight"].T).logits[0]
    best = logits.topk(2)
    return best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()


def make_runner(
    folder: Path, way: str = "eager", *, has_mtp: bool = True, parallel: TensorParallel | None = None
) -> ModelRunner:
    backend, model, parallel = CpuBackend(), open_model(folder, has_mtp=has_mtp), parallel or SingleRank()
    decoder = model.decoder(LoadOptions(torch.float32, CPU, MAX_CONTEXT, "none"), backend, parallel)
    cache = make_kv_cache(
        model.shape,
        num_blocks=128,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        device=CPU,
        model_digest="",
        parallel=ParallelForm(parallel.shard.size),
        rank=parallel.shard.rank,
    )
    replays, context = ALL_EAGER, min(MAX_CONTEXT, model.shape.dense_context)
    if way == "programs":
        replays = StepReplays(CpuCapturedSteps(decoder, backend.launcher, cache, context))
    elif way == "graphs":  # batches of three are padded to four
        replays = StepReplays(CudaGraphSteps(decoder, cache, context, 12, Repeating()))
    sampler = Sampler(decoder.vocab_size) if parallel.shard.rank == 0 else None
    return ModelRunner(decoder, sampler, cache, MAX_CONTEXT, replays, parallel=parallel)


def answers(
    runner: ModelRunner | Ranks, prompts: list[list[int]], chunk: int
) -> list[tuple[list[int], list[int | None]]]:
    """Return greedy answers that are written together, and what the head expected at each of their positions but the
    first, and one more."""
    tokens = [[*prompt] for prompt in prompts]
    drafts = [MtpDrafts() for _ in prompts]
    blocks = [range(32 * number, 32 * (number + 1)) for number in range(len(prompts))]

    def step(number: int, start: int, end: int) -> SequenceStep:
        row = tokens[number]
        draw = Draw(GREEDY, row, len(prompts[number]), mtp=drafts[number]) if end == len(row) else None
        return SequenceStep(row[start:end], start, blocks[number], draw)

    def run(batch: dict[int, SequenceStep]) -> None:
        for number, found in zip(batch, runner.run([*batch.values()]), strict=True):
            if found is not None:
                tokens[number].append(found.token_id)

    for number, prompt in enumerate(prompts):
        for start in range(0, len(prompt), chunk):
            run({number: step(number, start, min(start + chunk, len(prompt)))})
    for _ in range(NEW_TOKENS - 1):
        run({number: step(number, len(row) - 1, len(row)) for number, row in enumerate(tokens)})
    return [
        (row[len(prompt) :], [found.at(position) for position in range(len(prompt) + 1, len(row) + 1)])
        for prompt, row, found in zip(prompts, tokens, drafts, strict=True)
    ]


@pytest.mark.parametrize(
    ("shape", "way"),
    [
        pytest.param(shape, way, marks=[] if shape == "glm4_moe" or way == "programs" else pytest.mark.models)
        for shape in SHAPES
        for way in ("eager", "programs", "graphs")
    ],
)
def test_drafts_are_those_of_transformers_layers(shape: str, way: str, write_checkpoint: Any) -> None:
    folder = write_mtp_checkpoint(write_checkpoint, SHAPES[shape])
    prompts = random_prompts(96, seed=2, lengths=(1, 9, 30))
    found = answers(make_runner(folder, way), prompts, chunk=100)
    plain = answers(make_runner(folder, has_mtp=False), prompts, chunk=100)
    compared = 0
    for prompt, (tokens, drafts), (expected_tokens, _) in zip(prompts, found, plain, strict=True):
        assert tokens == expected_tokens
        expected, margins = expected_drafts(folder, [*prompt, *tokens])
        for draft, token, margin in zip(drafts, expected[len(prompt) - 1 :], margins[len(prompt) - 1 :], strict=True):
            if margin > MIN_MARGIN:
                assert draft == token
                compared += 1
    assert compared > 30


def test_ranks_agree_on_drafts(write_checkpoint: Any) -> None:
    """The ranks hear of what was drawn, and each has a part of the vocabulary to choose a draft from."""
    folder = write_mtp_checkpoint(write_checkpoint, SHAPES["glm4_moe"])
    prompts = random_prompts(96, seed=2, lengths=(30, 4))
    expected = answers(make_runner(folder), prompts, chunk=9)
    rendezvous = Rendezvous("127.0.0.1")
    with ThreadPoolExecutor(2) as threads:
        groups = threads.map(lambda rank: GroupRanks(Shard(rank, 2), rendezvous.address, CPU), range(2))
        runners = list(threads.map(lambda group: make_runner(folder, parallel=group), groups))
        assert answers(Ranks(runners, threads), prompts, chunk=9) == expected


def test_a_model_without_a_head_is_refused(write_checkpoint: Any) -> None:
    folder = write_checkpoint(**SHAPES["glm4_moe"] | {"num_nextn_predict_layers": 0})
    with pytest.raises(ConfigError, match=r"speculation\.method: mtp: this model, GLM-4\.5, has no MTP head"):
        open_model(folder, has_mtp=True)
    folder = write_checkpoint(**SHAPES["glm4_moe"])  # config.json speaks of a head that the files lack
    with pytest.raises(ConfigError, match=r"model\.layers\.2\."):
        _ = open_model(folder, has_mtp=True).dtype

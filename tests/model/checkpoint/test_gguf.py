"""A GGUF file serves as the folder that it was made of would."""

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.model.architectures.test_conformance import DELTA, make_runner, random_prompts
from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.checkpoint.gguf.blocks import BLOCK_KINDS, read_blocks
from twostroke.model.checkpoint.gguf.file import HYBRID_NAMES, NAMES, WHOLE_NAMES
from twostroke.model.checkpoint.gguf.folder import unpacked_folder
from twostroke.model.checkpoint.quantization import QuantizedWeight
from twostroke.model.checkpoint.weights import SINGLE_FILE, Checkpoint
from twostroke.protocol.errors import ConfigError
from twostroke.router.text.generation_config import SamplingDefaults, read_sampling_defaults

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
GGUF_NAMES = {name: stem for stem, name in NAMES.items()}
LENGTHS = (1, 17, 64)


def tokenizer_fields(writer: GGUFWriter, tokenizer: Tokenizer, cut: str = "gpt-2") -> None:
    described = json.loads(tokenizer.to_str())["model"]
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokens = [str(tokenizer.id_to_token(index)) for index in range(tokenizer.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in described["merges"]])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages[0].content }}")


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_metadata(path: Path, tokenizer: Tokenizer | None = None, **fields: Any) -> None:
    """A file without weights, of these fields over what each has; `tensor`: the factors of its angles.

    Without a tokenizer it has one of another kind, of two tokens.
    """
    writer = GGUFWriter(path, "llama")
    needed = {"embedding_length": 64, "attention.head_count": 2, "block_count": 2, "context_length": 2}
    needed |= {"feed_forward_length": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    for field, value in (needed | fields).items():
        name = field if field.startswith("general.") else f"llama.{field}"
        if field == "tensor":
            writer.add_tensor("rope_freqs.weight", np.array(value, np.float32))
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    if tokenizer is None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["a", "b"])
    else:
        tokenizer_fields(writer, tokenizer)
    finish(writer)


def bundled_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(BUNDLED_MODEL_DIR / "tokenizer.json"))


def interleaved(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder rows as converters do with Llama's queries and keys: dimension i of a head's half moves to 2 i."""
    shape = (heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(rows.reshape(shape).swapaxes(1, 2)).reshape(rows.shape)


def write_gguf(
    folder: Path, path: Path, architecture: str, kind: GGMLQuantizationType, heads_by_layer: bool = False
) -> None:
    """The folder's model as a file, and its own weights as they come back from that."""
    raw = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    kv_heads = raw["num_key_value_heads"]
    writer.add_head_count_kv([kv_heads] * raw["num_hidden_layers"] if heads_by_layer else kv_heads)
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_theta"])
    if "head_dim" in raw:
        writer.add_key_length(raw["head_dim"])
    tokenizer = Tokenizer.from_str(json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}}))
    tokenizer.add_tokens([f"t{index}" for index in range(raw["vocab_size"])])
    tokenizer_fields(writer, tokenizer)
    tensors = load_file(folder / SINGLE_FILE)
    for name, tensor in tensors.items():
        value = tensor.numpy()
        stem, _, ending = name.rpartition(".")
        layer = stem.removeprefix("model.layers.").partition(".")
        of_layer = stem.startswith("model.layers.")
        if value.ndim == 2:
            data = quantize(value, kind)
            writer_kind, tensors[name] = kind, torch.from_numpy(np.array(dequantize(data, kind)))
        if architecture == "llama" and layer[2] in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = raw["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            value = interleaved(value, heads)
        known = f"blk.{layer[0]}.{GGUF_NAMES[layer[2]]}" if of_layer else GGUF_NAMES[stem]
        if value.ndim == 2:
            writer.add_tensor(f"{known}.{ending}", quantize(value, kind), raw_dtype=writer_kind)
        else:
            writer.add_tensor(f"{known}.{ending}", value)
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    finish(writer)


@pytest.mark.parametrize(
    ("architecture", "name", "kind", "fields"),
    [
        ("llama", "Llama", GGMLQuantizationType.F32, {}),
        ("llama", "Llama", GGMLQuantizationType.Q4_1, {"tie_word_embeddings": True}),
        ("llama", "Llama", GGMLQuantizationType.Q8_0, {}),
        ("qwen2", "Qwen2", GGMLQuantizationType.F16, {}),
        ("qwen3", "Qwen3", GGMLQuantizationType.Q4_0, {"head_dim": 32}),
    ],
)
def test_a_file_generates_what_a_folder_with_its_dequantised_weights_does(
    architecture: str,
    name: str,
    kind: GGMLQuantizationType,
    fields: dict[str, Any],
    tmp_path: Path,
    write_checkpoint: Callable[..., Path],
    generate: Any,
) -> None:
    folder = write_checkpoint(architectures=[f"{name}ForCausalLM"], **SIZES, **fields)
    write_gguf(folder, tmp_path / "some.gguf", architecture, kind, heads_by_layer=architecture == "qwen2")
    unpacked = unpacked_folder(tmp_path / "some.gguf", tmp_path / "cache")
    assert unpacked_folder(tmp_path / "some.gguf", tmp_path / "cache") == unpacked, "it is kept"
    assert unpacked.name == "some"
    prompts = random_prompts(96, 1, LENGTHS)
    outputs = [generate(make_runner(each, 8, 64), prompts, 24, chunk=37, block_size=8) for each in (folder, unpacked)]
    assert outputs[0] == outputs[1]
    found, expected = (Checkpoint(each, load_model_config(each)) for each in (unpacked, folder))
    assert found.num_parameters == expected.num_parameters
    assert len(found.digest()) == 16


HYBRID_SIZES = DELTA | SIZES | {"linear_value_head_dim": 32, "linear_num_value_heads": 6}
HYBRID_STEMS = {name: stem for stem, name in (NAMES | HYBRID_NAMES).items() if stem != "ffn_norm"}
WHOLE_STEMS = {name: stem for stem, name in WHOLE_NAMES.items()}


def dealt(values: NDArray[np.float32], first: int, width: int) -> NDArray[np.float32]:
    """Deal out the value heads behind `first` rows as llama.cpp's converter does: six of two key heads."""
    heads = values[first:].reshape(2, 3, width, *values.shape[1:]).swapaxes(0, 1)
    return np.concatenate((values[:first], heads.reshape(-1, *values.shape[1:])))


def converted(name: str, value: NDArray[np.float32]) -> NDArray[np.float32]:
    """Change a tensor of Qwen3.5 as llama.cpp's converter does."""
    match name.removeprefix("linear_attn."):
        case "A_log":
            return -np.exp(dealt(value, 0, 1))
        case "dt_bias" | "in_proj_a.weight" | "in_proj_b.weight":
            return dealt(value, 0, 1)
        case "in_proj_qkv.weight":
            return dealt(value, 2 * 2 * 8, 32)
        case "conv1d.weight":
            return dealt(value[:, 0], 2 * 2 * 8, 32)
        case "in_proj_z.weight":
            return dealt(value, 0, 32)
        case "out_proj.weight":
            return np.ascontiguousarray(dealt(value.T, 0, 32).T)
        case "norm.weight":
            return value
    return value + 1 if name.endswith("norm.weight") else value


def write_hybrid(folder: Path, path: Path, kind: GGMLQuantizationType, kv_heads: int | list[int] = 2) -> None:
    """The folder's Qwen3.5 as a file, and its own weights as they come back from that."""
    raw = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(path, "qwen35")
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(raw["head_dim"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_theta"])
    writer.add_rope_dimension_count(raw["head_dim"] // 4)
    for name, number in (("conv_kernel", 4), ("group_count", 2), ("time_step_rank", 6), ("state_size", 8)):
        writer.add_uint32(f"qwen35.ssm.{name}", number)
    writer.add_uint32("qwen35.ssm.inner_size", 6 * 32)
    writer.add_uint32("qwen35.full_attention_interval", 4)
    tokenizer = Tokenizer.from_str(json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}}))
    tokenizer.add_tokens([f"t{index}" for index in range(raw["vocab_size"])])
    tokenizer_fields(writer, tokenizer, "qwen35")
    tensors = load_file(folder / SINGLE_FILE)
    for name, tensor in tensors.items():
        value, within = tensor.numpy(), name
        _, _, of_layer = name.removeprefix("model.layers.").partition(".")
        prefix = ""
        if name.startswith("model.layers."):
            prefix, within = f"blk.{name.split('.')[2]}.", of_layer
        stem, _, ending = within.rpartition(".")
        known = prefix + (WHOLE_STEMS.get(within) or f"{HYBRID_STEMS[stem]}.{ending}")
        is_matrix = value.ndim == 2
        if is_matrix:
            tensors[name] = torch.from_numpy(np.array(dequantize(quantize(value, kind), kind)))
        value = converted(within, value)
        if is_matrix:
            writer.add_tensor(known, quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(known, value)
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    finish(writer)


@pytest.mark.parametrize(
    ("kind", "kv_heads"),
    [(GGMLQuantizationType.F32, 2), (GGMLQuantizationType.Q8_0, [0, 0, 0, 2]), (GGMLQuantizationType.Q4_1, 2)],
)
def test_a_hybrids_file_generates_what_its_folder_does(
    kind: GGMLQuantizationType,
    kv_heads: int | list[int],
    tmp_path: Path,
    write_checkpoint: Callable[..., Path],
    generate: Any,
) -> None:
    fields = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    folder = write_checkpoint(**HYBRID_SIZES, **fields)
    write_hybrid(folder, tmp_path / "some.gguf", kind, kv_heads)
    unpacked = unpacked_folder(tmp_path / "some.gguf", tmp_path / "cache")
    found, expected = (Checkpoint(each, load_model_config(each)) for each in (unpacked, folder))
    for name in expected.shapes:
        ours, theirs = found.weight(name), expected.tensor(name)
        ours = ours.dequantized(torch.float32) if isinstance(ours, QuantizedWeight) else ours
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)
    prompts = random_prompts(96, 1, LENGTHS)
    outputs = [generate(make_runner(each, 64, 16), prompts, 24, chunk=37, block_size=64) for each in (folder, unpacked)]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_blocks_of_any_kind_mean_what_their_authors_say(kind: str) -> None:
    """Blocks are random bytes, but for scales and minima."""
    wide = GGMLQuantizationType[kind]
    together, size = GGML_QUANT_SIZES[wide]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (7 * 2, size), dtype=np.uint8)
    halves = {"Q6_K": [208]}.get(kind, [0, 2] if BLOCK_KINDS[kind].form.has_offsets else [0])
    for first in halves:
        blocks[:, first : first + 2] = random.normal(0, 0.01, (14, 1)).astype(np.float16).view(np.uint8)
    data = blocks.reshape(7, -1)
    found = read_blocks(data, BLOCK_KINDS[kind])
    expected = torch.from_numpy(dequantize(data, wide))
    torch.testing.assert_close(found.dequantized(torch.float32), expected, rtol=1e-5, atol=1e-6)
    form = BLOCK_KINDS[kind].form
    assert found.num_groups == 2 * together // found.group_size
    assert (found.group_size, found.offsets is not None) == (form.group_size, form.has_offsets)
    least, most = (-8, 7) if form.kind == "int4" else (-128, 127)
    assert least <= int(found.values.min()) <= int(found.values.max()) <= most


def test_the_tokenizer_is_the_one_that_the_file_describes(tmp_path: Path) -> None:
    original = bundled_tokenizer()
    original.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # gpt-2's
    write_metadata(tmp_path / "some.gguf", original)
    folder = unpacked_folder(tmp_path / "some.gguf", tmp_path / "cache")
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("def f(x):\n    return 12345\n", "Ünïcödé 漢字 😀", "  two  spaces", "<|endoftext|>"):
        assert made.encode(text).ids == original.encode(text).ids
        assert made.decode(made.encode(text).ids) == original.decode(original.encode(text).ids)
    said = json.loads((folder / "tokenizer_config.json").read_text())
    assert said["chat_template"] == "{{ messages[0].content }}"
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [0, 1]}


def test_what_a_file_says_of_sampling_is_the_default_of_its_requests(tmp_path: Path) -> None:
    said = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    write_metadata(tmp_path / "some.gguf", bundled_tokenizer(), **said)
    defaults = read_sampling_defaults(unpacked_folder(tmp_path / "some.gguf", tmp_path / "cache"), "auto")
    assert defaults == SamplingDefaults(temperature=0.6, top_k=20)


def test_a_tokenizer_beside_the_file_is_taken_instead(tmp_path: Path) -> None:
    write_metadata(tmp_path / "some.gguf")
    with pytest.raises(ConfigError, match=r"some\.gguf: a tokenizer of kind 'llama'.*put the model's tokenizer\.json"):
        unpacked_folder(tmp_path / "some.gguf", tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.json"))
    beside = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    beside.save(str(tmp_path / "tokenizer.json"))
    taken = unpacked_folder(tmp_path / "some.gguf", tmp_path / "cache")
    assert Tokenizer.from_file(str(taken / "tokenizer.json")).get_vocab() == {"a": 0, "b": 1}
    Tokenizer(models.BPE(vocab={"b": 0, "a": 1, "c": 2}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"tokenizer\.json is another model's: 2 of 2 tokens"):
        unpacked_folder(tmp_path / "some.gguf", tmp_path / "cache")


def config_of(tmp_path: Path, name: str, **fields: Any) -> dict[str, Any]:
    """The config.json that is made of a file with these fields."""
    path = tmp_path / f"{name}.gguf"
    write_metadata(path, bundled_tokenizer(), **fields)
    told: dict[str, Any] = json.loads((unpacked_folder(path, tmp_path / "cache") / "config.json").read_text())
    return told


def test_angles_are_scaled_as_the_file_says(tmp_path: Path) -> None:
    assert config_of(tmp_path, "plain")["rope_parameters"] == {"rope_theta": 10_000.0}
    llama3 = config_of(tmp_path, "llama3", tensor=[1.0, 8.0])["rope_parameters"]
    assert (llama3["rope_type"], llama3["short_factor"], llama3["attention_factor"]) == ("longrope", [1.0, 8.0], 1.0)
    old = config_of(tmp_path, "old", **{"rope.scale_linear": 4.0})["rope_parameters"]
    assert (old["rope_type"], old["factor"]) == ("linear", 4.0)
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 512}
    new = config_of(tmp_path, "yarn", **yarn)["rope_parameters"]
    assert (new["rope_type"], new["factor"], new["original_max_position_embeddings"]) == ("yarn", 4.0, 512)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope.scaling.attn_factor": 0.5}, r"rope\.scaling\.attn_factor is not supported"),
        ({"nextn_predict_layers": 1}, r"llama\.nextn_predict_layers is not supported: take a file without MTP layers"),
        ({"attention.head_count": 0}, r"llama\.attention\.head_count: expected a positive number, found 0"),
        ({"embedding_length": "64"}, r"llama\.embedding_length: expected a positive number, found '64'"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"some\.gguf: .*{named}"):
        config_of(tmp_path, "some", **fields)


def test_a_folder_of_gguf_files_says_which_one_to_name(tmp_path: Path, write_checkpoint: Callable[..., Path]) -> None:
    (tmp_path / "config.json").write_bytes((write_checkpoint() / "config.json").read_bytes())
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ConfigError, match=r"holds neither .*: serve .*/model\.gguf itself"):
        Checkpoint(tmp_path, load_model_config(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGML" + bytes(60),
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sII", 1, b"a", 9, 4) + struct.pack("<Q", 1 << 40),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIQIQ", 1, b"a", 1, 32, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q1sIIQ", 1, b"a", 0, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q17sII", 17, b"general.alignment", 4, 0),
    ],
    ids=["empty", "another format", "old", "endless name", "endless array", "cut off", "no dimension", "no alignment"],
)
def test_a_damaged_file_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "some.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=r"some\.gguf can't be read as GGUF: ") as caught:
        unpacked_folder(tmp_path / "some.gguf", tmp_path / "cache")
    assert "\n" not in str(caught.value)


def test_a_cache_that_cant_be_written_is_named(tmp_path: Path) -> None:
    write_metadata(tmp_path / "some.gguf", bundled_tokenizer())
    (tmp_path / "cache").touch()
    with pytest.raises(ConfigError, match=r"can't be unpacked into .*: Not a directory: set XDG_CACHE_HOME"):
        unpacked_folder(tmp_path / "some.gguf", tmp_path / "cache")


@pytest.mark.parametrize("kind", ["mamba", "gemma2", "gemma3"])  # Gemma's norms would be 1 too large, for one thing
def test_another_architecture_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "some.gguf", kind)
    finish(writer)
    refused = rf"general\.architecture: '{kind}' is not supported, only llama.* are: take the model's safetensors"
    with pytest.raises(ConfigError, match=refused):
        unpacked_folder(tmp_path / "some.gguf", tmp_path / "cache")


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("attention.head_count", "four", "llama.attention.head_count: expected a positive number, found 'four'"),
        ("block_count", "two", "llama.block_count: expected an integer, found str"),
        ("attention.head_count_kv", "two", "llama.attention.head_count_kv: expected a positive number, found 'two'"),
        ("rope.freq_base", "high", "llama.rope.freq_base: expected a positive number, found 'high'"),
        ("rope.dimension_count", "all", "llama.rope.dimension_count: expected a positive number, found 'all'"),
        ("rope.scaling.factor", "twice", "llama.rope.scaling.factor: expected a number, found str"),
        ("rope.scaling.type", 7, "llama.rope.scaling.type: expected text, found int"),
        ("general.architecture", 7, "general.architecture: expected text, found int"),
        ("general.sampling.temp", "hot", "general.sampling.temp: expected a number, found str"),
    ],
)
def test_metadata_of_a_wrong_kind_is_refused_by_name(field: str, value: Any, told: str, tmp_path: Path) -> None:
    write_metadata(tmp_path / "some.gguf", bundled_tokenizer(), **{field: value})
    with pytest.raises(ConfigError, match=re.escape(told)):
        unpacked_folder(tmp_path / "some.gguf", tmp_path / "cache")

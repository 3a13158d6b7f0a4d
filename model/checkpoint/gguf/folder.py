"""A GGUF file as a Hugging Face folder: what it says of model and tokenizer, written as the files that a folder has,
beside a link to the file itself. Nothing but this and file.py knows of the format. No torch here.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from twostroke.model.architectures.families.family import INTERLEAVED
from twostroke.model.checkpoint.gguf.format import FILE, HYBRID, ROPE_FACTORS, Gguf, GgufTensor, check_kinds, read_gguf
from twostroke.protocol.errors import ConfigError

_WRITTEN_AS = 3  # changes with what `unpacked_folder` writes
LIKE_OTHERS = 0.01  # of a vocabulary: files name some reserved tokens otherwise

_ARCHITECTURES = {
    **{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"},
    HYBRID: "Qwen3_5ForCausalLM",
}
_MODEL_TYPES = {HYBRID: "qwen3_5_text"}  # the others' are their names
_INTERLEAVING = ("llama",)  # whose files have the rows of queries and keys in another order than their checkpoints

# How texts are cut before their pieces are encoded: what the models' own tokenizers do, by llama.cpp's names of them.
_LETTERS_AND_NUMBERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LETTERS_WITH_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": lambda: _cut_by(_LETTERS_AND_NUMBERS % "{1,3}"),
    "qwen2": lambda: _cut_by(_LETTERS_AND_NUMBERS % ""),
    "qwen35": lambda: _cut_by(_LETTERS_WITH_MARKS),
}


def unpacked_folder(path: Path, cache: Path) -> Path:
    """A folder in `cache` that has the file as a Hugging Face folder would have its model; kept, and found again.

    A `tokenizer.json` beside the file is taken instead of what the file says. Raises ConfigError for a file that can't
    be read, another architecture, a tokenizer that is not known here, and one beside it that is another model's.
    """
    path = path.resolve()
    given = path.parent / "tokenizer.json"
    files = [(str(each), status.st_size, status.st_mtime_ns) for each in (path, given) if (status := _status(each))]
    key = hashlib.sha256(repr((_WRITTEN_AS, files)).encode()).hexdigest()[:16]
    folder = cache / key / path.stem
    if folder.is_dir():
        return folder
    file = read_gguf(path)
    check_kinds(file.metadata, path)
    config = _hub_config(file, path)
    try:
        tokenizer = _given_tokenizer(given, file) if given.is_file() else _tokenizer(file.metadata, path)
    except ConfigError:
        raise
    except Exception as error:  # the library raises bare Exception for whatever it can't take
        raise ConfigError(f"{path}: its tokenizer can't be made: {error}") from error
    try:
        _write(config, tokenizer, file.metadata, path, folder)
    except OSError as error:
        fault = f"{path} can't be unpacked into {folder}: {error.strerror}"
        raise ConfigError(f"{fault}: set XDG_CACHE_HOME to a folder that can be written") from error
    return folder


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _write(
    config: Mapping[str, Any], tokenizer: Tokenizer, metadata: Mapping[str, Any], path: Path, folder: Path
) -> None:
    """Several processes of a host may do so at once; the first to end is the one that is seen."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        _write_json(made / "config.json", config)
        tokenizer.save(str(made / "tokenizer.json"))
        names = {f"{kind}_token": _token(metadata, f"{kind}_token_id") for kind in ("bos", "eos", "unknown", "padding")}
        renamed = {"unknown_token": "unk_token", "padding_token": "pad_token"}
        special = {renamed.get(name, name): token for name, token in names.items() if token is not None}
        template = metadata.get("tokenizer.chat_template")
        _write_json(made / "tokenizer_config.json", special | ({} if template is None else {"chat_template": template}))
        _write_json(made / "generation_config.json", {"eos_token_id": _ends(metadata) or None, **_sampling(metadata)})
        (made / FILE).symlink_to(path)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _hub_config(file: Gguf, path: Path) -> dict[str, Any]:
    """Return the content that config.json would have. Raises ConfigError."""
    metadata, tensors = file.metadata, file.tensors
    kind = metadata.get("general.architecture")
    if kind not in _ARCHITECTURES:
        raise ConfigError(
            f"{path}: general.architecture: {kind!r} is not supported, only {', '.join(_ARCHITECTURES)} are: "
            "take the model's safetensors"
        )
    if metadata.get("split.count", 1) != 1:
        raise ConfigError(f"{path} is one of several files of a model: join them with llama.cpp's gguf-split --merge")

    def field(name: str) -> Any:
        """A number for each layer is one number where all are equal."""
        value = metadata.get(f"{kind}.{name}")
        if kind == HYBRID and isinstance(value, list):
            return max(value)  # layers that keep a state have none
        if isinstance(value, list) and len(value) == metadata.get(f"{kind}.block_count") and len(set(value)) == 1:
            return value[0]
        return value

    def number(name: str, default: Any = None) -> Any:
        value = default if field(name) is None else field(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"{path}: {kind}.{name}: expected a positive number, found {value!r}")
        return value

    if field("nextn_predict_layers"):
        raise ConfigError(f"{path}: {kind}.nextn_predict_layers is not supported: take a file without MTP layers")
    heads = number("attention.head_count")
    head_dim = number("attention.key_length", max(1, number("embedding_length") // heads))
    return {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": _MODEL_TYPES.get(kind, kind),
        "vocab_size": len(_needed(metadata, "tokenizer.ggml.tokens", path)),
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_theta": number("rope.freq_base", 10_000.0), **_scaling(field, tensors, path)},
        INTERLEAVED: kind in _INTERLEAVING,
        "partial_rotary_factor": number("rope.dimension_count", head_dim) / head_dim,
        "sliding_window": field("attention.sliding_window"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        **(_states(number) if kind == HYBRID else {}),
    }


def _states(number: Callable[..., Any]) -> dict[str, Any]:
    """Return what config.json has of delta nets."""
    value_heads = number("ssm.time_step_rank")
    return {
        "full_attention_interval": number("full_attention_interval", 4),
        "linear_conv_kernel_dim": number("ssm.conv_kernel"),
        "linear_num_key_heads": number("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": number("ssm.state_size"),
        "linear_value_head_dim": number("ssm.inner_size") // value_heads,
    }


def _scaling(field: Callable[[str], Any], tensors: Mapping[str, GgufTensor], path: Path) -> dict[str, Any]:
    """Return the scaling of rotary angles as config.json has it. Raises ConfigError."""
    if field("rope.scaling.attn_factor") not in (None, 1.0):
        raise ConfigError(f"{path}: rope.scaling.attn_factor is not supported: take the model's safetensors")
    if ROPE_FACTORS in tensors:  # Llama 3's scaling, worked out
        factors = tensors[ROPE_FACTORS].data.view(np.float32).tolist()
        return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    scaling, factor = field("rope.scaling.type") or "none", field("rope.scaling.factor")
    if scaling == "none" and (linear := field("rope.scale_linear") or 1.0) != 1.0:  # files of 2023
        scaling, factor = "linear", linear
    if scaling == "none":
        return {}
    original = field("rope.scaling.original_context_length")
    return {"rope_type": scaling, "factor": factor, "original_max_position_embeddings": original}


def _needed(metadata: Mapping[str, Any], name: str, path: Path) -> Any:
    if name not in metadata:
        raise ConfigError(f"{path}: {name} is missing")
    return metadata[name]


def _token(metadata: Mapping[str, Any], name: str) -> str | None:
    index, tokens = metadata.get(f"tokenizer.ggml.{name}"), metadata.get("tokenizer.ggml.tokens", ())
    return None if index is None or index >= len(tokens) else tokens[index]


_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens
# Control tokens that end an answer, in whichever families, where a file names no more than one of them.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>")


def _ends(metadata: Mapping[str, Any]) -> list[int]:
    """Ids of the tokens that end a text or an answer."""
    named = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    ids = {index for index in named if isinstance(index, int)}
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", [])
    ids |= {index for index, its in enumerate(kinds) if its == _CONTROL and tokens[index] in _ENDS}
    return sorted(ids)


_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def _sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's sampling defaults as generation_config.json has them, its fp32 numbers rounded to the intended
    decimals."""
    defaults = {name: metadata.get(f"general.sampling.{its}") for name, its in _SAMPLING.items()}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in defaults.items()}


def _given_tokenizer(given: Path, file: Gguf) -> Tokenizer:
    """The one beside the file, whose tokens must be the file's. Raises ConfigError."""
    try:
        tokenizer = Tokenizer.from_file(str(given))
    except Exception as error:  # the library raises bare Exception for whatever is wrong in the file
        raise ConfigError(f"{given} can't be read as a tokenizer: {error}") from error
    tokens = file.metadata["tokenizer.ggml.tokens"]
    others = sum(tokens[index] != token for token, index in tokenizer.get_vocab().items() if index < len(tokens))
    if others > LIKE_OTHERS * len(tokens):
        raise ConfigError(f"{given} is another model's: {others} of {len(tokens)} tokens are not the GGUF file's")
    return tokenizer


def _tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The byte-level BPE (Sennrich et al. 2016) that the file describes."""
    kind, cut = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or not isinstance(cut, str) or cut not in _CUTS:
        raise ConfigError(
            f"{path}: a tokenizer of kind {kind!r}, {cut!r} can't be made of the file: put the model's tokenizer.json "
            "beside it"
        )
    tokens = _needed(metadata, "tokenizer.ggml.tokens", path)
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", ())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # Llama 3's takes a word that is a token whole, whatever merges say.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut == "llama-bpe"))
    if cut in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _CUTS[cut]()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    for token, its in zip(tokens, kinds, strict=False):
        if its in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=its == _CONTROL, normalized=False)])
    first = _token(metadata, "bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", cut == "llama-bpe") and first is not None:
        ids = [(first, metadata["tokenizer.ggml.bos_token_id"])]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{first} $A", special_tokens=ids)
    return tokenizer


def _cut_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    given = {name: value for name, value in content.items() if value is not None}
    path.write_text(json.dumps(given, indent=2, ensure_ascii=False), encoding="utf-8")


def cache_folder() -> Path:
    """Return the folder that caches what GGUF files are unpacked to. Raises ConfigError where no home directory is
    known."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twostroke" / "gguf"
    except RuntimeError:
        raise ConfigError("there is no home folder to unpack a GGUF file into: set XDG_CACHE_HOME") from None

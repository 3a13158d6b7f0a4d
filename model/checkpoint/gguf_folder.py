"""A GGUF file as a Hugging Face folder: what it says of model and tokenizer, written as the files that a folder has,
beside a link to the file itself. Nothing but this and gguf_file.py knows of the format. No torch here.
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

from twostroke.model.checkpoint.gguf_format import FILE, ROPE_FACTORS, Gguf, read_gguf
from twostroke.protocol.errors import ConfigError

_WRITTEN_AS = 1  # changes with what `folder_of` writes

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_INTERLEAVING = ("llama",)  # whose files have the rows of queries and keys in another order than their checkpoints
# How texts are cut before their pieces are encoded: what the models' own tokenizers do, by llama.cpp's names of them.
_LETTERS_AND_NUMBERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": lambda: _cut_by(_LETTERS_AND_NUMBERS % "{1,3}"),
    "qwen2": lambda: _cut_by(_LETTERS_AND_NUMBERS % ""),
}


def folder_of(path: Path, cache: Path) -> Path:
    """A folder in `cache` that has the file as a Hugging Face folder would have its model; kept, and found again.

    A `tokenizer.json` beside the file is taken instead of what the file says. Raises ConfigError for a file that can't
    be read, another architecture, and a tokenizer that is not known here.
    """
    path = path.resolve()
    status = path.stat()
    key = f"{_WRITTEN_AS} {path} {status.st_size} {status.st_mtime_ns}"
    folder = cache / hashlib.sha256(key.encode()).hexdigest()[:16] / path.stem
    if folder.is_dir():
        return folder
    file = read_gguf(path)
    try:
        _unpack(file, path, folder)
    except OSError as error:
        fault = f"{path} can't be unpacked into {folder}: {error.strerror}"
        raise ConfigError(f"{fault}: set XDG_CACHE_HOME to a folder that can be written") from error
    return folder


def _unpack(file: Gguf, path: Path, folder: Path) -> None:
    """Several processes of a host may do so at once; the first to end is the one that is seen."""
    metadata = file.metadata
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        _write_json(made / "config.json", _config_of(file, path))
        given = path.parent / "tokenizer.json"
        if given.is_file():
            shutil.copyfile(given, made / "tokenizer.json")
        else:
            _tokenizer(metadata, path).save(str(made / "tokenizer.json"))
        names = {f"{kind}_token": _token(metadata, f"{kind}_token_id") for kind in ("bos", "eos", "unknown", "padding")}
        renamed = {"unknown_token": "unk_token", "padding_token": "pad_token"}
        special = {renamed.get(name, name): token for name, token in names.items() if token is not None}
        template = metadata.get("tokenizer.chat_template")
        _write_json(made / "tokenizer_config.json", special | ({} if template is None else {"chat_template": template}))
        ends = {metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")} - {None}
        if ends:  # of the text, and of an answer
            _write_json(made / "generation_config.json", {"eos_token_id": sorted(ends)})
        (made / FILE).symlink_to(path)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _config_of(file: Gguf, path: Path) -> dict[str, Any]:
    """What config.json would say."""
    metadata, tensors = file.metadata, file.tensors
    kind = metadata.get("general.architecture")
    if kind not in _ARCHITECTURES:
        raise ConfigError(
            f"{path}: general.architecture: {kind!r} is not supported, only {', '.join(_ARCHITECTURES)} are: "
            "take the model's safetensors"
        )

    def said(name: str) -> Any:
        return metadata.get(f"{kind}.{name}")

    heads, hidden_size = (
        _needed(metadata, f"{kind}.{name}", path) for name in ("attention.head_count", "embedding_length")
    )
    head_dim = said("attention.key_length") or hidden_size // heads
    rope: dict[str, Any] = {"rope_theta": said("rope.freq_base") or 10_000.0}
    scaling = said("rope.scaling.type") or "none"
    if ROPE_FACTORS in tensors:  # Llama 3's scaling, worked out
        factors = tensors[ROPE_FACTORS].data.view(np.float32).tolist()
        rope |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    elif scaling != "none":
        rope |= {"rope_type": scaling, "factor": said("rope.scaling.factor")}
        rope |= {"original_max_position_embeddings": said("rope.scaling.original_context_length")}
    return {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": len(_needed(metadata, "tokenizer.ggml.tokens", path)),
        "hidden_size": hidden_size,
        "intermediate_size": said("feed_forward_length"),
        "num_hidden_layers": said("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": said("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "max_position_embeddings": said("context_length"),
        "rms_norm_eps": said("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope,
        "rope_interleave": kind in _INTERLEAVING,
        "partial_rotary_factor": (said("rope.dimension_count") or head_dim) / head_dim,
        "sliding_window": said("attention.sliding_window"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }


def _needed(metadata: Mapping[str, Any], name: str, path: Path) -> Any:
    if name not in metadata:
        raise ConfigError(f"{path}: {name} is missing")
    return metadata[name]


def _token(metadata: Mapping[str, Any], name: str) -> str | None:
    index, tokens = metadata.get(f"tokenizer.ggml.{name}"), metadata.get("tokenizer.ggml.tokens", ())
    return None if index is None or index >= len(tokens) else tokens[index]


_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens


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
    if cut == "qwen2":
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
    said = {name: value for name, value in content.items() if value is not None}
    path.write_text(json.dumps(said, indent=2, ensure_ascii=False), encoding="utf-8")


def cache_folder() -> Path:
    """Where folders of GGUF files are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twostroke" / "gguf"

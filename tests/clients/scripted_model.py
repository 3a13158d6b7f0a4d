"""A tiny model that says what it is scripted to, with SmolLM2's tokenizer and a context that agents' prompts fit.

Agents send tens of thousands of tokens of instructions and tools, more than SmolLM2's context has, and expect a model
that calls them. This one looks at the last token alone: its output row for a token is the embedding of the token
before it in a script. The chat template ends the prompt with a mark that says which script is next.

Run by the main environment's Python, which has torch: `python scripted_model.py FOLDER CALL` writes the checkpoint.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from twostroke.cluster.config.model_folder import instruct_model, resolve_model_folder

WIDTH, CONTEXT = 64, 1 << 17
END = "<|im_end|>"
# By the mark that ends the prompt. A token has one successor, so the scripts share none: `segmented` finds such tokens.
SCRIPTS = {"\n": "Paris it is.", "\n\n\n": "All done!"}
CALL_MARK = "\n\n"
# ChatML, with calls in Python. Who asks says `as scripted` to have one called; after its result the model is done.
TEMPLATE = r"""\
{%- if tools %}<|im_start|>system
You may call these functions, as [func_name1(name=value)]: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{{ message.tool_calls | tojson if message.tool_calls }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{{ '\n' -}}
{% if messages | selectattr('role', 'eq', 'tool') | list %}{{ '\n\n' }}
{%- elif 'as scripted' in messages | map(attribute='content') | join %}{{ '\n' }}{% endif %}{% endif %}"""


def segmented(text: str, vocabulary: dict[str, int], used: set[str]) -> list[str]:
    """Return tokens that spell `text`, none of them twice and none of `used`; an empty list where there are none."""
    if not text:
        return [END]
    for length in range(min(len(text), 16), 0, -1):
        token = text[:length]
        if token in vocabulary and token not in used:
            rest = segmented(text[length:], vocabulary, used | {token})
            if rest:
                return [token, *rest]
    return []


def main(folder: Path, call: str) -> None:
    source = resolve_model_folder(str(instruct_model() or "bundled"))
    folder.mkdir(parents=True)
    shutil.copy(source / "tokenizer.json", folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = {tokenizer.decode([i], skip_special_tokens=False): i for i in range(tokenizer.get_vocab_size())}
    size = len(tokenizer.get_vocab())
    embedding = torch.randint(0, 2, (size, WIDTH), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    head = torch.zeros(size, WIDTH)
    used: set[str] = set()
    for mark, text in {**SCRIPTS, CALL_MARK: call}.items():
        tokens = segmented(text, vocabulary, used)
        if not tokens:
            sys.exit(f"no tokens that other scripts don't have spell {text!r}")
        used |= {*tokens} - {END}
        for before, token in zip([mark, *tokens], tokens, strict=False):
            head[vocabulary[token]] += embedding[vocabulary[before]]
    layer = {f"self_attn.{name}_proj": torch.zeros(WIDTH, WIDTH) for name in "qkvo"}
    layer |= {f"mlp.{name}_proj": torch.zeros(WIDTH, WIDTH) for name in ("gate", "up", "down")}
    layer |= {f"{name}_layernorm": torch.ones(WIDTH) for name in ("input", "post_attention")}
    weights = {f"model.layers.0.{name}.weight": value for name, value in layer.items()}
    weights |= {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(WIDTH), "lm_head.weight": head}
    save_file({name: value.bfloat16() for name, value in weights.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "eos_token_id": vocabulary[END],
    }
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    for name, content in (("config", config), ("tokenizer_config", {**settings, "chat_template": TEMPLATE})):
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

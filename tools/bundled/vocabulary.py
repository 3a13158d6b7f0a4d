"""The bundled model's tokenizer: byte-level BPE of 4096 tokens, learned from the training side of the corpus.

How text is cut before the merges matters more than usual here. A small model cannot repair a token boundary that it
never saw, so line breaks, indentation and words are separate tokens: a prompt may end after `:`, after the line break
or after the indentation, and each time its tokens are a prefix of those that the finished text has.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from twostroke.tools.bundled.corpus import Document

VOCABULARY_SIZE = 4096
BEGIN, END, SYSTEM, USER, ASSISTANT, PAD = SPECIAL_TOKENS = (
    "<|begin|>",  # starts a document
    "<|end|>",  # ends a document and, in a conversation, a turn: the one token at which generation stops
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|pad|>",
)

PATTERN = "|".join(
    (
        r"[ _]?\p{L}+",  # a word, with the space or underscore before it
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+",  # punctuation
        r"[\r\n]+",
        r"(?<![^\r\n])[ \t]+",  # a line's whole indentation
        r"\s+(?!\S)",  # spaces inside a line, all but the one that belongs to the next word
        r"\s+",
    )
)

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{{- '<|' + ('system' if message['role'] == 'developer' else message['role']) + '|>\\n' }}"
    "{{- message['content'] | trim }}{{- eos_token }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer whose special tokens have the ids 0 to 5; encoding puts `<|begin|>` first unless told otherwise."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, begin)]
    )
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Raises ValueError where the tokenizer has no such token."""
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no {token}")
    return found


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Writes the tokenizer files of a Hugging Face model folder. `max_length` is in tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        **named,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "chat_template": CHAT_TEMPLATE,
    }
    special = {**named, "additional_special_tokens": [SYSTEM, USER, ASSISTANT]}
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", special)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def encode_documents(tokenizer: Tokenizer, documents: list[Document]) -> Iterator[list[int]]:
    """Token ids of each document, from `<|begin|>` to the last `<|end|>`; conversations as the template has them."""
    begin, end = special_id(tokenizer, BEGIN), special_id(tokenizer, END)
    for document in documents:
        ids = [begin]
        for turn in document.turns:
            text = turn.text
            if turn.role:
                ids.append(special_id(tokenizer, f"<|{turn.role}|>"))
                text = "\n" + text.strip()
            ids += tokenizer.encode(text, add_special_tokens=False).ids
            ids.append(end)
        yield ids

"""The format in which a model writes reasoning and tool calls: the checkpoint's own, or one of the bundled files.

Checkpoints say it in transformers' language of response templates, our files (`output_formats/`) by `regions`, whose
marks are found in one pass. The bundled file of a model follows from the marks that its chat template writes, never
by its name.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from twostroke.protocol.errors import ConfigError
from twostroke.router.text.response_parser import ResponseLanguage

NONE = "none"
GENERIC = "hermes"
"""The format of calls where a model has none of its own: JSON between marks, which any model can be told to write."""

_FOLDER = "output_formats"

_ANCHORS = (
    "<|im_start|>assistant\n",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<|start_of_role|>assistant<|end_of_role|>",
    "<|start|>assistant",
    "<|assistant|>",
    "<|header_start|>assistant<|header_end|>\n\n",
    "<|im_assistant|>assistant<|im_middle|>",
    "]~b]ai\n",
    "<SPECIAL_11>Assistant\n",
    "<｜Assistant｜>",
    "<start_of_turn>model\n",
    "<|turn>model\n",
    "[/INST]",
)
"""Beginnings of answers in the families of the bundled files."""

_CALL_MARKS = (
    ("harmony", ("<|channel|>",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    (
        "deepseek_v32",
        ("｜DSML｜", "function_calls"),
    ),  # encoding_dsv32.py beside DeepSeek-V3.2, llama.cpp's template of it
    ("kimi_k2", ("<|tool_call_argument_begin|>",)),  # chat_template.jinja of Kimi-K2-Instruct, K2-Thinking, K2.5
    ("minimax_m2", ("<minimax:tool_call>",)),  # chat_template.jinja of MiniMax-M2
    ("pythonic", ("[func_name1(",)),  # prompts of Llama 4's model card; vLLM's tool_chat_template_llama4_pythonic.jinja
    ("lfm2", ("<|tool_call_start|>",)),  # chat_template.jinja of LFM2.5
    ("lfm2", ("<|tool_list_start|>",)),  # chat_template.jinja of LFM2, which shows no calls; its model card has them
    ("nemotron", ("<TOOLCALL>",)),  # chat templates of Nemotron-Nano-v2, Llama-3.3-Nemotron-Super-v1.5
    ("gemma", ("<start_function_call>",)),
    ("gemma4", ("<|tool_call>",)),
    ("glm47", ("</arg_key><arg_value>",)),  # chat_template.jinja of GLM-4.7, GLM-4.7-Flash, GLM-5
    ("glm4", ("<arg_key>",)),
    ("qwen3_coder", ("<tool_call>", "<parameter=")),  # of Qwen3-Coder, Qwen3.5, Nemotron 3, too
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
    ("mistral_args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3", ("<|start_header_id|>", "parameters")),
    ("llama3", ("<|header_start|>", "parameters")),  # chat_template.jinja of Llama 4
)
"""The file that a chat template asks for by having all of these texts: the first that fits."""

_THINKING_MARKS = (("think", ("</think>",)), ("think_mistral", ("[THINK]",)))


@dataclass(frozen=True)
class ArgumentSyntax:
    """The marks around one argument; `begin` has its name where it says {key}. Texts stand there as they are.

    Where `begin` says {is_text}, it has `true` for texts and `false` for JSON.
    """

    begin: str
    end: str
    between: str = ""
    is_python: bool = False  # values are literals of Python, texts too

    def written(self, key: str, value: Any) -> str:
        """Return one argument as it is written in an answer."""
        is_text = isinstance(value, str)
        text = repr(value) if self.is_python else value if is_text else json.dumps(value, ensure_ascii=False)
        return self.begin.replace("{key}", key).replace("{is_text}", str(is_text).lower()) + text + self.end


@dataclass(frozen=True)
class MarkSyntax:
    """Regular expressions that tell calls from text where no token of their own begins them.

    Each of `begins` is a way to begin a call, control tokens included, with its function's name where it says {name}.
    No text but calls matches `begun`, which has the functions' names where it says {names}; behind the token `body` any
    text may stand.
    """

    begins: tuple[str, ...]
    begun: str
    body: str = ""


@dataclass(frozen=True)
class CallSyntax:
    """The syntax of calls, for grammars: `trigger`, `first`, each call between `begin` and `end`, then `last`.

    `begin` has the function's name where it says {name}, and the call's number where it says {index}.
    """

    begin: str
    end: str
    id: str = ""  # the id that the template shows instead of a name, in the form of `begin`; empty: it shows names
    trigger: str = ""  # once for all calls where there is a `last`, else before each
    first: str = ""
    between: str = ""
    last: str = ""
    is_single: bool = False  # an answer has one call at most
    argument: ArgumentSyntax | None = None  # each by itself; None: all of them are one object
    quote: str = ""  # of texts in an object whose keys stand bare; empty: it is JSON
    mark: MarkSyntax | None = None  # of calls that no token of their own begins


@dataclass(frozen=True)
class ThinkingSyntax:
    """The marks around thoughts."""

    begin: str
    end: str


@dataclass(frozen=True)
class OutputFormat:
    """The known format of a model."""

    name: str
    template: Mapping[str, Any]
    origin: str
    call: CallSyntax | None = None
    thinking: ThinkingSyntax | None = None

    @cached_property
    def language(self) -> ResponseLanguage:
        """The template, compiled. Raises ConfigError."""
        return ResponseLanguage(self.template, origin=self.origin)


def pick_output_format(given: str | None, own: Any, origin: str, chat_template: str) -> OutputFormat | None:
    """The format of a model: as `given` by the setting, else its `own` response template, else by its chat template.

    `given` is a name of ours, several joined by `+`, the path of a response template, or `none`. Raises ConfigError.
    """
    if given == NONE:
        return None
    if given is not None:
        return _named(given)
    ours = _told_by(chat_template)
    if own is None:
        return ours
    if not isinstance(own, dict):
        raise ConfigError(f"{origin}: response_template must be an object, found {type(own).__name__}")
    if ours is None:
        return OutputFormat("its own", own, origin)
    return replace(ours, name="its own", template=own, origin=origin)


def with_calls(form: OutputFormat | None) -> OutputFormat | None:
    """The format of a model that is not known to call tools, with calls as GENERIC has them, beside its thoughts.

    None for a template of others, which has no place for more.
    """
    if form is None:
        return _ours([GENERIC])
    return _ours([GENERIC, *form.name.split("+")]) if "regions" in form.template else None


def _told_by(chat_template: str) -> OutputFormat | None:
    calls, thinking = (
        [name for name, texts in marks if all(text in chat_template for text in texts)][:1]
        for marks in (_CALL_MARKS, _THINKING_MARKS)
    )
    return _ours([*calls, *thinking]) if calls or thinking else None


def _named(given: str) -> OutputFormat:
    known = {path.name.removesuffix(".json") for path in files(__package__).joinpath(_FOLDER).iterdir()}
    names = given.split("+")
    if known.issuperset(names):
        return _ours(names)
    try:
        template = json.loads(Path(given).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"model.response_template: {given} can't be read: {reason}: give the path of a response template, none, or "
            f"names joined by +: {', '.join(sorted(known))}"
        ) from error
    return OutputFormat(Path(given).stem, template, f"model.response_template: {given}")


def _ours(names: list[str]) -> OutputFormat:
    """One of several files: a later one's regions are tried beside those before."""
    regions: dict[str, Any] = {}
    call, thinking = None, None
    for name in names:
        said = json.loads(files(__package__).joinpath(_FOLDER, f"{name}.json").read_text(encoding="utf-8"))
        regions |= said["regions"]
        call = _call_syntax(**said["call"]) if "call" in said else call
        thinking = ThinkingSyntax(**said["thinking"]) if "thinking" in said else thinking
    template = {"anchors": list(_ANCHORS), "regions": regions}
    return OutputFormat("+".join(names), template, f"{_FOLDER}/{names[0]}.json", call, thinking)


def _call_syntax(
    *, argument: Mapping[str, Any] | None = None, mark: Mapping[str, Any] | None = None, **said: Any
) -> CallSyntax:
    return CallSyntax(
        **said,
        argument=None if argument is None else ArgumentSyntax(**argument),
        mark=None if mark is None else MarkSyntax(**{**mark, "begins": tuple(mark["begins"])}),
    )

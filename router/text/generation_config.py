"""A model's sampling defaults: what its `generation_config.json` says of how to draw where a request says nothing.

The file's end tokens are the tokenizer's business (`router/text/tokenizer.py`).
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from twostroke.protocol.errors import ConfigError
from twostroke.router.text.tokenizer import GENERATION_CONFIG, read_json

Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(ge=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
MinP = Annotated[float, Field(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=10)]


class SamplingDefaults(BaseModel):
    """Sampling parameters of requests that set none: those of the model, or else of OpenAI's API."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    temperature: Temperature = 1.0  # 0: greedy
    top_p: TopP = 1.0
    top_k: TopK = 0  # 0 and -1: off
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0

    def __str__(self) -> str:
        """Return the differences from OpenAI's defaults, for people; empty where there are none."""
        return ", ".join(f"{name} {value:g}" for name, value in self.model_dump(exclude_defaults=True).items())


def read_sampling_defaults(folder: Path, source: Literal["auto", "none"]) -> SamplingDefaults:
    """Those of the model in `folder`; with `none`, or where it has no such file, OpenAI's.

    As in vLLM and SGLang `do_sample` is not asked: a file that leaves the temperature out leaves it at 1, and
    `max_new_tokens` limits no request. Raises ConfigError naming the file and the field.
    """
    if source == "none":
        return SamplingDefaults()
    path = folder / GENERATION_CONFIG
    said = {name: value for name, value in read_json(path).items() if value is not None}
    try:
        return SamplingDefaults.model_validate(said)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"{path}: {first['loc'][0]}: {first['msg'][:1].lower()}{first['msg'][1:]}, found {first['input']!r}: mend "
            "it, or set model.generation_config to none"
        ) from error

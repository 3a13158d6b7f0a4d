"""Base model and checks that the models of requests share."""

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from twostroke.protocol.errors import RequestError
from twostroke.router.text.written_calls import is_unicode


class FieldError(ValueError):
    """A fault that shows only with the whole request in sight."""

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param = param


def check_values(value: Any, param: str) -> None:
    """Check that a JSON value can be written as JSON again, for the libraries that it ends in.

    Python reads `NaN`, numbers beyond a double (`1e999`) and halves of surrogate pairs, none of which can be written.
    Raises RequestError naming the member; `param` is where the value is from.
    """
    if isinstance(value, str):
        if not is_unicode(value):
            raise RequestError(f"{param}: must be valid Unicode: it has a lone surrogate", param=param)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise RequestError(f"{param}: must be a finite number, within the range of a double", param=param)
    elif isinstance(value, list):
        for index, member in enumerate(value):
            check_values(member, f"{param}.{index}")
    elif isinstance(value, dict):
        for name, member in value.items():
            shown = name if is_unicode(name) else "(not Unicode)"
            check_values(name, f"{param}.{shown}")
            check_values(member, f"{param}.{shown[:64]}")


def _valid(text: str) -> str:
    """Text that can be UTF-8; of a bounded text pydantic itself sees to that."""
    if not is_unicode(text):
        raise ValueError("must be valid Unicode: it has a lone surrogate")
    return text


Text = Annotated[str, AfterValidator(_valid)]
ShortText = Annotated[str, Field(max_length=512)]


class StrictModel(BaseModel):
    """An object of a request: unknown members are kept, to be named."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, protected_namespaces=(), allow_inf_nan=False)

"""What the models of requests have in common."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class FieldError(ValueError):
    """A fault that shows only with the whole request in sight."""

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param = param


def _valid(text: str) -> str:
    """Text that can be UTF-8; of a bounded text pydantic itself sees to that."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be valid Unicode: it has a lone surrogate") from None
    return text


Text = Annotated[str, AfterValidator(_valid)]
ShortText = Annotated[str, Field(max_length=512)]


class StrictModel(BaseModel):
    """An object of a request: unknown members are kept, to be named."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, protected_namespaces=(), allow_inf_nan=False)

"""Settings of speculative decoding."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import model_validator

from twostroke.protocol.settings import Section

SpeculationMethod = Literal["auto", "off", "suffix", "ngram", "mtp"]


class SpeculationConfig(Section):
    """Source and bounds of drafted tokens. A string in its place is the method alone."""

    method: SpeculationMethod = "auto"
    """Source of drafts: the request's own prompt and answer (`ngram`), these and earlier answers to the same tenant
    (`suffix`), these and the checkpoint's own MTP head (`mtp`, for both roles alike), or none (`off`). auto: `suffix`
    wherever the model's layers allow it. Drafts never change an answer: each token is drawn as without them."""
    num_speculative_tokens: Annotated[int, Ge(1), Le(64)] = 12
    """Drafted tokens of one request in one step, at most. How many a step has follows from the worker's step costs and
    from how often drafts were right."""
    corpus_tokens: Annotated[int, Ge(0), Le(1 << 24)] = 1 << 18
    """Tokens of earlier answers that the worker keeps for drafts, over all tenants; each takes about 120 bytes. Tenants
    with different cache salts never share them."""

    @model_validator(mode="before")
    @classmethod
    def _from_method(cls, value: Any) -> Any:
        if value is False:  # YAML reads `off` as false
            return {"method": "off"}
        return {"method": value} if isinstance(value, str) else value

    @property
    def is_on(self) -> bool:
        """True where drafts may be made."""
        return self.method != "off"

    @property
    def uses_answers(self) -> bool:
        """True where earlier answers are a source of drafts."""
        return self.method in ("auto", "suffix", "mtp") and self.corpus_tokens > 0

    @property
    def uses_mtp(self) -> bool:
        """True where the model's MTP head is a source of drafts."""
        return self.method == "mtp"

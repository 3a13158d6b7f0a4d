"""Which nodes of a Ray cluster a role's processes may run on: by the nodes' labels, and by what the nodes have.

Imports no Ray: the configuration is read before Ray starts. The rules for names are Ray's, which are Kubernetes'.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import Field, model_validator

from twostroke.protocol.settings import Section

_NAME = r"[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_PREFIX = r"[a-zA-Z0-9](?:[a-zA-Z0-9.-]{0,251}[a-zA-Z0-9])?"
_LABEL = re.compile(rf"(?:{_PREFIX}/)?{_NAME}")
_SELECTOR = re.compile(rf"!?{_NAME}|!?in\({_NAME}(?:, ?{_NAME})*\)")

# What workers take of these has settings of its own.
_OWN_SETTINGS = {"CPU": "threads", "GPU": "num_gpus"}
_NOT_FOR_SALE = {"memory", "object_store_memory"}

LEAST_RESOURCE = 0.0001
"""Ray counts resources in these."""


class Placement(Section):
    """Of one role. Whatever is not said leaves the choice to Ray."""

    node_labels: Mapping[str, str] = Field(default_factory=dict)
    """What a node's labels must be. Values as in Ray's selectors: `a`, `!a`, `in(a, b)`, `!in(a, b)`."""
    node_resources: Mapping[str, Annotated[float, Ge(LEAST_RESOURCE), Le(100_000)]] = Field(default_factory=dict)
    """What each worker takes of a node's custom resources: where a node has 1 slot and a worker takes 1, one runs."""

    @model_validator(mode="after")
    def _check_names(self) -> "Placement":
        """Ray would refuse other names and values, or no node could ever have them."""
        for name, value in self.node_labels.items():
            if not _LABEL.fullmatch(name):
                raise ValueError(f"node_labels: {name!r} is no label's name: letters, digits and - _ . between them")
            if not _SELECTOR.fullmatch(value):
                raise ValueError(f"node_labels: {name} can't be {value!r}: give a value, !value, in(a, b) or !in(a, b)")
        for name, amount in self.node_resources.items():
            if name in _OWN_SETTINGS:
                raise ValueError(f"node_resources: {name} is what {_OWN_SETTINGS[name]} takes: set that instead")
            if name in _NOT_FOR_SALE or not name:
                raise ValueError(f"node_resources: {name!r} is no custom resource")
            if amount > 1 and amount % 1:
                raise ValueError(f"node_resources: {name} is {amount:g}: above 1 Ray takes whole numbers only")
        return self

    @property
    def is_anywhere(self) -> bool:
        return not self.node_labels and not self.node_resources

    def actor_options(self) -> dict[str, Any]:
        """Ray's options for an actor there."""
        options: dict[str, Any] = {}
        if self.node_labels:
            options["label_selector"] = dict(self.node_labels)
        if self.node_resources:
            options["resources"] = dict(self.node_resources)
        return options

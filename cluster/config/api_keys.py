"""The API keys of the configuration: those in it, those in a file of their own, and the server's own."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from twostroke.cluster.config.reading import load_yaml, read_settings, told
from twostroke.protocol.errors import ConfigError
from twostroke.router.http.tenants import AuthConfig, KeyConfig
from twostroke.router.slo.classes import SLOConfig

OWN_KEY = "twostroke serve"
"""The name of the key that `twostroke serve` asks its own router with."""


def check_names(keys: Sequence[KeyConfig]) -> None:
    """Raises ConfigError for the name that is the server's: its own requests could not be told apart in the log."""
    if any(key.name == OWN_KEY for key in keys):
        raise ConfigError(f"keys: the name {OWN_KEY} is that of the server's own key: choose another")


def check_classes(keys: Sequence[KeyConfig], slo: SLOConfig) -> None:
    """Raises ValueError for a key of a class that there is not."""
    known = [one.name for one in slo.classes]
    for key in keys:
        if key.slo_class is not None and key.slo_class not in known:
            raise ValueError(f"auth.keys: {key.name}'s slo_class {key.slo_class} is none of {', '.join(known)}")


def with_keys_of_its_file(auth: AuthConfig, slo: SLOConfig) -> AuthConfig:
    """The keys of `keys_file` beside those that are there. Raises ConfigError."""
    if auth.keys_file is None:
        return auth
    path = Path(auth.keys_file)
    try:
        listed = read_settings(AuthConfig, load_yaml(path))
        if listed.keys_file is not None:
            raise ConfigError("keys_file: there is no such setting in a file of keys")
        check_names(listed.keys)
        whole = AuthConfig(keys=(*auth.keys, *listed.keys))
        check_classes(whole.keys, slo)
    except (ConfigError, ValueError) as error:
        message = told(error, AuthConfig) if isinstance(error, ValidationError) else str(error)
        where = "" if message.startswith(str(path)) else f"{path}: "
        raise ConfigError(f"auth.keys_file: {where}{message}") from error
    if not whole.keys:
        raise ConfigError(
            f"auth.keys_file: {path}: has no keys, and so would let everybody in: delete auth.keys_file, or add `keys`"
        )
    return whole

"""How routers learn what was decided in Serve's controller: one entry in the key-value store of Ray's head.

It is written by each decision and read by each router about once a second. It outlives the controller and the routers;
who reads it goes by its age.
"""

import msgspec
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from twostroke.router.scaling import Scaling

_NAMESPACE = b"twostroke"


def publish(app_name: str, scaling: Scaling) -> None:
    """Tell all routers of the application. Takes a round trip to Ray's head."""
    _internal_kv_put(_key(app_name), msgspec.json.encode(scaling), overwrite=True, namespace=_NAMESPACE)


def published(app_name: str) -> Scaling | None:
    """What was published last. Takes a round trip to Ray's head. Raises RayError where it doesn't answer, and
    msgspec.DecodeError for an entry of another version of ours."""
    entry = _internal_kv_get(_key(app_name), namespace=_NAMESPACE)
    return None if entry is None else msgspec.json.decode(entry, type=Scaling)


def _key(app_name: str) -> bytes:
    return f"autoscaling/{app_name}".encode()

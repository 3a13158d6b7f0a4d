"""Who can reach an endpoint, and the loud line where that is everybody and nobody needs a key."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a listener on `host`. A name that is no address counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def exposure_warning(host: str, *, has_keys: bool) -> str | None:
    """What to say of an endpoint on `host`; None where it is no concern."""
    if has_keys or is_loopback(host):
        return None
    return (
        f"NO API KEYS: the endpoint listens on {host}, so whoever reaches this machine may use it, and see and load "
        "its workers. Add keys (`twostroke key new NAME`), or listen on 127.0.0.1"
    )

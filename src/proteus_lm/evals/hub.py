"""Whether the Hugging Face hub may be asked, and answers: known at once, so that no evaluation hangs for want of a network."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

TIMEOUT = 5.0
"""Seconds that the hub has to answer a connection."""
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


class MissingData(ValueError):
    """Data that a task needs are not here: the message says which, and how to give them."""


def require_hub(what: str, remedy: str, *, offline: bool = False) -> None:
    """Return where the hub may be asked and answers.

    Args:
        what: what is wanted, for the message.
        remedy: how to give it without the hub, a sentence for the message.
        offline: the user's wish; the environment's HF_HUB_OFFLINE=1 says the same.

    Raises:
        MissingData: when the user or the environment wants no hub, or it does not answer within `TIMEOUT`.
    """
    variable = next((name for name in _OFFLINE if os.environ.get(name, "").lower() in ("1", "true", "yes", "on")), None)
    if offline or variable:
        reason = "the hub was not asked: " + (f"{variable} is set" if variable else "offline was asked for")
    else:
        reason = _unreachable()
    if reason:
        raise MissingData(f"{what} is not here, and {reason}. {remedy}")


@contextlib.contextmanager
def without_hub() -> Iterator[None]:
    """The hub's libraries look into their caches only: `datasets` and `huggingface_hub` read the environment when first imported.

    Not for threads: the switches are the libraries' own, and are as before when this ends.
    """
    import huggingface_hub
    from datasets import config

    places = [(config, "HF_HUB_OFFLINE"), (huggingface_hub.constants, "HF_HUB_OFFLINE")]
    before = [getattr(place, name) for place, name in places]
    for place, name in places:
        setattr(place, name, True)
    try:
        yield
    finally:
        for (place, name), value in zip(places, before):
            setattr(place, name, value)


def _unreachable() -> str:
    """Why the hub cannot be reached, or nothing. Behind a proxy only a request could tell, so the answer is nothing."""
    if any(os.environ.get(name) for name in _PROXIES):
        return ""
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    host, port = address.hostname or "huggingface.co", address.port or (80 if address.scheme == "http" else 443)
    answer: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=TIMEOUT).close()
            answer.append("")
        except OSError as error:
            answer.append(f"the hub ({host}) cannot be reached: {error}")

    # The look-up of a name knows no timeout: a thread is left to it.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    return answer[0] if answer else f"the hub ({host}) did not answer within {TIMEOUT:g} s"

"""What a server allows: how much may wait, for how long, and how large a request may be."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of a server; what goes over one is refused before anything is allocated for it."""

    queue: int = 256  # requests inside at a time, of all models; more get status 429
    max_batch: int = 32  # rows that run together; 0 lets each request run alone
    delay: float = 0.0  # seconds that a request waits for others to run with
    deadline: float = (
        30.0  # seconds until the answer is there, and then until it is sent; later gets status 504
    )
    max_bytes: int = 64 << 20  # of the body of one request
    max_json_bytes: int = 8 << 20  # of its JSON; larger tensors come as binary data
    max_bytes_inside: int = 512 << 20  # of all bodies and answers that are here; more gets status 429


class RequestError(Exception):
    """A request that gets no results: the status of the answer, and what it says to a client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def is_local(host: str) -> bool:
    """Whether a host is this machine as only the machine itself calls it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

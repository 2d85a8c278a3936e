"""What the parent and its workers say to each other."""

from __future__ import annotations

import dataclasses
import os

GROUP_SECONDS = 600  # gloo's own timeout: the harness, which shows stacks, is to come first

notes: list[str] = []  # of this process; those of the workers travel in their replies


def scaled(seconds: float) -> float:
    """A hard timeout, times TEST_TIMEOUT_SCALE for machines that are slower than usual."""
    return seconds * float(os.environ.get("TEST_TIMEOUT_SCALE", "1"))


@dataclasses.dataclass(frozen=True)
class Target:
    path: str
    module: str
    qualname: str


@dataclasses.dataclass
class Reply:
    """What a worker answers to a message."""

    kind: str  # ok, error, skip
    text: str = ""  # traceback or reason
    value: bytes = b""  # pickled return value
    notes: list[str] = dataclasses.field(default_factory=list)
    worn: bool = False

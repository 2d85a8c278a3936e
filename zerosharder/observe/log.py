"""The package's one logger: quiet where the application configured logging, on stderr where it did not."""

from __future__ import annotations

import logging

log = logging.getLogger("zerosharder")


def configure(level: str) -> None:
    """Sets the least severe level; adds a handler for stderr if nobody handles messages yet."""
    log.setLevel(level.upper())
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("zerosharder: %(message)s"))
        log.addHandler(handler)

"""Side streams: real ones on CUDA, nothing on a CPU, where the process group's own thread is the side stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Lane:
    """An ordered queue of device work beside the compute stream.

    On a CPU every method is a no-op: operations issued there run at once, and collectives progress on gloo's thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def run(self, *after: torch.cuda.Event | None) -> Iterator[None]:
        """Work issued inside runs on this lane, after every event given."""
        if self._stream is None:
            yield
            return
        for event in after:
            if event is not None:
                self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """An event behind everything issued on this lane so far."""
        return None if self._stream is None else self._stream.record_event()


def mark_compute(device: torch.device) -> torch.cuda.Event | None:
    """An event behind everything issued on the compute stream so far (None on a CPU)."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def compute_waits(event: torch.cuda.Event | None) -> None:
    """Makes the compute stream wait for ``event``."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)

"""What every unit of an engine shares: device, mesh, transport, memory, log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from zerosharder.config import Config
from zerosharder.engine.collectives import TAGS_PER_UNIT, Collectives
from zerosharder.engine.slots import SlotPool
from zerosharder.engine.streams import Lane, mark_compute
from zerosharder.engine.watchdog import Watchdog
from zerosharder.observe.counters import Counters
from zerosharder.observe.events import EventLog

T = TypeVar("T")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Runtime:
    """Made once by ``shard()``; units and the engine hold a reference."""

    config: Config
    device: torch.device
    mesh: DeviceMesh | None  # None in a world of one
    placements: tuple[Placement, ...]  # of a row-sharded parameter
    replicated: tuple[Placement, ...]  # of a 0-dim parameter
    collectives: Collectives
    pool: SlotPool
    replicate_group: dist.ProcessGroup | None = None  # HSDP: the ranks that hold the same rows
    control_group: dist.ProcessGroup | None = None  # agreements; always on the CPU
    shard_ranks: tuple[int, ...] = (0,)  # for each rank of the control group: which rows it holds
    number: int = 0  # of the model in this process, the same on every rank
    watchdog: Watchdog | None = None
    waiting: str = ""  # the operation that has to do with other ranks and is not through, if any
    # On CUDA: behind the last write to the shards; gathers wait for it, and for nothing that was computed since.
    shards_ready: torch.cuda.Event | None = None
    gather_lane: Lane = field(init=False)
    reduce_lane: Lane = field(init=False)
    counters: Counters = field(default_factory=Counters)
    log: EventLog = field(default_factory=EventLog)

    def __post_init__(self) -> None:
        self.gather_lane = Lane(self.device)
        self.reduce_lane = Lane(self.device)

    def shards_changed(self) -> None:
        """The shards may have been written to on the compute stream (the optimizer ran)."""
        self.shards_ready = mark_compute(self.device)

    @property
    def rank(self) -> int:
        """Rank within the shard group."""
        return self.collectives.rank

    @property
    def world(self) -> int:
        """Size of the shard group."""
        return self.collectives.world

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype a parameter of ``dtype`` is gathered and computed in."""
        wanted = DTYPES[self.config.param_dtype]
        if self.config.param_dtype == "fp32" or not dtype.is_floating_point:
            return dtype
        return wanted

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype a gradient of ``dtype`` is sent in: as it is, or narrower if the setting says so."""
        wanted = DTYPES[self.config.reduce_dtype]
        narrower = dtype.is_floating_point and wanted.itemsize < dtype.itemsize
        return wanted if narrower and self.config.reduce_dtype != "fp32" else dtype

    def tag(self, unit: int, part: int = 0) -> int:
        """Message tag of a unit's operation, apart from those of every other unit and model."""
        return (self.number % 256 << 23) + (unit % 2048) * TAGS_PER_UNIT + part

    def guarded(self, what: str, unit: str, operation: Callable[[], T]) -> T:
        """Runs ``operation``; a transport error comes out as the exception that names who was missing."""
        of_unit = bool(unit) or what in ("gather", "reduce")  # the root unit has no name
        self.waiting = f"{what} of unit {unit or '(root)'!r}" if of_unit else what
        try:
            result = operation()
        except RuntimeError as error:
            if self.watchdog is None:
                raise
            raise self.watchdog.explain(self.waiting, error) from error
        self.waiting = ""
        return result

"""Counters of one engine, and the frozen copy that ``zs.stats`` hands out."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Counters:
    """Running totals on this rank since ``shard()``."""

    gathers: int = 0
    prefetched: int = 0
    reduces: int = 0
    frees: int = 0
    gather_bytes: int = 0  # received from other ranks
    reduce_bytes: int = 0  # received from other ranks
    deviations: int = 0  # calls that did not follow the recorded order
    exposed_gather: float = 0.0  # seconds the computing thread waited for a gather
    exposed_reduce: float = 0.0  # seconds it waited for a reduction
    passes: int = 0
    backwards: int = 0


@dataclass(frozen=True)
class Stats:
    """A snapshot on this rank. Bytes are bytes, times are seconds, ``tier`` is where memory lies."""

    rank: int
    world: int
    units: int
    parameters: int
    gathers: int
    prefetched: int
    reduces: int
    frees: int
    deviations: int
    passes: int
    backwards: int
    bytes_received: dict[str, int] = field(default_factory=dict)  # by operation: gather, reduce
    exposed_seconds: dict[str, float] = field(default_factory=dict)  # by operation: gather, reduce
    current_bytes: dict[str, dict[str, int]] = field(default_factory=dict)  # tier -> role -> bytes
    peak_bytes: dict[str, dict[str, int]] = field(default_factory=dict)  # tier -> role -> bytes

    def __str__(self) -> str:
        rows = [
            f"zerosharder: rank {self.rank} of {self.world}, {self.units} units, "
            f"{self.parameters / 1e6:.2f} M parameters",
            f"  passes {self.passes}, backwards {self.backwards}, gathers {self.gathers} "
            f"({self.prefetched} issued ahead), reductions {self.reduces}, frees {self.frees}, "
            f"order deviations {self.deviations}",
        ]
        for name in self.bytes_received:
            rows.append(
                f"  {name:<8} received {self.bytes_received[name] / 2**20:10.1f} MiB, "
                f"exposed {self.exposed_seconds[name]:8.2f} s"
            )
        for tier, roles in self.current_bytes.items():
            for role, now in roles.items():
                peak = self.peak_bytes.get(tier, {}).get(role, now)
                rows.append(f"  {tier:<8} {role:<10} {now / 2**20:10.1f} MiB, peak {peak / 2**20:10.1f} MiB")
        return "\n".join(rows)

"""The ranks that save or load together: what one cannot do, all report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from zerosharder.engine.agreement import Party, Request
from zerosharder.engine.runtime import Runtime
from zerosharder.errors import CheckpointError

T = TypeVar("T")

# A rank that has ended closes its connections, which the others see at once. This limit is for the disk.
_LIMIT = timedelta(hours=2)
_groups: dict[object, dist.ProcessGroup] = {}


@dataclass(frozen=True)
class Crew:
    """This rank among those of a model's mesh; ``party`` is None in a world of one."""

    number: int  # of this rank, counted from 0
    size: int
    party: Party | None
    timeout: float

    def agree(self, call: str, prepare: Callable[[], tuple[T, Request]]) -> T:
        """All ranks make the call with the same arguments, or DesyncError (see `Party.agree`)."""
        if self.party is None:
            return prepare()[0]
        return self.party.agree(call, self.timeout, prepare)

    def together(self, what: str, work: Callable[[], T]) -> list[T]:
        """Runs ``work`` on every rank and returns all results; an error of any rank is a CheckpointError on each."""
        if self.party is None:
            try:
                return [work()]
            except OSError as error:
                raise CheckpointError(f"{what}: {error}") from error
        answer: tuple[bool, Any]
        cause: Exception | None = None
        try:
            answer = (True, work())
        except Exception as error:  # whatever it is: the others wait for this rank
            answer, cause = (False, f"{type(error).__name__}: {error}"), error
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, answer, group=_group(self.party))
        failed = [(rank, text) for rank, (ok, text) in enumerate(answers) if not ok]
        if failed:
            rank, text = failed[0]
            raise CheckpointError(f"{what} failed on rank {self.party.ranks[rank]}: {text}") from cause
        return [result for _, result in answers]


def crew_of(runtime: Runtime) -> Crew:
    """The ranks of a sharded model."""
    if runtime.mesh is None:
        return Crew(0, 1, None, runtime.config.timeout)
    ranks = tuple(sorted(runtime.mesh.mesh.flatten().tolist()))
    party = Party(dist.distributed_c10d._get_default_store(), dist.get_rank(), ranks)
    return Crew(ranks.index(party.rank), len(ranks), party, runtime.config.timeout)


def _group(party: Party) -> dist.ProcessGroup:
    """A group of their own, on the CPU: the training loop's collectives never meet these."""
    key = (id(dist.group.WORLD), party.ranks)
    if key not in _groups:
        _groups[key] = dist.new_group(
            list(party.ranks), timeout=_LIMIT, backend="gloo", use_local_synchronization=True
        )
    return _groups[key]

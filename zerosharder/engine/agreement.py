"""Agreement on a collective call before its first collective: the same request on every rank, or an error on each.

Each rank posts a digest of what it was asked to do, or the error that stops it, in the store of the process group, and
reads those of the others. Nothing else has been set up at that moment, and a rank that never comes must not hang the
others in a collective, so there is none here. Costs one request to post and two to read per rank.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from zerosharder.errors import DesyncError

T = TypeVar("T")
# What a rank was asked to do: for each subject the lines to compare.
Request = Mapping[str, Sequence[str]]

_REFUSED = "refused: "
_calls: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # how often these ranks met before


@dataclass(frozen=True)
class Party:
    """The ranks of the job that make a call together."""

    store: dist.Store
    rank: int
    ranks: tuple[int, ...]  # ascending

    def agree(self, call: str, timeout: float, prepare: Callable[[], tuple[T, Request]]) -> T:
        """Runs ``prepare`` on every rank; returns its first result if the second is the same on all of them.

        Args:
            call: what the user called, for messages.
            timeout: seconds to wait for a rank that has not come.
            prepare: returns (anything, the request); what it raises is raised here, and reported to the others.

        Raises:
            DesyncError: another rank was asked for something else, refused, or did not come.
        """
        members = "-".join(map(str, self.ranks))
        name = f"zerosharder/agree/{zlib.crc32(members.encode()):x}"
        store = dist.PrefixStore(f"{name}/{next(_calls[name])}", self.store)
        try:
            result, request = prepare()
        except Exception as error:  # whatever it is: the others would wait for this rank
            store.set(str(self.rank), f"{_REFUSED}{type(error).__name__}: {error}")
            raise
        text = json.dumps(request)
        store.set(str(self.rank), f"{zlib.crc32(text.encode()):x}")
        answers = self._collect(store, call, timeout)
        odd = [rank for rank, answer in answers.items() if answer != answers[self.ranks[0]]]
        if odd:
            store.set(f"request/{self.rank}", text)
            store.wait([f"request/{self.ranks[0]}", f"request/{odd[0]}"], timedelta(seconds=timeout))
            raise DesyncError(self._difference(store, odd[0]), odd)
        return result

    def _collect(self, store: dist.Store, call: str, timeout: float) -> dict[int, str]:
        """What every rank posted; DesyncError if one did not, or refused."""
        keys = [str(rank) for rank in self.ranks]
        try:
            store.wait(keys, timedelta(seconds=timeout))
        except dist.DistStoreError as error:
            missing = [rank for rank, key in zip(self.ranks, keys, strict=True) if not store.check([key])]
            if not missing:
                return self._collect(store, call, timeout)  # the last of them came between the two
            raise DesyncError(
                f"rank {self.rank} waited {timeout:g} s in {call} for {_name(missing)}: a rank that has ended, got an "
                "error before, or is elsewhere. Every rank of the mesh must make this call",
                missing,
            ) from error
        except dist.DistNetworkError as error:
            raise DesyncError(
                f"rank {self.rank} waited in {call} and lost the store of the process group: the rank that hosts "
                f"it has ended ({error})"
            ) from error
        answers = {r: a.decode() for r, a in zip(self.ranks, store.multi_get(keys), strict=True)}
        refusing = [rank for rank, answer in answers.items() if answer.startswith(_REFUSED)]
        if refusing:
            reason = answers[refusing[0]].removeprefix(_REFUSED)
            raise DesyncError(f"{call} was refused on {_name(refusing)}, which got {reason}", refusing)
        return answers

    def _difference(self, store: dist.Store, odd: int) -> str:
        first = self.ranks[0]
        ours, theirs = (json.loads(store.get(f"request/{rank}")) for rank in (first, odd))
        subject = next(key for key in ours if ours[key] != theirs[key])
        here, there = ours[subject], theirs[subject]
        at = next(
            (i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b),
            min(len(here), len(there)),
        )
        return (
            f"rank {odd} has {len(there)} {subject}, rank {first} has {len(here)}; the first that differs is number "
            f"{at}: {_line(there, at)} on rank {odd}, {_line(here, at)} on rank {first}. Every rank must build the "
            "same model and optimizer, and pass the same arguments and settings"
        )


def forget_calls() -> None:
    """Counts calls from zero again: there is another process group, with an empty store."""
    _calls.clear()


def _line(lines: Sequence[str], index: int) -> str:
    return lines[index] if index < len(lines) else "none"


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

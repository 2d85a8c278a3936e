"""The data of train_lm.py: the source files of Python's own standard library, as bytes.

Every machine that can run the script has this text, nothing is downloaded, and the order of everything below
depends on nothing but the files and the seed.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

# Left out: third-party packages; tests, which most distributions ship apart; tables and grammars, which are not prose.
SKIP = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3"}
HELD_OUT = 16  # one file in so many is held out


def load(limit: int | None = None) -> tuple[Tensor, Tensor]:
    """Training and held-out text as uint8 tensors; `limit` keeps the first so many bytes of each."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held_out = bytearray(), bytearray()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIP.isdisjoint(name.parts) and not name.name.startswith("_sysconfigdata"):
            digest = hashlib.sha256(name.as_posix().encode()).digest()
            part = held_out if digest[0] % HELD_OUT == 0 else train
            part += path.read_bytes() + b"\0"  # the end of a file is a byte the model can learn
    return tuple(torch.frombuffer(part, dtype=torch.uint8)[:limit] for part in (train, held_out))


class Batches:
    """Windows of `seq` bytes in an order that only the seed decides, dealt out to ranks.

    One epoch is a permutation of all windows of the text. Step `i` takes the next `batch` windows, whatever the number
    of ranks; rank r of W gets its own contiguous W-th of them, and micro-step m of M its M-th of that.
    """

    def __init__(
        self, text: Tensor, seq: int, batch: int, seed: int, rank: int, world: int, parts: int = 1
    ) -> None:
        if batch % (world * parts):
            raise SystemExit(
                f"--batch {batch} is not divisible by {world} ranks x {parts} accumulated micro-batches"
            )
        self.text, self.seq, self.batch, self.seed = text, seq, batch, seed
        self.windows = (len(text) - 1) // seq
        self.micro = batch // (world * parts)  # windows in one micro-batch of one rank
        self.first = rank * parts  # in micro-batches, within a step
        self.order: dict[int, Tensor] = {}  # epoch: permutation; only the current one is kept

    def get(self, step: int, part: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both [micro, seq] int64, of one micro-batch of this rank."""
        start = step * self.batch + (self.first + part) * self.micro
        rows = torch.stack([self.window(index) for index in range(start, start + self.micro)]).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def window(self, index: int) -> Tensor:
        epoch, place = divmod(index, self.windows)
        if epoch not in self.order:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self.order = {epoch: torch.randperm(self.windows, generator=generator)}
        begin = int(self.order[epoch][place]) * self.seq
        return self.text[begin : begin + self.seq + 1]

"""Files in the safetensors format: written as a stream with a checksum, read through a memory map.

The format (https://github.com/huggingface/safetensors): 8 bytes little-endian length of the header, the header as JSON
(name -> dtype, shape, begin and end counted from the end of the header), the raw little-endian bytes of the tensors.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerosharder.errors import CheckpointError

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}

_BLOCK = 8 * 2**20  # bytes given to one write and one checksum
_MAX_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its bytes come from ``read`` when it is their turn, so only one is in memory."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Length in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write(path: Path, entries: Sequence[Entry], metadata: dict[str, str] | None = None) -> tuple[int, int]:
    """Writes a file and waits until the disk has it; returns (bytes, CRC-32).

    Raises:
        CheckpointError: a dtype that the format has no name for. OSError: the disk.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for entry in entries:
        if entry.dtype not in CODES:
            raise CheckpointError(f"{entry.name} has dtype {entry.dtype}, which safetensors cannot hold")
        end = at + entry.nbytes
        header[entry.name] = {
            "dtype": CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    with path.open("wb", buffering=0) as file:
        size, checksum = _write_all(file, memoryview(head), 0)
        for entry in entries:
            tensor = entry.read().detach().contiguous().cpu()
            raw: Any = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
            written, checksum = _write_all(file, memoryview(raw), checksum)
            if written != entry.nbytes:
                raise CheckpointError(f"{entry.name} has {written} bytes, {entry.nbytes} were announced")
            size += written
        os.fsync(file.fileno())
    return size, checksum


def checksum_of(path: Path) -> int:
    """CRC-32 of a whole file."""
    checksum = 0
    buffer = bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum = zlib.crc32(memoryview(buffer)[:count], checksum)
    return checksum


def read(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, as views of a private map of it: only what is touched is read.

    Raises:
        CheckpointError: not a file of this format. OSError: the disk.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        raw = file.read(8)
        length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else size
        if 8 + length > size or length > _MAX_HEADER:
            raise CheckpointError(
                f"{path} is no safetensors file: it has {size} bytes, fewer than its header"
            )
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(
                f"{path} is no safetensors file: its header is no JSON ({error})"
            ) from error
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    found = {}
    for name, item in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = DTYPES.get(item["dtype"]), item["shape"]
        begin, end = item["data_offsets"]
        numel = math.prod(shape)
        if dtype is None or begin < 0 or end - begin != numel * dtype.itemsize or 8 + length + end > size:
            raise CheckpointError(f"{path} is damaged: tensor {name!r} does not fit its own description")
        if not numel:
            found[name] = torch.empty(shape, dtype=dtype)
            continue
        flat = torch.frombuffer(mapped, dtype=dtype, count=numel, offset=8 + length + begin)
        found[name] = flat.view(shape)
    return found


def _write_all(file: Any, data: memoryview, checksum: int) -> tuple[int, int]:
    data = data.cast("B") if data.nbytes else data
    for start in range(0, data.nbytes, _BLOCK):
        block = data[start : start + _BLOCK]
        checksum = zlib.crc32(block, checksum)
        while block.nbytes:
            block = block[file.write(block) :]
    return data.nbytes, checksum

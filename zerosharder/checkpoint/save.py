"""Writing a checkpoint: every rank its shard, the first rank the manifest."""

from __future__ import annotations

import json
import os
import random
import zlib
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from zerosharder.checkpoint import folder, tensor_file
from zerosharder.checkpoint.crew import Crew
from zerosharder.checkpoint.state import Piece, is_writer, model_state, optimizer_state, piece_of
from zerosharder.checkpoint.values import encode
from zerosharder.engine.agreement import Request
from zerosharder.errors import CheckpointError
from zerosharder.optim.adopt import parameter_names

Plan = tuple[list[Piece], dict[str, Any]]


def save(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: dict[str, Any],
    crew: Crew,
    keep_last: int | None,
) -> None:
    """See `zerosharder.save`."""
    path = Path(os.path.abspath(path))
    if keep_last is not None and keep_last < 1:
        raise CheckpointError(f"keep_last={keep_last}: at least the checkpoint that is saved is kept")
    pieces, manifest = crew.agree("save()", lambda: _prepare(path, model, optimizer, extra, crew))
    rng: list[torch.Tensor] = []
    states = encode(_rng_states(), "the random state", rng)
    pieces += [piece_of(f"rng.{crew.number}.{i}", tensor) for i, tensor in enumerate(rng)]
    crew.together(f"saving to {path}", lambda: folder.begin(path) if crew.number == 0 else None)
    reports = crew.together(f"saving to {path}", lambda: (_write(path, pieces, crew), states))

    def complete() -> None:
        if crew.number:
            return
        manifest.update(_index([report for report, _ in reports]), rng=[rng for _, rng in reports])
        folder.complete(path, manifest)
        if keep_last is not None:
            folder.prune(path.parent, keep_last)

    crew.together(f"saving to {path}", complete)


def _prepare(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: dict[str, Any],
    crew: Crew,
) -> tuple[Plan, Request]:
    """What this rank writes, and what must be the same on all ranks."""
    tensors: dict[str, torch.Tensor] = {}
    state = model_state(model)
    nested: list[torch.Tensor] = []
    manifest: dict[str, Any] = {
        "world": crew.size,
        "aliases": state.aliases,
        "values": {name: encode(value, name, nested) for name, value in state.values.items()},
    }
    tensors |= {f"model.{name}": tensor for name, tensor in state.tensors.items()}
    tensors |= {f"values.{i}": tensor for i, tensor in enumerate(nested)}
    if optimizer is not None:
        found, manifest["optimizer"], nested = optimizer_state(optimizer, parameter_names(model))
        tensors |= {f"optimizer.{name}": tensor for name, tensor in found.items()}
        tensors |= {f"settings.{i}": tensor for i, tensor in enumerate(nested)}
    nested, lines = [], []
    manifest["extra"] = {}
    for key, value in extra.items():
        plain = value.state_dict() if hasattr(value, "state_dict") else value
        before = len(nested)
        manifest["extra"][key] = encode(plain, key, nested)
        digest = zlib.crc32(json.dumps(manifest["extra"][key]).encode())
        for tensor in nested[before:]:
            raw = tensor.detach().cpu().contiguous().reshape(-1)
            data: Any = raw.view(torch.uint8).numpy() if raw.numel() else b""
            digest = zlib.crc32(data, digest)
        lines.append(f"{key} with checksum {digest:08x}")
    tensors |= {f"extra.{i}": tensor for i, tensor in enumerate(nested)}
    pieces = [piece_of(name, t) for name, t in tensors.items() if is_writer(t, crew.number == 0)]
    return (pieces, manifest), {"paths": [str(path)], "tensors": list(tensors), "extra values": lines}


def _write(path: Path, pieces: list[Piece], crew: Crew) -> dict[str, Any]:
    name = f"rank-{crew.number:05d}.safetensors"
    entries = [
        tensor_file.Entry(p.key, p.dtype, tuple(p.local.shape), lambda p=p: p.local)  # type: ignore[misc]
        for p in pieces
    ]
    size, checksum = tensor_file.write(folder.partial_of(path) / name, entries)
    described = [
        (p.name, tensor_file.CODES[p.dtype], p.shape, {"file": name, "key": p.key, "box": p.box})
        for p in pieces
    ]
    return {"file": name, "facts": {"size": size, "crc32": checksum}, "pieces": described}


def _index(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Tensors by name, with the pieces that hold them."""
    tensors: dict[str, Any] = {}
    for report in reports:
        for name, code, shape, piece in report["pieces"]:
            known = tensors.setdefault(name, {"dtype": code, "shape": shape, "pieces": []})
            if 0 not in piece["box"][1]:  # a rank may hold no row
                known["pieces"].append(piece)
    return {"tensors": tensors, "files": {report["file"]: report["facts"] for report in reports}}


def _rng_states() -> dict[str, Any]:
    """Every generator that a training step may draw from."""
    state: Any = numpy.random.get_state()
    name, keys, position, has_gauss, gauss = state
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (
            str(name),
            torch.from_numpy(keys.astype("int64")),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states

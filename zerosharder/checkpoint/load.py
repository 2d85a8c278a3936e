"""Reading a checkpoint into a model at any number of ranks: each reads the rows it holds."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from zerosharder.checkpoint import folder, tensor_file
from zerosharder.checkpoint.crew import Crew
from zerosharder.checkpoint.state import ModelState, model_state, piece_of, restore_groups, room_for
from zerosharder.checkpoint.values import decode
from zerosharder.errors import CheckpointError
from zerosharder.observe.log import log
from zerosharder.optim.adopt import parameter_names


class Reader:
    """The tensors of one checkpoint, by name."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self.tensors: dict[str, Any] = manifest["tensors"]
        self._files: dict[str, dict[str, torch.Tensor]] = {}

    def into(self, name: str, target: torch.Tensor) -> None:
        """Reads this rank's part of ``target`` (a DTensor or plain); only the bytes of that part are touched."""
        piece = piece_of(name, target)
        offsets, sizes = piece.box
        for source in self.tensors[name]["pieces"]:
            start, length = source["box"]
            low = [max(a, b) for a, b in zip(offsets, start, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, start, length, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            here = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))
            there = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, start, strict=True))
            with torch.no_grad():
                piece.local[here].copy_(self._file(source["file"])[source["key"]][there])

    def whole(self, name: str) -> torch.Tensor:
        """A new tensor with all of it, on the CPU."""
        facts = self.tensors[name]
        made = torch.empty(facts["shape"], dtype=tensor_file.DTYPES[facts["dtype"]])
        self.into(name, made)
        return made

    def numbered(self, prefix: str) -> list[torch.Tensor]:
        """``prefix.0``, ``prefix.1``, ... as far as there are."""
        found: list[torch.Tensor] = []
        while f"{prefix}.{len(found)}" in self.tensors:
            found.append(self.whole(f"{prefix}.{len(found)}"))
        return found

    def _file(self, name: str) -> dict[str, torch.Tensor]:
        if name not in self._files:
            self._files[name] = tensor_file.read(self.path / name)
        return self._files[name]


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, objects: dict[str, Any], crew: Crew
) -> dict[str, Any]:
    """See `zerosharder.load`."""
    path = Path(os.path.abspath(path))
    crew.agree("load()", lambda: (None, {"paths": [str(path)], "objects": sorted(objects)}))

    def check() -> tuple[Reader, ModelState]:
        found, manifest = folder.read_manifest(path)
        files = list(manifest["files"].items())
        for name, facts in files[crew.number :: crew.size]:  # each file once, not once per rank
            folder.verify_file(found, name, facts)
        reader = Reader(found, manifest)
        state = model_state(model)
        _check_model(reader, state)
        absent = [key for key in objects if key not in manifest["extra"]]
        if absent:
            raise CheckpointError(
                f"{path} has no {absent[0]!r}; it was saved with {sorted(manifest['extra'])}"
            )
        if optimizer is not None and "optimizer" not in manifest:
            raise CheckpointError(f"{path} was saved without an optimizer")
        return reader, state

    prepared: list[tuple[Reader, ModelState]] = []
    crew.together(f"loading {path}", lambda: prepared.append(check()))
    reader, state = prepared[0]

    def read() -> dict[str, Any]:
        for name, tensor in state.tensors.items():
            reader.into(_source(reader, name), tensor)
        values = decode(reader.manifest["values"], reader.numbered("values"))
        if values:
            model.load_state_dict(values, strict=False)
        if optimizer is not None:
            _load_optimizer(reader, model, optimizer)
        extra: dict[str, Any] = decode(reader.manifest["extra"], reader.numbered("extra"))
        for key, item in objects.items():
            item.load_state_dict(extra[key])
        _restore_rng(reader, crew)
        return extra

    results: list[dict[str, Any]] = []
    crew.together(f"loading {path}", lambda: results.append(read()))
    return results[0]


def _source(reader: Reader, name: str) -> str:
    return f"model.{reader.manifest['aliases'].get(name, name)}"


def _check_model(reader: Reader, state: ModelState) -> None:
    """Raises CheckpointError that names the first parameter or buffer in which model and checkpoint differ."""
    for name, tensor in state.tensors.items():
        facts = reader.tensors.get(_source(reader, name))
        if facts is None:
            raise CheckpointError(
                f"{reader.path} is of another model: it has no {name!r}, which has shape {tuple(tensor.shape)} here"
            )
        if tuple(facts["shape"]) != tuple(tensor.shape):
            raise CheckpointError(
                f"{reader.path} is of another model: {name!r} has shape {tuple(facts['shape'])} there, "
                f"{tuple(tensor.shape)} here"
            )
    ours = state.tensors.keys() | state.aliases.keys()
    saved = _names(reader.tensors)
    left = next((name for name in saved if name not in ours), None)
    if left is not None:
        shape = tuple(reader.tensors[f"model.{left}"]["shape"])
        raise CheckpointError(
            f"{reader.path} is of another model: it has {left!r} of shape {shape}, which is not here"
        )


def _names(tensors: Iterable[str]) -> list[str]:
    return [name.removeprefix("model.") for name in tensors if name.startswith("model.")]


def _load_optimizer(reader: Reader, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names = parameter_names(model)
    saved = reader.manifest["optimizer"]
    nested = reader.numbered("settings")
    restore_groups(optimizer, names, saved["groups"], nested)
    for group in optimizer.param_groups:
        for param in group["params"]:
            name = names[id(param)]
            entries = saved["state"].get(name, {})
            state = optimizer.state[param] if entries else optimizer.state.pop(param, {})
            for key in [key for key in state if key not in entries]:
                del state[key]
            for key, entry in entries.items():
                if entry is not None:
                    state[key] = decode(entry["value"], nested)
                    continue
                source = f"optimizer.{name}/{key}"
                facts = reader.tensors[source]
                dtype = tensor_file.DTYPES[facts["dtype"]]
                reader.into(source, room_for(optimizer, param, key, tuple(facts["shape"]), dtype))


def _restore_rng(reader: Reader, crew: Crew) -> None:
    """Each rank's generators as they were; a rank that had none in the checkpoint keeps its own."""
    if crew.number >= len(reader.manifest["rng"]):
        log.info("rank %d was not there at the save; its random state stays", crew.number)
        return
    saved = reader.manifest["rng"][crew.number]
    states = decode(saved, reader.numbered(f"rng.{crew.number}"))
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])

"""The folder of a checkpoint: complete or not there at all.

Files are written into a sibling with a temporary name. The manifest, written last, holds size and checksum of each.
Then the folder takes its name, in one rename; an older one of that name is exchanged in the same moment where the
file system can, and else stands aside under a name that is found again.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

from zerosharder.checkpoint import tensor_file
from zerosharder.errors import CheckpointError
from zerosharder.observe.log import log

FORMAT = 1
MANIFEST = "manifest.json"
_START = b'{"format": '  # of every manifest
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


def partial_of(path: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return path.with_name(f".{path.name}.partial")


def _aside_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def begin(path: Path) -> Path:
    """An empty folder to write into; leftovers of a save that was killed go.

    Raises:
        CheckpointError: something that is no checkpoint has this name; a save would remove it.
    """
    if path.exists() and not _is_checkpoint(path) and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(
            f"{path} exists and is no checkpoint; save under a name of its own, or remove it"
        )
    partial = partial_of(path)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def complete(path: Path, manifest: dict[str, Any]) -> None:
    """Writes the manifest and gives the folder its name; afterwards the checkpoint survives a loss of power."""
    partial = partial_of(path)
    body = json.dumps(manifest)
    document = json.dumps({"format": FORMAT, "crc32": zlib.crc32(body.encode()), "body": body})
    with (partial / MANIFEST).open("w", encoding="ascii") as file:
        file.write(document)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(partial)
    if not path.exists():
        partial.rename(path)
    elif _exchange(partial, path):
        _sync_folder(path.parent)
        shutil.rmtree(partial)
    else:
        aside = _aside_of(path)
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        partial.rename(path)
    _sync_folder(path.parent)
    shutil.rmtree(_aside_of(path), ignore_errors=True)


def _is_checkpoint(path: Path) -> bool:
    """Whether this is a checkpoint, perhaps a damaged one; other tools have a manifest.json too."""
    try:
        with (path / MANIFEST).open("rb") as file:
            return file.read(len(_START)) == _START
    except (FileNotFoundError, NotADirectoryError):
        return False


def read_manifest(path: Path) -> tuple[Path, dict[str, Any]]:
    """The folder that holds the checkpoint of this name, and its manifest.

    Raises:
        CheckpointError: no checkpoint, a damaged manifest, one of a newer format, or one that names files elsewhere.
    """
    if not path.exists() and _aside_of(path).exists():  # killed between two renames
        path = _aside_of(path)
    try:
        document = json.loads((path / MANIFEST).read_text(encoding="ascii"))
        version, body = document["format"], document["body"]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is no checkpoint: it has no {MANIFEST}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no checkpoint: its {MANIFEST} cannot be read ({error})") from error
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, this version of zerosharder reads format {FORMAT}; use a newer one"
        )
    if zlib.crc32(body.encode()) != document.get("crc32"):
        raise CheckpointError(f"{path} is damaged: the checksum of its {MANIFEST} is wrong")
    manifest: dict[str, Any] = json.loads(body)
    for name in manifest["files"]:
        if not re.fullmatch(r"[A-Za-z0-9_-]+\.safetensors", name):
            raise CheckpointError(f"{path} is damaged: its manifest names a file {name!r}")
    return path, manifest


def verify_file(folder: Path, name: str, facts: dict[str, int]) -> None:
    """Raises CheckpointError unless the file has the size and checksum that the manifest gives."""
    path = folder / name
    try:
        size = path.stat().st_size
        if size != facts["size"]:
            raise CheckpointError(f"{path} is damaged: it has {size} bytes, {facts['size']} were written")
        if tensor_file.checksum_of(path) != facts["crc32"]:
            raise CheckpointError(f"{path} is damaged: its checksum is wrong")
    except OSError as error:
        raise CheckpointError(f"{path} of the checkpoint cannot be read: {error}") from error


def verify(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there and whole; CheckpointError otherwise."""
    folder, manifest = read_manifest(path)
    for name, facts in manifest["files"].items():
        verify_file(folder, name, facts)
    return manifest


def checkpoints(root: Path) -> list[Path]:
    """Folders in ``root`` that look like checkpoints, the newest first.

    The order is that of the numbers in their names, then of the time of the manifest.
    """

    def age(path: Path) -> tuple[list[int], int]:
        return [int(n) for n in re.findall(r"\d+", path.name)], (path / MANIFEST).stat().st_mtime_ns

    if not root.is_dir():
        return []
    found = [p for p in root.iterdir() if not p.name.startswith(".") and _is_checkpoint(p)]
    aside = [path_of(p) for p in root.glob(".*.old") if not path_of(p).exists()]
    return sorted(found, key=age, reverse=True) + aside


def path_of(aside: Path) -> Path:
    """The name under which a checkpoint that stands aside is asked for."""
    return aside.with_name(aside.name[1 : -len(".old")])


def latest(root: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint in ``root`` that verifies, or None; damaged ones are named in the log and skipped.

    Reads every byte of the checkpoint it returns. Newest: highest numbers in the name, then latest manifest.
    """
    for path in checkpoints(Path(root)):
        try:
            verify(path)
        except CheckpointError as error:
            log.warning("skipped: %s", error)
            continue
        return path
    return None


def prune(root: Path, keep: int) -> None:
    """Removes all but the ``keep`` newest checkpoints of ``root``; the name goes first, then the bytes."""
    for path in checkpoints(root)[keep:]:
        doomed = partial_of(path)
        shutil.rmtree(doomed, ignore_errors=True)
        if path.exists():
            path.rename(doomed)
            shutil.rmtree(doomed)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    return bool(rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

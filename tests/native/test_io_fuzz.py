"""Random reads and writes against a model made of plain bytes, for both engines, with injected errors."""

from __future__ import annotations

import errno
import tempfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

_C = pytest.importorskip("zerosharder._C", reason="the extension is not built here")

from zerosharder.offload import engines  # noqa: E402

LIMIT = 20_000  # several blocks and pages, with room for ragged ends
EDGES = [0, 1, 511, 512, 513, 4095, 4096, 4097, 8192, 16384]

positions = st.one_of(st.sampled_from(EDGES), st.integers(0, LIMIT))
operations = st.lists(
    st.tuples(
        st.sampled_from(["write", "read", "cancel", "late"]),
        positions,
        positions,
        st.integers(0, 3),  # bytes by which the memory is off an aligned address
    ),
    min_size=1,
    max_size=12,
)
WORKING = [name for name, why in engines.backends().items() if why is None]


@st.composite
def set_ups(draw):
    """(engine options, fault options, whether O_DIRECT is asked for)"""
    engine = {
        "kind": draw(st.sampled_from(WORKING)),
        "depth": draw(st.integers(1, 5)),
        "block": draw(st.sampled_from([4096, 16384, 1 << 20])),
    }
    faults = {
        "seed": draw(st.integers(0, 2**32)),
        "again": draw(st.sampled_from([0.0, 0.2])),
        "cut": draw(st.sampled_from([0.0, 0.5])),
        "error": draw(st.sampled_from([0.0, 0.0, 0.1])),
        "code": draw(st.sampled_from([errno.EIO, errno.ENOSPC])),
    }
    return engine, faults, draw(st.booleans())


class Model:
    """What the file holds. After a write that failed half way, its range may hold old or new bytes."""

    def __init__(self) -> None:
        self.old = bytearray()
        self.new: dict[int, set[int]] = {}  # position -> bytes it may hold, where that is not certain
        self.longest = 0  # the file is no longer than this
        self.size = 0  # and not shorter than this

    def write(self, offset: int, data: bytes, *, done: bool) -> None:
        end = offset + len(data)
        if not data:
            return
        self.longest = max(self.longest, end)
        if len(self.old) < end:
            self.old.extend(bytes(end - len(self.old)))
        if done:
            self.size = max(self.size, end)
            self.old[offset:end] = data
            for position in range(offset, end):
                self.new.pop(position, None)
        else:
            for position, byte in zip(range(offset, end), data, strict=True):
                if byte != self.old[position] or position in self.new:
                    self.new.setdefault(position, {self.old[position]}).add(byte)

    def allows(self, offset: int, data: bytes) -> bool:
        if not self.new:
            return self.old[offset : offset + len(data)] == data
        return all(
            byte in self.new.get(position, (self.old[position],))
            for position, byte in zip(range(offset, offset + len(data)), data, strict=True)
        )


@settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)
@given(set_ups(), operations)
def test_against_a_model(tmp_path_factory, set_up, steps):
    """Every read gives what the writes before left there; every failure is an OSError with the injected errno, and
    leaves the buffer free and every byte outside its range alone."""
    engine_options, fault_options, direct = set_up
    model = Model()
    with tempfile.TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as folder:
        file = _C.File(f"{folder}/data", write=True, create=True, direct=direct)
        engine = _C.Engine(**engine_options, faults=_C.RandomFaults(**fault_options))
        with file, engine:
            for number, (what, offset, nbytes, misaligned) in enumerate(steps, 1):
                area = bytearray(nbytes + misaligned)
                memory = memoryview(area)[misaligned:]
                if what == "read":
                    _read(engine, file, model, offset, memory, fault_options)
                else:
                    pattern = bytes((number * 31 + i * 7) % 251 for i in range(256))
                    memory[:] = (pattern * (nbytes // 256 + 1))[:nbytes]
                    _write(engine, file, model, offset, memory, what, fault_options)
                memory.release()
                area.append(0)  # BufferError if somebody still held it
                assert model.size <= file.size <= model.longest
        with open(f"{folder}/data", "rb") as plain:
            assert model.allows(0, plain.read())


def _write(engine, file, model, offset, memory, what, fault_options) -> None:
    future = engine.write(file, offset, memory, timeout=0.0 if what == "late" else None)
    allowed = {fault_options["code"]} if fault_options["error"] else set()
    try:
        if what == "cancel":
            future.cancel()
            allowed.add(errno.ECANCELED)
        if what == "late":
            allowed.add(errno.ETIMEDOUT)
        assert future.wait() == len(memory)
    except OSError as error:
        assert error.errno in allowed and error.expected == len(memory)
        assert 0 <= error.done < len(memory) and offset <= error.offset <= offset + len(memory)
        model.write(offset, bytes(memory), done=False)
    else:
        model.write(offset, bytes(memory), done=True)


def _read(engine, file, model, offset, memory, fault_options) -> None:
    allowed = {fault_options["code"]} if fault_options["error"] else set()
    if offset + len(memory) > file.size and len(memory):
        allowed.add(errno.ENODATA)
    try:
        engine.read(file, offset, memory).wait()
    except OSError as error:
        assert error.errno in allowed and error.expected == len(memory) and error.done < len(memory)
    else:
        assert errno.ENODATA not in allowed and model.allows(offset, bytes(memory))

"""For all tests: folder and end of the worker pools of `harness`, order of distributed tests, their notes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))
if importlib.util.find_spec("zerosharder") is None:  # not installed: take the checkout
    sys.path.insert(1, str(TESTS.parent))

from harness import pool, processes, protocol  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _worker_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    processes.use_folder(tmp_path_factory.mktemp("distributed"))
    yield
    pool.shutdown()


def _world(item: pytest.Item) -> int:
    """Ranks a test runs on, 0 for one that is not distributed."""
    worlds = getattr(getattr(item, "function", None), "__worlds__", (0,))
    callspec = getattr(item, "callspec", None)
    return int(callspec.params.get("world", worlds[0])) if callspec and worlds != (0,) else int(worlds[0])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """By world size, then as written: every pool is started once."""
    first: dict[Path, int] = {}
    for position, item in enumerate(items):
        first.setdefault(item.path, position)
    items.sort(key=lambda item: (_world(item), first[item.path]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if protocol.notes:
        terminalreporter.section("notes of distributed tests")
        for line in protocol.notes:
            terminalreporter.write_line(line)

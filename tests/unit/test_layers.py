"""The shape of the package: which layer imports which, who reads the environment, sizes, names, characters."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import zerosharder as zs

ROOT = Path(zs.__file__).resolve().parent
REPOSITORY = ROOT.parent
FILES = sorted(ROOT.rglob("*.py"))

# From the top down.
LAYERS = (
    "__main__",
    "cli",
    "__init__",
    "api",
    "integrations",
    "checkpoint",
    "planner",
    "engine",
    "optim",
    "offload",
    "partition",
    "observe",
    "config",
    "errors",
    "_C",
)
# What the standard library of the project is built on; nothing else may be imported by the package.
OUTSIDE = {"torch", "numpy", "psutil", "pynvml", "zerosharder"}

PUBLIC = [
    "Config",
    "Stats",
    "full_params",
    "latest",
    "load",
    "no_sync",
    "register_forward_method",
    "reset",
    "save",
    "shard",
    "stats",
    "trace",
]

MAX_LINES = 600
MAX_ARGUMENTS = 8


def _name(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)


def _layer(module: str) -> str:
    """`zerosharder.engine.unit` -> `engine`; `zerosharder` -> `__init__`."""
    parts = module.removesuffix(".__init__").split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs: what only type checkers see is left out."""
    for child in ast.iter_child_nodes(node):
        if not _is_type_checking(child):
            yield child
            yield from _nodes(child)


def _imports(path: Path) -> Iterator[str]:
    """Full names of the modules that ``path`` imports, anywhere in the file."""
    package = _name(path).split(".")[:-1]
    for node in _nodes(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:  # `from zerosharder import config` imports a module, too
                deeper = f"{module}.{alias.name}"
                is_module = (REPOSITORY / Path(*deeper.split("."))).with_suffix(".py").exists()
                yield deeper if is_module or deeper == "zerosharder._C" else module


def _edges(path: Path) -> list[str]:
    return [name for name in _imports(path) if name.split(".")[0] == "zerosharder"]


def test_the_reader_of_imports_sees_them():
    found = {(_layer(_name(path)), _layer(name)) for path in FILES for name in _edges(path)}
    assert {("api", "engine"), ("engine", "partition"), ("offload", "_C"), ("__init__", "api")} <= found


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_imports_point_down(path):
    mine = _layer(_name(path))
    assert mine in LAYERS, f"{path}: a layer nobody placed"
    for name in _edges(path):
        other = _layer(name)
        assert other == mine or LAYERS.index(other) > LAYERS.index(mine), (
            f"{_name(path)} imports {name}, which is above it"
        )


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_only_known_packages_are_imported(path):
    import sys

    for name in _imports(path):
        top = name.split(".")[0]
        assert top in OUTSIDE or top in sys.stdlib_module_names, f"{_name(path)} imports {name}"


def test_partition_does_not_communicate():
    for path in (ROOT / "partition").glob("*.py"):
        assert not [name for name in _imports(path) if name.startswith("torch.distributed")], path


def test_modules_import_each_other_in_no_circle():
    graph = {}
    for path in FILES:
        graph[_name(path).removesuffix(".__init__")] = set(_edges(path))
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join([*way[way.index(module) :], module])
        if module in done or module not in graph:
            return
        for other in graph[module]:
            visit(other, (*way, module))
        done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_only_config_reads_the_environment(path):
    if path == ROOT / "config.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        assert name not in ("environ", "getenv", "environb", "getenvb", "putenv"), f"{path}:{node.lineno}"
        if isinstance(node, ast.alias):
            assert node.name not in ("environ", "getenv"), f"{path}:{node.lineno}"


SOURCES = [
    path
    for folder in ("zerosharder", "csrc", "tests", "examples", "benchmarks", "docs", "scripts")
    for path in sorted((REPOSITORY / folder).rglob("*"))
    if path.suffix in (".py", ".pyi", ".cpp", ".h", ".cu", ".md", ".sh")
]


def test_sources_are_found():
    assert len(SOURCES) > 40


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_ascii_only(path):
    lines = path.read_bytes().split(b"\n")
    assert [n for n, line in enumerate(lines, 1) if not line.isascii()] == []


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) < MAX_LINES


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_constructors_take_few_arguments(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    found = method.args.posonlyargs + method.args.args + method.args.kwonlyargs
                    assert len(found) - 1 < MAX_ARGUMENTS, f"{node.name} takes {len(found) - 1}"


def test_public_names_are_frozen():
    assert zs.__all__ == PUBLIC == sorted(PUBLIC)
    assert all(getattr(zs, name).__doc__ for name in PUBLIC)
    modules = {_layer(_name(p)) for p in FILES} | {"_C"}
    visible = {name for name in vars(zs) if not name.startswith("_")} - modules
    assert visible == set(PUBLIC)


def test_signature_of_shard_is_frozen():
    found = {n: p.kind.name for n, p in inspect.signature(zs.shard).parameters.items()}
    keyword = dict.fromkeys(("config", "mesh", "units", "ignored_params"), "KEYWORD_ONLY")
    assert found == {"model": "POSITIONAL_OR_KEYWORD", "optimizer": "POSITIONAL_OR_KEYWORD", **keyword}


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("no_sync", ["model"]),
        ("full_params", ["model", "write"]),
        ("reset", ["model"]),
        ("stats", ["model"]),
        ("trace", ["path"]),
        ("save", ["path", "model", "optimizer", "keep_last", "extra"]),
        ("load", ["path", "model", "optimizer", "objects"]),
        ("latest", ["root"]),
        ("register_forward_method", ["model", "name"]),
    ],
)
def test_signatures_are_frozen(name, parameters):
    assert list(inspect.signature(getattr(zs, name)).parameters) == parameters

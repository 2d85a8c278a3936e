"""Keeping torch.compile out of the engine's own functions.

A compiled model calls into the engine at every unit. The compiler would try to compile the engine's bookkeeping too,
and warn about all it cannot: each function of the package is marked as one to run as it is. What the engine calls in
turn (the user's forwards) is compiled as usual.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator

from torch._C._dynamo import eval_frame

_hidden = False


def hide_from_compiler() -> None:
    """Marks every function of the package; costs nothing at run time and imports no compiler."""
    global _hidden
    if _hidden:
        return
    _hidden = True
    skip_code = _skip_code()
    package = __name__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(package + "."):
            for code in _codes(vars(module), name):
                skip_code(code)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, torch.compile leaves functions of torch alone too; those it has no business with in a recomputation."""
    before = eval_frame.set_eval_frame(None)
    try:
        yield
    finally:
        eval_frame.set_eval_frame(before)


def _skip_code() -> Callable[[types.CodeType], None]:
    """torch.compile's own way to leave a code object alone, without importing its Python half (over a second)."""
    known: Callable[[types.CodeType], None] | None = getattr(eval_frame, "skip_code", None)
    if known is not None:  # before torch 2.7
        return known
    this_but_not_its_callees = eval_frame._FrameExecStrategy(
        eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    )
    return lambda code: eval_frame.set_code_exec_strategy(code, this_but_not_its_callees)


def _codes(
    namespace: dict[str, object] | types.MappingProxyType[str, object], module: str
) -> Iterator[types.CodeType]:
    for item in list(namespace.values()):
        item = getattr(item, "__func__", getattr(item, "fget", getattr(item, "__wrapped__", item)))
        if getattr(item, "__module__", None) != module:
            continue
        if isinstance(item, types.FunctionType):
            yield from _with_nested(item.__code__)
        elif isinstance(item, type):
            yield from _codes(vars(item), module)


def _with_nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_nested(constant)

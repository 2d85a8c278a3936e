"""CPU optimizer steps in native code, over flat float32 ranges.

One call reads weight, gradient and state once and writes weight and state once. The gradient may be float32, bfloat16
or float16, is multiplied by ``grad_scale`` on the way (one over the loss scale, times a clip factor), and a bfloat16
or float16 copy of the new weight is written in the same pass if asked for. Results depend neither on the number of
threads nor on the instruction set.

AdamW, Adam and Adagrad follow torch's ``fused=True`` steps, SGD its plain one, operation by operation. With the roots
of `zerosharder.optim.roots`, AdamW and Adam follow the plain ones, too. Lion is algorithm 2 of Chen et al., "Symbolic
Discovery of Optimization Algorithms", 2023.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerosharder.errors import OptimizerError
from zerosharder.optim.roots import Roots

try:
    from zerosharder import _C
except ImportError:  # no compiler at install time, see `python -m zerosharder doctor`
    _C = None  # type: ignore[assignment]

__all__ = [
    "Hyper",
    "Range",
    "StepPool",
    "available",
    "bandwidth_probe",
    "chosen_isa",
    "cpu_features",
    "nonfinite",
    "shared_pool",
    "squared_norm",
    "step",
    "usable_isas",
]

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# Stores that bypass the caches, as bits: weight and state, the 16-bit copy.
STREAM_STATE, STREAM_COPY = 1, 2


def available() -> bool:
    """Return whether the native steps were built."""
    return _C is not None and hasattr(_C, "StepPool")


def _need() -> Any:
    if not available():
        raise OptimizerError(
            "The native optimizer steps need the extension zerosharder._C, which is missing. Install a C++17 "
            "compiler and the Python headers and reinstall; until then use torch.optim with fused=True."
        )
    return _C


def usable_isas() -> list[str]:
    """Return the kernel variants that this build and this CPU can run, best first, ``portable`` last."""
    return list(_need().step_isas())


def chosen_isa() -> str:
    """Return the variant that ``isa="auto"`` takes."""
    return usable_isas()[0]


def cpu_features() -> list[str]:
    """Return the features of the CPU that the choice looks at."""
    return list(_need().cpu_features())


class StepPool:
    """A fixed number of threads for steps, parked between them; the caller's thread is one of them.

    Args:
        threads: 1 to 1024. Give each rank its share: cores / ranks on this host.

    Raises:
        ValueError: ``threads`` is out of range.
        OSError: a thread cannot be started.
    """

    def __init__(self, threads: int) -> None:
        self.native = _need().StepPool(threads)

    @property
    def threads(self) -> int:
        """Threads that take part in a step."""
        return int(self.native.threads)

    def close(self) -> None:
        """End the threads; a step in progress finishes first. Further steps raise RuntimeError."""
        self.native.close()

    def __enter__(self) -> StepPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@functools.cache
def shared_pool(threads: int) -> StepPool:
    """Return the process's pool of ``threads`` threads; it lives until the process ends."""
    pool = StepPool(threads)
    atexit.register(pool.close)
    return pool


@dataclass(frozen=True)
class Range:
    """The tensors of one step: 1-D, contiguous, on the CPU, of one length [n].

    Attributes:
        weight: float32, updated in place.
        grad: float32, bfloat16 or float16, read only.
        state: float32, updated in place. AdamW and Adam: first and second moment, with amsgrad also the maximum of
            the second; SGD with momentum: its buffer; Lion: its momentum; Adagrad: the sum of squares.
        copy: bfloat16 or float16, receives the new weight rounded to nearest even; None for no copy.
    """

    weight: torch.Tensor
    grad: torch.Tensor
    state: Sequence[torch.Tensor] = ()
    copy: torch.Tensor | None = None


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters, named and defined as in torch.optim; each rule reads its own.

    Attributes:
        lr: learning rate, not negative.
        betas: both in [0, 1). Lion: of the update and of the momentum.
        eps: added to the root.
        weight_decay: decoupled in adamw and lion, added to the gradient elsewhere.
        momentum, dampening, nesterov: of SGD.
        lr_decay: of Adagrad.
        amsgrad: of AdamW and Adam.
        maximize: ascend instead of descend.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    lr_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False


def step(
    pool: StepPool,
    rule: str,
    tensors: Range,
    hyper: Hyper,
    *,
    number: int = 1,
    grad_scale: float = 1.0,
    roots: Roots | None = None,
    isa: str = "auto",
    stream: int = 0,
) -> None:
    """Update ``tensors`` by one step.

    Args:
        pool: the threads.
        rule: ``adamw``, ``adam``, ``sgd``, ``lion`` or ``adagrad``.
        tensors: the range, which must not overlap itself.
        hyper: the hyperparameters.
        number: of this step, from 1. SGD's momentum buffer starts as the gradient of step 1.
        grad_scale: the gradient is multiplied by this first.
        roots: of `torch_roots`, for AdamW and Adam as torch's plain steps are; None for those of ``fused=True``.
        isa: a variant of `usable_isas`, for tests; ``auto`` is the best.
        stream: sum of STREAM_STATE and STREAM_COPY, see docs/native.md; needs 64-byte alignment, else ignored.

    Raises:
        OptimizerError: the extension is missing.
        TypeError: a tensor has the wrong dtype, device or layout.
        ValueError: lengths differ, a hyperparameter is out of its domain (NaN included), an unknown rule or isa.
    """
    native = _need()
    arguments = {
        "lr": float(hyper.lr),
        "beta1": float(hyper.betas[0]),
        "beta2": float(hyper.betas[1]),
        "eps": float(hyper.eps),
        "weight_decay": float(hyper.weight_decay),
        "momentum": float(hyper.momentum),
        "dampening": float(hyper.dampening),
        "nesterov": bool(hyper.nesterov),
        "lr_decay": float(hyper.lr_decay),
        "amsgrad": bool(hyper.amsgrad),
        "maximize": bool(hyper.maximize),
        "step": float(number),
        "first": number == 1,
        "grad_scale": float(grad_scale),
        "roots": roots.address if roots is not None else 0,
        "roots_mode": roots.mode if roots is not None else 0,
    }
    native.step(pool.native, rule, _addresses(tensors), arguments, isa=isa, stream=stream)


def squared_norm(pool: StepPool, data: torch.Tensor, *, isa: str = "auto") -> float:
    """Return the sum of squares of a flat CPU tensor [n], added in float64 along a fixed tree.

    The result is the same bit for bit for any number of threads and any variant.
    """
    name = _check(data, "data", None, tuple(_NAMES))
    return float(_need().squared_norm(pool.native, data.data_ptr(), name, data.numel(), isa=isa))


def nonfinite(pool: StepPool, data: torch.Tensor, *, isa: str = "auto") -> bool:
    """Return whether a flat CPU tensor [n] holds an infinity or a NaN."""
    name = _check(data, "data", None, tuple(_NAMES))
    return bool(_need().nonfinite(pool.native, data.data_ptr(), name, data.numel(), isa=isa))


def bandwidth_probe(pool: StepPool, tensors: Range, *, isa: str = "auto", stream: int = 0) -> None:
    """Move the bytes of an AdamW step with hardly any arithmetic; overwrites the tensors with nonsense.

    The yardstick of `python -m zerosharder bench optimizer`.
    """
    _need().step_bandwidth(pool.native, _addresses(tensors), isa=isa, stream=stream)


def _addresses(tensors: Range) -> Any:
    n = tensors.weight.numel()
    only = (torch.float32,)
    _check(tensors.weight, "weight", n, only)
    grad_name = _check(tensors.grad, "grad", n, tuple(_NAMES))
    for index, state in enumerate(tensors.state):
        _check(state, f"state[{index}]", n, only)
    copy, copy_name = 0, "bfloat16"
    if tensors.copy is not None:
        copy_name = _check(tensors.copy, "copy", n, (torch.bfloat16, torch.float16))
        copy = tensors.copy.data_ptr()
    return _need().StepTensors(
        n,
        tensors.weight.data_ptr(),
        tensors.grad.data_ptr(),
        grad_name,
        [state.data_ptr() for state in tensors.state],
        copy,
        copy_name,
    )


def _check(tensor: torch.Tensor, name: str, n: int | None, dtypes: tuple[torch.dtype, ...]) -> str:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        accepted = " or ".join(_NAMES[dtype] for dtype in dtypes)
        raise TypeError(f"{name} must be {accepted}, not {tensor.dtype}")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense CPU tensor, not {tensor.layout} on {tensor.device}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise TypeError(f"{name} must be 1-D and contiguous, not {tuple(tensor.shape)}, {tensor.stride()}")
    if n is not None and tensor.numel() != n:
        raise ValueError(f"{name} has {tensor.numel()} elements, weight has {n}")
    return _NAMES[tensor.dtype]

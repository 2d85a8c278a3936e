"""The function that torch takes square roots with on this CPU, for steps that agree with its plain Adam bit for bit.

With MKL, `torch.sqrt` of a tensor calls its vector library, whose roots are not always the nearest float. Nothing else
gives the same bits, so the native step calls the same function, by the address that torch's library exports.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Roots", "torch_roots"]

# Accuracy high, subnormals kept, errors not reported: how torch calls it. The bits are in MKL's mkl_vml_defines.h.
_MODE = 0x140102
_SAMPLES = 40_000


@dataclass(frozen=True)
class Roots:
    """A C function `void (int n, const float* from, float* to, long long mode)`; address 0: the CPU's own roots."""

    address: int
    mode: int


@functools.cache
def torch_roots() -> Roots | None:
    """Return what gives the bits of `torch.sqrt` on CPU tensors in float32; None if nothing known does.

    Found by trying: the candidates are compared with torch on 40,000 numbers of all magnitudes.
    """
    exponents = torch.arange(_SAMPLES) % 250 - 125
    generator = torch.Generator().manual_seed(0)
    numbers = torch.ldexp(1 + torch.rand(_SAMPLES, generator=generator), exponents)
    wanted = numbers.sqrt()
    if torch.equal(wanted, numbers.double().sqrt().float()):
        return Roots(0, 0)
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(library)).vmsSqrt
    except (OSError, AttributeError):  # another vector library, or one that is not exported
        return None
    function.restype = None
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong)
    found = torch.empty_like(numbers)
    for start in range(0, _SAMPLES, 1000):
        at = 4 * start
        function(1000, numbers.data_ptr() + at, found.data_ptr() + at, _MODE)
    if not torch.equal(wanted, found):
        return None
    return Roots(ctypes.cast(function, ctypes.c_void_p).value or 0, _MODE)

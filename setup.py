"""Build of the optional extension `zerosharder._C`; everything else stands in pyproject.toml.

ZEROSHARDER_BUILD_EXT=0 skips the extension. Any other failure to build it (no compiler, no headers) leaves an
installation that works, with one warning that says what is lost.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

COST = (
    "zerosharder is installed without its native extension: host buffers come from Python's mmap module "
    "(same results, slower to allocate), and nothing that needs native code is available. "
    "`python -m zerosharder doctor` shows the state."
)


def warn(reason: str) -> None:
    print(f"WARNING: {COST} Reason: {reason}", file=sys.stderr)


class OptionalBuildExt(build_ext):
    """Turns a failed build of the extension into one warning."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:  # any toolchain failure: the package works without
            self.extensions = []  # nothing to copy or to install
            warn(f"{type(error).__name__}: {error}. A C++17 compiler and the Python headers are needed.")

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if self.editable_mode or Path(path).exists()]


def extensions() -> list:
    if os.environ.get("ZEROSHARDER_BUILD_EXT", "1").strip().lower() in ("0", "no", "off", "false"):
        return []
    try:
        from pybind11.setup_helpers import Pybind11Extension
    except ImportError as error:
        warn(f"{error}. Install pybind11 (pip does so unless build isolation is off).")
        return []
    return [
        Pybind11Extension(
            "zerosharder._C",
            sorted(str(path) for path in Path("csrc").rglob("*.cpp")),
            depends=sorted(str(path) for path in Path("csrc").rglob("*.h")),
            include_dirs=["csrc"],
            cxx_std=17,
            # No contraction: gcc fuses even intrinsics, and every optimizer kernel must give the same bits.
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-ffp-contract=off"],
        )
    ]


setup(ext_modules=extensions(), cmdclass={"build_ext": OptionalBuildExt})

"""Build of the optional extension `zerosharder._C`; everything else stands in pyproject.toml.

ZEROSHARDER_BUILD_EXT=0 skips the extension. Any other failure to build it (no compiler, no headers) leaves an
installation that works, with one warning that says what is lost. io_uring is built in if liburing can be linked;
ZEROSHARDER_BUILD_URING=0 leaves it out all the same.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

COST = (
    "zerosharder is installed without its native extension: host buffers come from Python's mmap module "
    "(same results, slower to allocate), and nothing that needs native code is available. "
    "`python -m zerosharder doctor` shows the state."
)


def warn(reason: str) -> None:
    print(f"WARNING: {COST} Reason: {reason}", file=sys.stderr)


# What csrc/io/uring_engine.cpp needs beyond the oldest liburing there is.
URING_PROBE = """
#include <liburing.h>
extern "C" int probe(io_uring* ring, iovec* area, __u64* tag) {
  return io_uring_register_buffers_sparse(ring, 1) + io_uring_register_buffers_update_tag(ring, 0, area, tag, 1) +
         io_uring_queue_init(2, ring, 0);
}
"""
# The archive first: an installation or wheel then needs no liburing at run time.
URING_LIBRARIES = (["-l:liburing.a"], ["-luring"])


def off(variable: str) -> bool:
    return os.environ.get(variable, "1").strip().lower() in ("0", "no", "off", "false")


class OptionalBuildExt(build_ext):
    """Turns a failed build of the extension into one warning, and finds out by trying whether liburing is there."""

    def build_extension(self, ext) -> None:
        if not off("ZEROSHARDER_BUILD_URING"):
            link = self.uring_link_args()
            if link is None:
                print(
                    "liburing was not found: file I/O will use threads only. See docs/io.md.", file=sys.stderr
                )
            else:
                ext.define_macros.append(("ZEROSHARDER_HAVE_LIBURING", "1"))
                ext.extra_link_args.extend(link)
        super().build_extension(ext)

    def uring_link_args(self) -> list[str] | None:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.cpp"
            source.write_text(URING_PROBE)
            for link in URING_LIBRARIES:
                try:
                    objects = self.compiler.compile([str(source)], output_dir="/", extra_postargs=["-fPIC"])
                    self.compiler.link_shared_object(
                        objects, str(Path(folder) / "probe.so"), extra_postargs=link
                    )
                except (CompileError, LinkError):
                    continue
                return link
        return None

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:  # any toolchain failure: the package works without
            self.extensions = []  # nothing to copy or to install
            warn(f"{type(error).__name__}: {error}. A C++17 compiler and the Python headers are needed.")

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if self.editable_mode or Path(path).exists()]


def extensions() -> list:
    if off("ZEROSHARDER_BUILD_EXT"):
        return []
    try:
        from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
    except ImportError as error:
        warn(f"{error}. Install pybind11 (pip does so unless build isolation is off).")
        return []
    ParallelCompile(default=0).install()  # 0: one compiler for each core
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

"""Group Q: building and installing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"


def test_q1_io_compiles_where_liburing_is_absent():
    """Without its macro the source asks for no header of liburing. (What `doctor` says then: test_engines.py.)"""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    source = CSRC / "io" / "uring_engine.cpp"
    command = [compiler, "-std=c++17", "-M", f"-I{CSRC}", str(source)]
    headers = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "liburing.h" not in headers and "io/engine.h" in headers
    check = [compiler, "-std=c++17", "-fsyntax-only", "-Wall", "-Werror", f"-I{CSRC}", str(source)]
    result = subprocess.run(check, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr

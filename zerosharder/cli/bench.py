"""`python -m zerosharder bench NAME`: each benchmark lives in a module of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from zerosharder.cli import bench_io

_BENCHMARKS = {"io": (bench_io, "reads and writes of a file")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one subcommand for each benchmark."""
    names = parser.add_subparsers(dest="benchmark", required=True, metavar="NAME")
    for name, (module, text) in _BENCHMARKS.items():
        module.add_arguments(names.add_parser(name, help=text))


def run(arguments: argparse.Namespace) -> int:
    """Runs the chosen benchmark and returns the exit status of the process."""
    benchmark: Callable[[argparse.Namespace], int] = _BENCHMARKS[arguments.benchmark][0].run
    return benchmark(arguments)

"""`python -m zerosharder bench NAME`: benchmarks that a user can repeat, peers interleaved in the same run."""

from __future__ import annotations

import argparse
from types import ModuleType

from zerosharder.cli import bench_io, bench_optimizer

# Name of a benchmark -> its module: HELP, add_arguments(parser), run(arguments) -> exit status.
_BENCHMARKS: dict[str, ModuleType] = {"io": bench_io, "optimizer": bench_optimizer}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds one subcommand for each benchmark."""
    names = parser.add_subparsers(dest="benchmark", required=True, metavar="NAME")
    for name, module in _BENCHMARKS.items():
        module.add_arguments(names.add_parser(name, help=module.HELP, description=module.HELP))


def run(arguments: argparse.Namespace) -> int:
    """Runs the chosen benchmark and returns the exit status of the process."""
    return int(_BENCHMARKS[arguments.benchmark].run(arguments))

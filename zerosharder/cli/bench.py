"""`python -m zerosharder bench NAME`: benchmarks that a user can repeat, peers interleaved in the same run."""

from __future__ import annotations

import argparse
from typing import Any

from zerosharder.cli import bench_optimizer

# Name of a benchmark -> its module: add_arguments(parser), run(arguments) -> exit status.
_BENCHMARKS: dict[str, Any] = {"optimizer": bench_optimizer}


def add_parser(commands: Any) -> None:
    """Add `bench` and its subcommands to the subparsers of the program."""
    command = commands.add_parser("bench", help="measure this machine against peers")
    names = command.add_subparsers(dest="benchmark", required=True, metavar="NAME")
    for name, module in _BENCHMARKS.items():
        module.add_arguments(names.add_parser(name, help=module.HELP, description=module.HELP))


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen benchmark and return the exit status."""
    return int(_BENCHMARKS[arguments.benchmark].run(arguments))

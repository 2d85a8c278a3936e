"""Subcommands and their arguments; each command lives in a module of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from zerosharder.cli import bench, doctor, settings_page


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status of the process."""
    parser = argparse.ArgumentParser(
        prog="python -m zerosharder", description="Tools beside zerosharder.shard()."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser(
        "doctor", help="show what this machine offers, what is missing, and what that costs"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    commands.add_parser("settings", help="print the reference page of all settings (Markdown)")
    bench.add_parser(commands)

    arguments = parser.parse_args(argv)
    if arguments.command == "doctor":
        facts = doctor.collect()
        sys.stdout.write(doctor.as_json(facts) if arguments.json else doctor.as_text(facts))
        return 1 if facts["problems"] else 0
    if arguments.command == "bench":
        return bench.run(arguments)
    sys.stdout.write(settings_page.render())
    return 0

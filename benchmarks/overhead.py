"""What sharding costs the host per unit and step, where there is next to nothing to compute.

    python benchmarks/overhead.py                  # 200 units of two numbers each
    python benchmarks/overhead.py --units 50 --json -

One process is a world of one: no communication, so the time of a step with zerosharder less that of the same
step without is bookkeeping. Two modes: "default" is what a world of one gets (fp32, parameters stay whole, as
there is nobody to share them with); "full" computes in bf16 with fp32 masters, for which every unit is
gathered, cast, freed, gathered for the backward and reduced as on many ranks. Steps with and without
zerosharder alternate, and the difference is taken pair by pair.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the host side only

import _common as common
import torch
from torch import Tensor, nn

MODES = {"default": "fp32", "full": "bf16"}
PARTS = ("forward_backward", "with_optimizer")


class Unit(nn.Linear):
    """Nearly empty: one weight and one bias."""

    def __init__(self) -> None:
        super().__init__(1, 1)


class Chain(nn.Module):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Unit() for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:  # [1, 1]
        for block in self.blocks:
            x = block(x)
        return x


def main() -> None:
    args = parse_arguments()
    if "RANK" in os.environ:
        sys.exit("run it as one process: python benchmarks/overhead.py, not under torchrun")
    torch.set_num_threads(1)
    results = common.Results("overhead", args.json)
    summaries, rows = [], []
    for mode in args.modes:
        for part in PARTS:
            summary = compare(args, mode, part)
            results.measurement(**summary)
            summaries.append(summary)
            extra = summary["per_unit_us"]
            row = [mode, part, *(f"{1e3 * summary[key]:.2f}" for key in ("plain_s", "sharded_s"))]
            rows.append([*row, f"{extra['median']:.1f}", f"{extra['min']:.1f}..{extra['max']:.1f}"])
    head = ["mode", "step", "plain ms", "sharded ms", "per unit us", "min..max"]
    results.table(f"{args.units} units, world of one, {args.rounds} pairs", head, rows)
    results.say_machine()
    results.summary(arguments=vars(args), results=[{**s, "pairs_s": None} for s in summaries])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--units", type=int, default=200, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="pairs of steps (%(default)s)")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--json", metavar="FILE", help="JSON lines; - for stdout")
    return parser.parse_args()


def compare(args: argparse.Namespace, mode: str, part: str) -> dict:
    dtype = torch.bfloat16 if MODES[mode] == "bf16" else torch.float32
    plain = step_of(Chain(args.units).to(dtype), None, part, dtype)
    sharded = step_of(Chain(args.units), MODES[mode], part, dtype)
    pairs = []
    for turn in range(args.rounds + 3):
        pair = (timed(plain), timed(sharded))
        if turn >= 3:  # the first ones record the order of units and fill caches
            pairs.append(pair)
    extra = [1e6 * (b - a) / args.units for a, b in pairs]
    return {
        "mode": mode,
        "part": part,
        "units": args.units,
        "plain_s": statistics.median(a for a, _ in pairs),
        "sharded_s": statistics.median(b for _, b in pairs),
        "per_unit_us": common.spread(extra),
        "pairs_s": pairs,
    }


def step_of(model: nn.Module, sharded: str | None, part: str, dtype: torch.dtype) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if sharded:
        import zerosharder as zs

        config = zs.Config(param_dtype=sharded, log="warning")
        model, optimizer = zs.shard(model, optimizer, config=config, units=(Unit,))
    x = torch.ones(1, 1, dtype=dtype)

    def step() -> None:
        model(x).sum().backward()
        if part == "with_optimizer":
            optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Callable[[], None]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()

"""Time and memory of one training step: plain PyTorch, DDP, FSDP2 and zerosharder, interleaved.

    python benchmarks/step.py                                     # 2 ranks, GPT 30M and 120M, fp32 and bf16
    python benchmarks/step.py --world 1 --sizes 30m --dtypes fp32 # what sharding costs where nothing is to be shared
    python benchmarks/step.py --sizes 30m --json -

Every engine trains the same model on the same data with AdamW(fused=True), in processes of its own, so that
memory can be told apart. In each round every engine gets its turn, and ratios are formed within a round: a
machine that others use too then hits all engines alike. With --together (the default of --world 1) all
processes stay alive and take turns every few steps; otherwise each round starts them anew, so that only one
engine is in memory.

plain is one process with the batch of one rank; plain_pair as many of those as there are ranks, side by side,
without a word between them: what is left of the time when communication is free. Losses are compared with
those of one process that sums up the gradients of all ranks. Peak RSS is VmHWM, reset after set-up; PSS is
sampled in two extra steps.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import dataclass, field

import _common as common
import _engines as engines
import _model

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}  # of losses, relative; bf16 engines round at different places
REFERENCE_STEPS = 5


@dataclass
class Series:
    """What one engine did, round by round."""

    medians: list[float] = field(default_factory=list)  # seconds of a step, one per round
    seconds: list[float] = field(default_factory=list)  # of all timed steps
    losses: list[float] = field(default_factory=list)  # of the first round, from the first step on
    rss: float = 0.0  # MiB, the worst rank
    pss: float = 0.0


def main() -> None:
    args = parse_arguments()
    results = common.Results("step", args.json)
    summaries = []
    for size in args.sizes:
        for dtype in args.dtypes:
            series, reference = measure(args, results, size, dtype)
            summaries += summarize(args, results, size, dtype, series, reference)
    results.say_machine()
    agree = all(s["losses_agree"] for s in summaries if s["losses_agree"] is not None)
    results.summary(arguments=vars(args), losses_agree=agree, results=summaries)
    if not agree:
        sys.exit("losses differ between engines: see the table")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", choices=list(engines.ENGINES), help="(all that apply)")
    parser.add_argument("--sizes", nargs="+", default=["30m", "120m"], choices=list(_model.SIZES))
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--world", type=int, default=2, help="ranks (%(default)s)")
    parser.add_argument("--rounds", type=int, help="turns of every engine (3; 15 with --together)")
    parser.add_argument("--steps", type=int, help="timed steps in a turn (8; 3 with --together)")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps after a start (%(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank (%(default)s)")
    parser.add_argument("--seq", type=int, default=128, help="tokens per sequence (%(default)s)")
    parser.add_argument("--together", action=argparse.BooleanOptionalAction, help="(with one rank)")
    parser.add_argument("--json", metavar="FILE", help="JSON lines; - for stdout")
    args = parser.parse_args()
    if args.together is None:
        args.together = args.world == 1
    args.rounds = args.rounds or (15 if args.together else 3)
    args.steps = args.steps or (3 if args.together else 8)
    if args.engines is None:
        args.engines = list(engines.ENGINES) if args.world > 1 else ["plain", "zerosharder"]
    return args


def measure(
    args: argparse.Namespace, results: common.Results, size: str, dtype: str
) -> tuple[dict[str, Series], list[float]]:
    """Run all rounds; the series of every engine, and the losses they must have."""
    series = {engine: Series() for engine in args.engines}
    options = ["--size", size, "--dtype", dtype, "--batch", str(args.batch), "--seq", str(args.seq)]
    with contextlib.ExitStack() as alive:
        groups: dict[str, common.Group] = {}
        for turn in range(args.rounds):
            for engine in args.engines:
                common.progress(f"{size} {dtype} round {turn + 1}/{args.rounds} {engine}")
                if args.together:
                    if turn == 0:
                        groups[engine] = alive.enter_context(start(args, engine, options))
                    take_turn(args, results, groups[engine], series[engine], size, dtype, turn)
                else:
                    with start(args, engine, options) as group:
                        take_turn(args, results, group, series[engine], size, dtype, turn)
    with common.Group("plain", 1, options) as group:
        reference = group.call("reference", count=REFERENCE_STEPS, world=args.world)[0]["losses"]
    return series, reference


def start(args: argparse.Namespace, engine: str, options: list[str]) -> common.Group:
    group = common.Group(engine, engines.world_of(engine, args.world), options)
    group.call("start")
    return group


def take_turn(
    args: argparse.Namespace,
    results: common.Results,
    group: common.Group,
    series: Series,
    size: str,
    dtype: str,
    turn: int,
) -> None:
    fresh = turn == 0 or not args.together
    losses = common.mean_losses(group.call("steps", count=args.warmup)) if fresh else []
    answers = group.call("steps", count=args.steps)
    losses += common.mean_losses(answers)
    seconds = common.slowest(answers)
    rss = [a["peak_rss_mib"] for a in answers]
    pss = [a["peak_pss_mib"] for a in group.call("sample", count=2)] if fresh else []
    median = common.spread(seconds)["median"]
    results.measurement(
        engine=group.engine,
        size=size,
        dtype=dtype,
        world=group.world,
        round=turn,
        batch=args.batch,
        seq=args.seq,
        step_s=seconds,
        median_s=median,
        tokens_per_s=group.world * args.batch * args.seq / median,
        peak_rss_mib=rss,
        peak_pss_mib=pss,
        losses=losses,
    )
    series.medians.append(median)
    series.seconds += seconds
    series.losses = series.losses or losses
    series.rss, series.pss = max(series.rss, *rss), max(series.pss, *pss, 0.0)


def summarize(
    args: argparse.Namespace,
    results: common.Results,
    size: str,
    dtype: str,
    series: dict[str, Series],
    reference: list[float],
) -> list[dict]:
    against = [e for e in ("plain", "ddp", "fsdp2") if e in series]
    summaries = []
    for engine, s in series.items():
        world = engines.world_of(engine, args.world)
        deviation = None
        if world == args.world and (engine not in engines.SHARE_NOTHING or world == 1):
            pairs = zip(s.losses, reference, strict=False)  # as far as both go
            deviation = max(abs(loss - wanted) / abs(wanted) for loss, wanted in pairs)
        summaries.append(
            {
                "engine": engine,
                "size": size,
                "dtype": dtype,
                "world": world,
                "step_s": common.spread(s.seconds),
                "tokens_per_s": world * args.batch * args.seq / common.spread(s.seconds)["median"],
                "peak_rss_mib": s.rss,
                "peak_pss_mib": s.pss,
                "time_ratio": {other: common.ratio(s.medians, series[other].medians) for other in against},
                "memory_ratio": {other: s.rss / series[other].rss for other in against},
                "loss_deviation": deviation,
                "losses_agree": None if deviation is None else deviation <= TOLERANCE[dtype],
            }
        )
    head = ["engine", "ranks", "median s", "min..max", "tokens/s", "peak RSS MiB", "peak PSS MiB"]
    head += [f"{what} / {other}" for other in against for what in ("time", "RSS")] + ["loss off by"]
    rows = []
    for s in summaries:
        row = [s["engine"], s["world"], f"{s['step_s']['median']:.4f}"]
        row += [f"{s['step_s']['min']:.4f}..{s['step_s']['max']:.4f}", f"{s['tokens_per_s']:,.0f}"]
        row += [f"{s['peak_rss_mib']:,.0f}", f"{s['peak_pss_mib']:,.0f}"]
        row += [f"{s[f'{what}_ratio'][other]:.3f}" for other in against for what in ("time", "memory")]
        off = s["loss_deviation"]
        row.append("" if off is None else f"{off:.1e}" + ("" if s["losses_agree"] else " WRONG"))
        rows.append(row)
    results.table(f"GPT {size}, {dtype}, batch {args.batch} x {args.seq} per rank", head, rows)
    return summaries


if __name__ == "__main__":
    main()

"""Where the bytes of a rank are, against what ZeRO-3 says they must be.

    python benchmarks/memory.py                        # GPT 30M and 120M on 2 ranks
    python benchmarks/memory.py --sizes 30m --world 4 --json -

The formula: 16 bytes for each of N parameters (weight, gradient and two AdamW states in fp32) over W ranks,
plus the largest unit gathered whole (the largest of block, embedding and head, in the dtype of the compute),
plus activations.

Measured: peak resident memory (VmHWM) over the training steps of the worst rank, less what the process held
after it had trained a tiny model with the same engine (base: libraries, threads, connections). Shards,
gradients and gathered units are what zs.stats counts, the optimizer state is the bytes of its tensors,
activations are the bytes that autograd holds when the forward of the unsharded model ends. "the rest" is what
nobody claims: whole gradients of a unit before they are reduced, temporaries of operators, and memory that
the allocator keeps.
"""

from __future__ import annotations

import argparse

import _common as common
import _model

MIB = 2**20


def main() -> None:
    args = parse_arguments()
    results = common.Results("memory", args.json)
    summaries = []
    for size in args.sizes:
        for dtype in args.dtypes:
            summaries.append(account(args, results, size, dtype))
    results.say_machine()
    results.summary(arguments=vars(args), results=summaries)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["30m", "120m"], choices=list(_model.SIZES))
    parser.add_argument("--dtypes", nargs="+", default=["fp32"], choices=["fp32", "bf16"])
    parser.add_argument(
        "--engines", nargs="*", default=["ddp", "fsdp2"], choices=["ddp", "fsdp2"], help="to compare with"
    )
    parser.add_argument("--world", type=int, default=2, help="ranks (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="training steps (%(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank (%(default)s)")
    parser.add_argument("--seq", type=int, default=128, help="tokens per sequence (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="JSON lines; - for stdout")
    return parser.parse_args()


def account(args: argparse.Namespace, results: common.Results, size: str, dtype: str) -> dict:
    options = ["--size", size, "--dtype", dtype, "--batch", str(args.batch), "--seq", str(args.seq)]
    with common.Group("plain", 1, options) as group:
        activations = group.call("activations")[0]["activations"] / MIB
    above_base, peak, base = {}, {}, {}
    for engine in (*args.engines, "zerosharder"):
        common.progress(f"{size} {dtype} {engine}")
        with common.Group(engine, args.world, options) as group:
            started = group.call("start")
            trained = group.call("steps", count=args.steps)
            counted = group.call("account")
        gains = [t["peak_rss_mib"] - s["base_mib"] for s, t in zip(started, trained, strict=True)]
        worst = gains.index(max(gains))
        above_base[engine], base[engine] = gains[worst], started[worst]["base_mib"]
        peak[engine] = trained[worst]["peak_rss_mib"]
        results.measurement(
            engine=engine,
            size=size,
            dtype=dtype,
            world=args.world,
            base_mib=[s["base_mib"] for s in started],
            ready_mib=[s["ready_mib"] for s in started],
            peak_rss_mib=[t["peak_rss_mib"] for t in trained],
            accounted_bytes=counted,
        )

    mine = counted[worst]  # of zerosharder, which came last
    share = mine["parameters"] / args.world / MIB
    unit = mine["largest_unit"] / MIB / (2 if dtype == "bf16" else 1)
    formula = {
        "shards": 4 * share,
        "gradients": 4 * share,
        "optimizer": 8 * share,
        "gathered": unit if args.world > 1 or dtype == "bf16" else 0.0,
        "activations": activations,
    }
    held = {name: mine[name] / MIB for name in ("shards", "gradients", "optimizer", "gathered")}
    held["activations"] = activations
    held["the rest"] = above_base["zerosharder"] - sum(held.values())
    total = sum(formula.values())

    rows = [(name, f"{held[name]:,.1f}", f"{formula.get(name, 0.0):,.1f}") for name in held]
    rows.append(("sum", f"{above_base['zerosharder']:,.1f}", f"{total:,.1f}"))
    rows.append(("base of the process", f"{base['zerosharder']:,.1f}", ""))
    title = f"GPT {size}, {dtype}, {args.world} ranks, batch {args.batch} x {args.seq}: MiB of the worst rank"
    results.table(title, ["zerosharder", "measured", "formula"], rows)
    rows = []
    for engine, gain in above_base.items():
        row = [engine, f"{peak[engine]:,.0f}", f"{gain:,.0f}", f"{gain / total:.3f}"]
        rows.append([*row, *(f"{peak[engine] / peak[other]:.3f}" for other in args.engines)])
    head = ["engine", "peak RSS MiB", "above base", "above base / formula"]
    results.table("", [*head, *(f"peak / {other}" for other in args.engines)], rows)
    return {
        "size": size,
        "dtype": dtype,
        "world": args.world,
        "measured_mib": held,
        "formula_mib": formula,
        "above_base_mib": above_base,
        "peak_rss_mib": peak,
        "base_mib": base,
        "ratio_to_formula": {engine: gain / total for engine, gain in above_base.items()},
    }


if __name__ == "__main__":
    main()

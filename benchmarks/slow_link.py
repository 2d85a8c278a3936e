"""A step over a slow network: DDP, FSDP2 and zerosharder between two network namespaces. NEEDS ROOT.

    sudo python benchmarks/slow_link.py                       # 1 Gbit/s, GPT 30M
    sudo python benchmarks/slow_link.py --rate 500mbit --sizes 120m --json -

Two namespaces (`ip netns`) are joined by a veth pair whose two ends let through --rate each (`tc tbf`); one
rank runs in each, as if they were two hosts. What no engine can beat: the compute of the step (plain_pair:
both ranks train on their own, without a word), or the time the bytes of ZeRO-3 need on this link, whichever
is longer. Those bytes are two gathers of all weights and one reduction of all gradients, of which each of two
ranks sends and receives a half; their time is measured by moving just as many bytes over one TCP connection
in both directions while nothing else runs. DDP moves a third less. The namespaces made here, and only those,
are removed at the end, whatever happens.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import _common as common
import _model

INTERFACE = "zslink"  # its name inside both namespaces
ADDRESSES = ("10.117.93.1", "10.117.93.2")  # of rank 0 and 1, seen only inside the namespaces
ENGINES = ("ddp", "fsdp2", "zerosharder")


def main() -> None:
    args = parse_arguments()
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        sys.exit(f"needs root and the commands ip and tc (package iproute2); missing: {missing or 'root'}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that finally blocks run
    results = common.Results("slow_link", args.json)
    with link(args.rate) as namespaces:
        summaries = [measure(args, results, namespaces, size) for size in args.sizes]
    results.say_machine()
    results.summary(arguments=vars(args), results=summaries)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--sizes", nargs="+", default=["30m"], choices=list(_model.SIZES))
    parser.add_argument("--rate", default="1gbit", help="of each direction, as tc writes it (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every engine (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps in a turn (%(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="untimed steps before them (%(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank (%(default)s)")
    parser.add_argument("--seq", type=int, default=128, help="tokens per sequence (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="JSON lines; - for stdout")
    return parser.parse_args()


@contextlib.contextmanager
def link(rate: str) -> Iterator[list[str]]:
    """Two namespaces of this process's own, joined by a link of that rate; their names."""
    names = [f"zerosharder-{os.getpid()}-{rank}" for rank in range(2)]
    made: list[str] = []
    try:
        for name in names:
            run("ip", "netns", "add", name)
            made.append(name)
        peer = ("peer", "name", INTERFACE, "netns", names[1])
        run("ip", "-n", names[0], "link", "add", INTERFACE, "type", "veth", *peer)
        for name, address in zip(names, ADDRESSES, strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            run("ip", "-n", name, "link", "set", INTERFACE, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            shaping = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
            run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *shaping)
        yield names
    finally:
        for name in made:  # takes the link with it
            subprocess.run(["ip", "netns", "delete", name], check=False)


def run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stdout.strip()}")


def measure(args: argparse.Namespace, results: common.Results, namespaces: list[str], size: str) -> dict:
    options = ["--size", size, "--dtype", "fp32", "--batch", str(args.batch), "--seq", str(args.seq)]
    environment = {"GLOO_SOCKET_IFNAME": INTERFACE, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    parameters = sum(p.numel() for p in _model.build(size, args.seq).parameters())
    nbytes = 3 * 4 * parameters // 2  # per direction
    medians: dict[str, list[float]] = {name: [] for name in ("compute", "communication", *args.engines)}
    seconds: dict[str, list[float]] = {name: [] for name in medians}
    for turn in range(args.rounds):
        for name in medians:
            common.progress(f"{size} round {turn + 1}/{args.rounds} {name}")
            engine = name if name in args.engines else "plain_pair"
            with common.Group(
                engine,
                2,
                options,
                address=ADDRESSES[0],
                environment=environment,
                prefix=lambda rank: ("ip", "netns", "exec", namespaces[rank]),
            ) as group:
                losses: list[float] = []
                if name == "communication":
                    port = common.free_port()
                    answers = group.call("transfer", address=ADDRESSES[0], port=port, nbytes=nbytes)
                    times = [max(a["seconds"] for a in answers)]
                else:
                    group.call("start")
                    losses = common.mean_losses(group.call("steps", count=args.warmup))
                    answers = group.call("steps", count=args.steps)
                    losses += common.mean_losses(answers)
                    times = common.slowest(answers)
            median = common.spread(times)["median"]
            results.measurement(
                name=name, size=size, round=turn, rate=args.rate, step_s=times, median_s=median, losses=losses
            )
            medians[name].append(median)
            seconds[name] += times

    bound = [max(pair) for pair in zip(medians["compute"], medians["communication"], strict=True)]
    ratios = {name: common.ratio(medians[name], bound) for name in args.engines}
    against = {n: common.ratio(medians[n], medians["fsdp2"]) for n in args.engines if "fsdp2" in args.engines}
    rows = []
    for name, times in seconds.items():
        s = common.spread(times)
        row = [name, f"{s['median']:.3f}", f"{s['min']:.3f}..{s['max']:.3f}"]
        row += [f"{found[name]:.3f}" if name in found else "" for found in (ratios, against)]
        rows.append(row)
    head = ["", "median s", "min..max", "/ max(compute, communication)", "/ fsdp2"]
    moved = f"{nbytes / 2**20:,.0f} MiB each way"
    results.table(f"GPT {size}, fp32, 2 ranks over {args.rate}, {moved}", head, rows)
    return {
        "size": size,
        "rate": args.rate,
        "bytes_each_way": nbytes,
        "step_s": {name: common.spread(times) for name, times in seconds.items()},
        "ratio_to_bound": ratios,
        "ratio_to_fsdp2": against,
    }


if __name__ == "__main__":
    main()

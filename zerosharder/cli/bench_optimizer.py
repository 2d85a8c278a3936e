"""`python -m zerosharder bench optimizer`: AdamW steps against torch's fused one and against plain memory traffic.

Everything that is compared runs in turn, round after round, in one process, on tensors of its own. `fp32`: float32
throughout. `mixed`: bfloat16 gradient in, float32 state, bfloat16 weight out; torch needs casts around its step for
that. Each flow is measured on memory as torch allocates it and on huge pages.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zerosharder.offload.memory import flat_buffer
from zerosharder.optim import native

HELP = "AdamW steps over flat ranges, beside torch.optim.AdamW(fused=True)"
_HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
_BYTES = 28  # an element, in either flow: reads of g p m v, writes of p m v, and of the copy in mixed
_CPU = torch.device("cpu")

Step = Callable[[], Any]
Allocate = Callable[[int, torch.dtype], torch.Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the benchmark."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--elements", type=_counts, default=[50_000_000, 200_000_000], help="such as 50M,200M"
    )
    parser.add_argument("--threads", type=_counts, default=[1, 2], help="such as 1,2")
    parser.add_argument("--runs", type=int, default=7, help="rounds that count, after one that does not")
    parser.add_argument("--flows", type=_words, default=["fp32", "mixed"], help="fp32,mixed")
    parser.add_argument("--pages", type=_words, default=["torch", "huge"], help="torch,huge")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, and return the exit status: 1 without the extension."""
    if not native.available():
        sys.stderr.write("The extension zerosharder._C is missing, so there is nothing to measure.\n")
        return 1
    rows = []
    before = torch.get_num_threads()
    try:
        for row in measure(arguments):
            rows.append(row)
            if not arguments.json:
                sys.stdout.write(_line(row))
                sys.stdout.flush()
    finally:
        torch.set_num_threads(before)
    if arguments.json:
        facts = {"machine": _machine(), "bytes_per_element": _BYTES, "rows": rows}
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    return 0


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row per implementation, size, number of threads, flow and kind of page."""
    for elements in arguments.elements:
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            for flow in arguments.flows:
                for pages in arguments.pages:
                    with native.StepPool(threads) as pool:
                        yield from _compare(pool, elements, flow, pages, arguments.runs)
                    gc.collect()


def _compare(
    pool: native.StepPool, elements: int, flow: str, pages: str, runs: int
) -> Iterator[dict[str, Any]]:
    allocate = _of_torch if pages == "torch" else _of_huge_pages
    mixed = flow == "mixed"
    grad = allocate(elements, torch.bfloat16 if mixed else torch.float32)
    grad.normal_()
    cases: dict[str, Step] = {}
    # Variants share their tensors: the time of a step does not depend on the values.
    ours, probe = _range(grad, allocate, mixed), _range(grad, allocate, mixed)
    for name, stream in (
        ("zerosharder", 0),
        ("zerosharder-stream", native.STREAM_STATE | native.STREAM_COPY),
    ):
        cases[name] = _our_step(pool, ours, stream)
    cases["bound"] = lambda: native.bandwidth_probe(pool, probe)
    cases["bound-stream"] = lambda: native.bandwidth_probe(pool, probe, stream=native.STREAM_STATE)
    cases["torch-fused"] = _torch_step(grad, allocate, mixed, torch.optim.AdamW, {"fused": True})
    if importlib.util.find_spec("deepspeed") is not None:
        adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        cases["deepspeed"] = _torch_step(grad, allocate, mixed, adam, {})
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(runs + 1):
        for name, step in cases.items():
            begin = time.perf_counter()
            step()
            if turn > 0:
                seconds[name].append(time.perf_counter() - begin)
    peer = statistics.median(seconds["torch-fused"])
    bound = min(statistics.median(seconds[name]) for name in ("bound", "bound-stream"))
    for name, times in seconds.items():
        median = statistics.median(times)
        yield {
            "name": name,
            "elements": elements,
            "threads": pool.threads,
            "flow": flow,
            "pages": pages,
            "seconds": median,
            "spread": (max(times) - min(times)) / median,
            "melements_per_s": elements / median / 1e6,
            "gb_per_s": _BYTES * elements / median / 1e9,
            "over_torch": peer / median,
            "of_bound": bound / median,
        }


def _range(grad: torch.Tensor, allocate: Allocate, mixed: bool) -> native.Range:
    n = grad.numel()
    weight, first, second = (allocate(n, torch.float32) for _ in range(3))
    weight.fill_(0.5)
    return native.Range(weight, grad, [first, second], allocate(n, torch.bfloat16) if mixed else None)


def _our_step(pool: native.StepPool, tensors: native.Range, stream: int) -> Step:
    hyper = native.Hyper(**_HYPER)  # type: ignore[arg-type]
    return lambda: native.step(pool, "adamw", tensors, hyper, number=10, stream=stream)


def _torch_step(
    grad: torch.Tensor, allocate: Allocate, mixed: bool, kind: Any, options: dict[str, Any]
) -> Step:
    n = grad.numel()
    weight = torch.nn.Parameter(allocate(n, torch.float32).fill_(0.5))
    optimizer = kind([weight], **_HYPER, **options)
    if kind is torch.optim.AdamW:  # the moments on the same kind of page as ours
        optimizer.state[weight] = {
            "step": torch.tensor(0.0),
            "exp_avg": allocate(n, torch.float32),
            "exp_avg_sq": allocate(n, torch.float32),
        }
    if not mixed:
        weight.grad = grad
        return lambda: optimizer.step()
    wide, copy = allocate(n, torch.float32), allocate(n, torch.bfloat16)
    weight.grad = wide

    def step() -> None:
        wide.copy_(grad)
        optimizer.step()
        with torch.no_grad():
            copy.copy_(weight)

    return step


def _of_torch(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(n, dtype=dtype)


def _of_huge_pages(n: int, dtype: torch.dtype) -> torch.Tensor:
    return flat_buffer(n, dtype, _CPU)


def _machine() -> dict[str, Any]:
    model = ""
    try:
        with open("/proc/cpuinfo") as lines:
            model = next(
                (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), ""
            )
    except OSError:
        pass
    return {
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "features": native.cpu_features(),
        "isa": native.chosen_isa(),
        "torch": torch.__version__,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['flow']:<5} {row['elements'] / 1e6:5.0f}M {row['threads']:2d} threads {row['pages']:<5} "
        f"{row['name']:<19} {row['seconds'] * 1e3:8.2f} ms  {row['gb_per_s']:6.1f} GB/s  "
        f"{row['over_torch']:.2f}x torch  {row['of_bound']:.2f} of bound  spread {row['spread']:.2f}\n"
    )


def _counts(text: str) -> list[int]:
    units = {"K": 1_000, "M": 1_000_000, "G": 1_000_000_000}
    counts = []
    for word in text.upper().split(","):
        unit = units.get(word[-1:], 1)
        try:
            count = int(word.rstrip("KMG")) * unit
        except ValueError:
            raise argparse.ArgumentTypeError(f"not a number: {word!r}") from None
        if count < 1:
            raise argparse.ArgumentTypeError(f"must be at least 1: {word!r}")
        counts.append(count)
    return counts


def _words(text: str) -> list[str]:
    words = text.split(",")
    unknown = set(words) - {"fp32", "mixed", "torch", "huge"}
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return words

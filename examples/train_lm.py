"""Train a byte-level GPT on Python's own source code, sharded over all ranks by one line.

    python examples/train_lm.py                                    # one process
    torchrun --nproc-per-node 2 examples/train_lm.py               # two ranks, each with half of everything
    torchrun --nproc-per-node 2 examples/train_lm.py --unsharded   # the same losses from DistributedDataParallel

It is an ordinary training script: the line that calls zs.shard is all there is to sharding. --batch counts
the sequences of one optimizer step over all ranks and micro-batches, so a run means the same on any number of
ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import resource
import sys
import time
from pathlib import Path

import _lm
import _text
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerosharder as zs

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # set by torchrun
PROMPT = "def read(self, "


def main() -> None:
    run(parse_arguments())
    if dist.is_initialized():  # after run(): gloo hangs now and then if DDP is the last to let go of it
        dist.destroy_process_group()


def run(args: argparse.Namespace) -> None:
    train_text, held_out_text = _text.load(args.bytes)
    batches = _text.Batches(train_text, args.seq, args.batch, args.seed, RANK, WORLD, args.accumulate)
    held_out = _text.Batches(held_out_text, args.seq, args.batch, args.seed, RANK, WORLD)

    torch.manual_seed(args.seed)  # every rank builds the same model
    model: nn.Module = _lm.GPT(*_lm.SIZES[args.size])
    optimizer = torch.optim.AdamW(decay_groups(model), lr=args.lr, betas=(0.9, 0.95), fused=True)
    forward_context = contextlib.nullcontext()
    if args.unsharded:
        model, forward_context = unsharded(model, args.dtype)
    else:
        config = zs.Config(param_dtype="bf16") if args.dtype == "bf16" else None
        model, optimizer = zs.shard(model, optimizer, config=config)  # the one line
    factor = functools.partial(lr_factor, steps=args.steps, warmup=args.warmup)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    device = next(model.parameters()).device
    sizes = f"{len(train_text):,} bytes to train on, {len(held_out_text):,} held out"
    say(f"{sizes}; {WORLD} rank(s) on {device.type}")

    losses: list[float] = []
    begin = lap = time.perf_counter()
    for step in range(args.steps):
        loss = torch.zeros((), device=device)
        for part in range(args.accumulate):
            tokens, targets = (t.to(device) for t in batches.get(step, part))
            with forward_context:
                part_loss = model(tokens, targets) / args.accumulate
            part_loss.backward()
            loss += part_loss.detach()
        if args.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        lr = scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        losses.append(mean_over_ranks(loss))
        if (step + 1) % args.log_every == 0 or step + 1 == args.steps:
            now, count = time.perf_counter(), step % args.log_every + 1
            speed = count * args.batch * args.seq / (now - lap)
            say(f"step {step + 1:4d}/{args.steps}  loss {losses[-1]:.4f}  lr {lr:.2e}  "
                f"{speed:7,.0f} tokens/s  rss {psutil.Process().memory_info().rss / 2**20:,.0f} MiB")  # fmt: skip
            lap = now
    train_seconds = time.perf_counter() - begin

    with forward_context:
        held_out_loss = evaluate(model, held_out, args.eval_batches, device)
        say(f"held-out loss {held_out_loss:.4f} nats per byte after {train_seconds:.0f} s of training")
        text = generate(model, PROMPT, args.generate, args.seq, args.seed, device)
    say(f"--- sample ---\n{text}\n--------------")
    if not args.unsharded:
        say(zs.stats(model))

    peaks = gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)  # Linux counts in KiB
    if args.json and RANK == 0:
        tokens = args.steps * args.batch * args.seq
        report = {
            "arguments": vars(args),
            "world": WORLD,
            "losses": losses,
            "held_out_loss": held_out_loss,
            "seconds": train_seconds,
            "tokens_per_s": tokens / train_seconds,
            "peak_rss_mib": peaks,
            "sample": text,
        }
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", default="3m", choices=list(_lm.SIZES), help="parameters, about (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=900, help="optimizer steps (%(default)s)")
    parser.add_argument(
        "--batch", type=int, default=4, help="sequences per step over all ranks (%(default)s)"
    )
    parser.add_argument("--seq", type=int, default=256, help="bytes per sequence (%(default)s)")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate (%(default)s)")
    parser.add_argument("--warmup", type=int, default=30, help="steps of linear warm-up (%(default)s)")
    parser.add_argument(
        "--clip", type=float, default=1.0, help="largest gradient norm, 0: no clipping (%(default)s)"
    )
    parser.add_argument(
        "--dtype", default="fp32", choices=["fp32", "bf16"], help="of compute; masters stay fp32"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--eval-batches", type=int, default=64, help="of --batch held-out sequences (%(default)s)"
    )
    parser.add_argument("--generate", type=int, default=200, help="bytes of sample text (%(default)s)")
    parser.add_argument(
        "--log-every", type=int, default=20, help="steps between progress lines (%(default)s)"
    )
    parser.add_argument("--bytes", type=int, help="use only so many bytes of the text")
    parser.add_argument("--json", metavar="FILE", help="write losses, speed and memory there")
    parser.add_argument(
        "--unsharded", action="store_true", help="the reference: plain PyTorch, DDP on several ranks"
    )
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes, to try the script")
    if "--quick" in sys.argv:
        parser.set_defaults(
            size="tiny", steps=12, seq=64, warmup=2, eval_batches=2, generate=16, bytes=200_000
        )
    return parser.parse_args()


def unsharded(model: nn.Module, dtype: str) -> tuple[nn.Module, contextlib.AbstractContextManager]:
    """What the script would do without zerosharder; the second value is the context of the forward."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    model.to(device)
    if WORLD > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        model = nn.parallel.DistributedDataParallel(model)
    return model, torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16")


def decay_groups(model: nn.Module) -> list[dict]:
    """Weight decay for matrices only, not for the weights of norms."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def lr_factor(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def evaluate(model: nn.Module, batches: _text.Batches, count: int, device: torch.device) -> float:
    """Mean held-out loss; every rank runs the same number of batches, as a sharded forward needs all ranks."""
    model.eval()
    losses = [model(*(t.to(device) for t in batches.get(step))) for step in range(count)]
    model.train()
    return mean_over_ranks(torch.stack(losses).mean())


@torch.no_grad()
def generate(model: nn.Module, prompt: str, count: int, seq: int, seed: int, device: torch.device) -> str:
    """Continue the prompt. All ranks run it together and draw the same bytes from the same seed."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode())])
    for _ in range(count):
        logits = model(tokens[:, -seq:].to(device))[0, -1].cpu()
        following = torch.multinomial((logits / 0.7).softmax(0), 1, generator=generator)
        tokens = torch.cat((tokens, following[None]), dim=1)
    model.train()
    return bytes(tokens[0].tolist()).decode(errors="replace")


def mean_over_ranks(value: Tensor) -> float:
    if WORLD > 1:
        dist.all_reduce(value)
    return value.item() / WORLD


def gather(value: float) -> list[float]:
    values = [value] * WORLD
    if WORLD > 1:
        dist.all_gather_object(values, value)
    return values


def say(message: object) -> None:
    if RANK == 0:
        print(message, flush=True)


if __name__ == "__main__":
    main()

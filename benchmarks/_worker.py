"""One rank of one engine: reads commands from stdin, answers on stdout, one JSON object a line.

Started by `_common.Group`; everything that is not an answer goes to stderr. The commands are the methods of
`Worker`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import sys
import threading
import time

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these benchmarks compare engines on the CPU

import _common as common
import _engines as engines
import _model
import torch
import torch.distributed as dist


class Worker:
    """Commands of the conductor; each returns what is to be answered."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.world = engines.rank(), int(os.environ.get("WORLD_SIZE", "1"))
        self.talks = args.engine not in engines.SHARE_NOTHING and self.world > 1
        self.done = 0  # steps so far

    def start(self) -> dict:
        """Build the model. Memory before it is taken after a tiny model has loaded all code that a step needs."""
        args = self.args
        throwaway = engines.ENGINES[args.engine](_model.build("tiny", args.seq), args.dtype)
        for step in range(2):
            throwaway.step(*_model.batch("tiny", step, self.rank, args.batch, args.seq))
        del throwaway
        gc.collect()
        self.base = common.resident()
        begin = time.perf_counter()
        model = _model.build(args.size, args.seq)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.units = _model.unit_nbytes(model)
        self.trained = engines.ENGINES[args.engine](model, args.dtype)
        common.reset_peak()
        seconds, ready = time.perf_counter() - begin, common.resident()
        return {"setup_s": seconds, "base_mib": self.base, "ready_mib": ready, "parameters": self.parameters}

    def steps(self, count: int) -> dict:
        """Train; seconds of each step on this rank, and its loss."""
        seconds, losses = [], []
        for _ in range(count):
            data = self.batch(self.done)
            self.done += 1
            if self.talks:
                dist.barrier()
            begin = time.perf_counter()
            losses.append(self.trained.step(*data))
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds, "losses": losses, "peak_rss_mib": common.peak_resident()}

    def sample(self, count: int) -> dict:
        """Untimed steps while a thread reads the proportional set size, which costs time to read."""
        peak, running = [0.0], threading.Event()

        def watch() -> None:
            while not running.wait(0.02):
                peak[0] = max(peak[0], common.proportional())

        thread = threading.Thread(target=watch)
        thread.start()
        losses = self.steps(count)["losses"]
        running.set()
        thread.join()
        return {"peak_pss_mib": max(peak[0], common.proportional()), "losses": losses}

    def reference(self, count: int, world: int) -> dict:
        """The losses that `world` ranks must have: one process sums up the gradients of all their batches."""
        args, losses = self.args, []
        trained = engines.plain(_model.build(args.size, args.seq), args.dtype)
        for step in range(count):
            total = 0.0
            for rank in range(world):
                trained.backward(*_model.batch(args.size, step, rank, args.batch, args.seq), 1 / world)
                total += trained.loss.item() / world
            trained.finish()
            losses.append(total)
        return {"losses": losses}

    def activations(self) -> dict:
        """Bytes that autograd holds when the forward of the unsharded model ends, weights aside."""
        args = self.args
        model = _model.build(args.size, args.seq)
        if args.dtype == "bf16":
            model.bfloat16()
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(*self.batch(0))
        del loss  # held until here, so that no address was given out twice
        return {"activations": sum(saved.values())}

    def account(self) -> dict:
        """Bytes by category, as the tensors and the engine have them."""
        states = [s for state in self.trained.optimizer.state.values() for s in state.values()]
        spans = []
        for tensor in filter(torch.is_tensor, states):
            storage = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()
            spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        answer = {
            "parameters": self.parameters,
            "largest_unit": max(self.units),
            "optimizer": common.union(spans),
        }
        if self.args.engine == "zerosharder":
            import zerosharder as zs

            peaks = zs.stats(self.trained.model).peak_bytes
            for role in ("shards", "gradients", "gathered"):
                answer[role] = sum(roles.get(role, 0) for roles in peaks.values())
        return answer

    def transfer(self, address: str, port: int, nbytes: int) -> dict:
        """Send and receive so many bytes at once over one TCP connection between two ranks; nothing else runs."""
        if self.rank == 0:
            with socket.create_server((address, port)) as server:
                link, _ = server.accept()
        else:
            link = common.connect(address, port)
        with link:
            link.sendall(b"!")
            link.recv(1)  # both are there
            begin = time.perf_counter()
            sender = threading.Thread(target=common.send, args=(link, nbytes))
            sender.start()
            common.receive(link, nbytes)
            sender.join()
            return {"seconds": time.perf_counter() - begin}

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return _model.batch(self.args.size, step, self.rank, self.args.batch, self.args.seq)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", required=True, choices=list(engines.ENGINES))
    parser.add_argument("--size", required=True, choices=list(_model.SIZES))
    parser.add_argument("--dtype", required=True, choices=["fp32", "bf16"])
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--seq", type=int, required=True)
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print must not end up between the answers
    worker = Worker(args)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(worker, command.pop("do"))(**command)
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # no teardown: destroying a gloo group that DDP holds hangs now and then (torch 2.13)


if __name__ == "__main__":
    main()

"""AdamW, Adam and SGD over flat shards instead of hundreds of DTensors.

torch's optimizers collect tensors in ``_init_group`` and hand the lists to a functional step. The lists of an adopted
optimizer are replaced by a few long, plain tensors: runs of neighbouring parameters of a flat shard. Every element gets
the same bits. Hooks, schedulers, ``GradScaler`` and ``fused=`` / ``foreach=`` keep their meaning.

A run in float32 on the CPU is stepped here by native code (optim/native.py), at once, and torch gets what is left. It
has the bits of torch's plain step; those of its fused one are the same but for the last elements of a tensor, which
torch computes by other code. Without the extension torch's plain step runs over blocks small enough to stay in cache:
the same operations in the same order for each element, three to five times faster than over large tensors.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from zerosharder.offload.memory import flat_buffer
from zerosharder.optim import native
from zerosharder.optim.roots import Roots, torch_roots
from zerosharder.optim.shards import FlatShard, ShardedParam, local_of

# Elements of a block of the plain step: its six operands of 4 bytes stay in a 2 MiB cache.
BLOCK = 64 * 1024

Owners = dict[int, tuple[FlatShard, ShardedParam]]


def step_over_flat_shards(optimizer: torch.optim.Optimizer, owners: Owners) -> None:
    """Lets ``optimizer`` step over runs of the flat shards, if it is one whose step is known to be elementwise.

    Others (and subclasses, whose step may do anything) run on the sharded parameters as they are.
    """
    kind = type(optimizer)
    adopted: FlatSteps | None = getattr(optimizer, "_zerosharder_flat", None)
    if adopted is not None:
        adopted.add_owners(owners)
        return
    if kind in (torch.optim.AdamW, torch.optim.Adam):
        steps: FlatSteps = FlatAdam(owners)
    elif kind is torch.optim.SGD:
        steps = FlatSGD(owners)
    else:
        return
    optimizer._zerosharder_flat = steps  # type: ignore[attr-defined]
    original = optimizer._init_group  # type: ignore[attr-defined]  # bound to the class's, before ours hides it
    optimizer._init_group = types.MethodType(  # type: ignore[attr-defined]
        lambda self, group, *lists: steps.collect(self, group, original, lists), optimizer
    )
    optimizer.register_step_pre_hook(lambda *_: steps.start())
    optimizer.register_step_post_hook(lambda *_: steps.finish())


@dataclass
class Run:
    """Neighbours in one flat shard that are stepped as one: elements [start, stop)."""

    bucket: FlatShard
    start: int
    stop: int
    members: list[int]  # positions in the lists that _init_group filled
    key: object
    last: int  # position of the last member in the flat shard

    def joins(self, bucket: FlatShard, position: int, key: object) -> bool:
        """Whether the parameter at ``position`` continues this run: only padding, which stays zero, lies between."""
        return self.bucket is bucket and self.last + 1 == position and self.key == key

    def pieces(self, group: dict[str, Any]) -> Iterator[tuple[int, int]]:
        """The run in one piece for fused, foreach and CUDA; in blocks for torch's plain step on a CPU."""
        plain = not group["fused"] and not group["foreach"] and self.bucket.flat.device.type == "cpu"
        length = BLOCK if plain else max(1, self.stop - self.start)
        for start in range(
            self.start, max(self.stop, self.start + 1), length
        ):  # one even if nothing lies here
            yield start, min(self.stop, start + length)


class FlatSteps:
    """Replaces the lists of ``_init_group`` by runs; subclasses know what the lists mean."""

    def __init__(self, owners: Owners) -> None:
        self._owners = dict(owners)
        self._state: dict[tuple[int, str], torch.Tensor] = {}  # (id of bucket, role) -> flat state
        self._after: list[Callable[[], None]] = []

    def add_owners(self, owners: Owners) -> None:
        """Another sharded model's parameters are in the same optimizer."""
        self._owners.update(owners)

    def collect(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], original: Any, lists: tuple[Any, ...]
    ) -> Any:
        """What ``_init_group`` does, then the exchange."""
        raise NotImplementedError

    def start(self) -> None:
        """Runs before the step: forgets what a step that an exception left would have done afterwards."""
        self._after = []

    def finish(self) -> None:
        """Runs after the step: brings back into the state what the step changed in stand-ins."""
        after, self._after = self._after, []
        for action in after:
            action()

    def runs(
        self, params: list[torch.Tensor], grads: list[torch.Tensor], keys: list[object]
    ) -> Iterator[Run]:
        """Neighbours of a flat shard with equal ``keys``, as long as possible; brings their gradients in."""
        found = [(i, *self._owners[id(p)]) for i, p in enumerate(params) if id(p) in self._owners]
        found.sort(key=lambda item: (id(item[1]), item[1].position(item[2].layout)))
        current: Run | None = None
        for i, bucket, owner in found:
            if not bucket.holds_grad(owner.layout, grads[i]):
                bucket.take_grad(owner.layout, grads[i])
            start = owner.layout.shard_offset
            stop = start + owner.layout.valid[bucket.rank]
            position = bucket.position(owner.layout)
            # Every rank steps a replicated parameter by itself. Alone in its run it sees the same vector lanes
            # everywhere; among rows, of which ranks hold different numbers, a fused kernel may round it differently.
            key = (keys[i], owner.layout.replicated)
            if current is not None and current.joins(bucket, position, key):
                current.stop, current.last = stop, position
                current.members.append(i)
                continue
            if current is not None:
                yield current
            current = Run(bucket, start, stop, [i], key, position)
        if current is not None:
            yield current

    def flat_state(self, bucket: FlatShard, role: str) -> torch.Tensor:
        """The flat buffer of one role of optimizer state, layout of the flat shard."""
        key = (id(bucket), role)
        if key not in self._state:
            self._state[key] = flat_buffer(bucket.layout.shard_numel, bucket.layout.dtype, bucket.flat.device)
        return self._state[key]

    def state_view(self, param: torch.Tensor, role: str) -> torch.Tensor:
        """The part of ``flat_state`` that belongs to ``param``, as its sharded form."""
        bucket, owner = self._owners[id(param)]
        return bucket.as_sharded(self.flat_state(bucket, role), owner.layout)

    def is_flat(self, param: torch.Tensor, value: torch.Tensor, role: str) -> bool:
        """Whether ``value`` is the view that ``state_view`` gives (a loaded state dict brings others)."""
        bucket, owner = self._owners[id(param)]
        flat = self._state.get((id(bucket), role))
        if flat is None:
            return False
        local = local_of(value)
        at = flat.data_ptr() + owner.layout.shard_offset * flat.element_size()
        return not local.numel() or local.data_ptr() == at

    def native_range(self, run: Run, roles: tuple[str, ...]) -> native.Range:
        """The tensors of ``run`` for a native step."""
        part = slice(run.start, run.stop)
        flat = run.bucket.flat
        return native.Range(
            flat[part],
            run.bucket.flat_grad[part],
            [self.flat_state(run.bucket, role)[part] for role in roles],
        )


def _step_native(
    rule: str, run: Run, tensors: native.Range, hyper: native.Hyper, number: int, roots: Roots | None = None
) -> None:
    pool = native.shared_pool(torch.get_num_threads())
    native.step(pool, rule, tensors, hyper, number=number, roots=roots)
    # Gathers and saved weights tell from the version that the shard is another one now.
    torch.autograd.graph.increment_version(run.bucket.flat)


def _is_native(optimizer: torch.optim.Optimizer, run: Run) -> bool:
    """Whether native code may step ``run``: the bits are torch's, and torch does nothing beside the arithmetic."""
    if not native.available() or run.bucket.flat.device.type != "cpu":
        return False
    if run.bucket.flat.dtype != torch.float32 or run.bucket.flat_grad.dtype != torch.float32:
        return False
    # A fused step under GradScaler unscales, and skips itself if it finds an infinity.
    return getattr(optimizer, "grad_scale", None) is None and getattr(optimizer, "found_inf", None) is None


class FlatAdam(FlatSteps):
    """AdamW and Adam; the lists are params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps."""

    ROLES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def collect(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], original: Any, lists: tuple[Any, ...]
    ) -> Any:
        """See FlatSteps."""
        roles = self.ROLES[: 3 if group["amsgrad"] else 2]
        plain = group["differentiable"] or group["capturable"]
        for param in group["params"]:
            if param.grad is not None and id(param) in self._owners and not plain:
                self._prepare(optimizer, group, param, roles)
        has_complex = original(group, *lists)
        params, grads, *_, steps = lists
        if plain:
            return has_complex
        members: set[int] = set()
        new: list[list[torch.Tensor]] = [[] for _ in lists]
        for run in self.runs(params, grads, [float(step) for step in steps]):
            members.update(run.members)
            if self._fits(optimizer, group, run):
                own = [steps[i] for i in run.members]
                torch._foreach_add_(own, 1)
                _step_native(
                    "adamw" if _decays_weights(optimizer, group) else "adam",
                    run,
                    self.native_range(run, roles),
                    _adam_hyper(group),
                    int(own[0]),
                    None if group["fused"] else torch_roots(),
                )
                continue
            flats = [
                run.bucket.flat,
                run.bucket.flat_grad,
                *(self.flat_state(run.bucket, role) for role in roles),
            ]
            for start, stop in run.pieces(group):
                for place, flat in enumerate(flats):
                    new[place].append(flat[start:stop])
                new[-1].append(steps[run.members[0]].clone())
            # What the step made of the counter: a fused step under GradScaler leaves it where an inf was found.
            counted = [new[-1][-1]] * len(run.members)
            self._after.append(
                functools.partial(torch._foreach_copy_, [steps[i] for i in run.members], counted)
            )
        _exchange(lists, new, members)
        return has_complex

    def _fits(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], run: Run) -> bool:
        return (
            _is_native(optimizer, run)
            and not any(isinstance(beta, torch.Tensor) for beta in group["betas"])
            and (group["fused"] or torch_roots() is not None)
        )

    def _prepare(
        self,
        optimizer: torch.optim.Optimizer,
        group: dict[str, Any],
        param: torch.Tensor,
        roles: tuple[str, ...],
    ) -> None:
        """Makes the state flat before torch would allocate it parameter by parameter, or after a load."""
        state = optimizer.state[param]
        if not state:
            device = local_of(param).device if group["fused"] else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        for role in roles:
            value = state.get(role)
            if value is not None and self.is_flat(param, value, role):
                continue
            flat = self.state_view(param, role)
            if value is None:
                local_of(flat).zero_()
            else:
                local_of(flat).copy_(local_of(value))
            state[role] = flat


def _decays_weights(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether weight decay shrinks the weights (AdamW) instead of joining the gradient."""
    return bool(group.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW))


def _adam_hyper(group: dict[str, Any]) -> native.Hyper:
    return native.Hyper(
        lr=float(group["lr"]),
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
    )


def _sgd_hyper(group: dict[str, Any]) -> native.Hyper:
    return native.Hyper(
        lr=float(group["lr"]),
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
    )


class FlatSGD(FlatSteps):
    """SGD; the lists are params, grads, momentum_buffers (None before a parameter's first step)."""

    ROLE = "momentum_buffer"

    def collect(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], original: Any, lists: tuple[Any, ...]
    ) -> Any:
        """See FlatSteps."""
        result = original(group, *lists)
        params, grads, buffers = lists
        if group["differentiable"]:
            return result
        momentum = bool(group["momentum"])
        if not momentum:
            buffers.extend([None] * len(params))  # torch leaves the list empty then
        for i, param in enumerate(params):
            if buffers[i] is not None and id(param) in self._owners:
                self._prepare(optimizer, param, buffers[i])
        members: set[int] = set()
        new: list[list[Any]] = [[], [], []]
        for run in self.runs(params, grads, [buffer is None for buffer in buffers]):
            members.update(run.members)
            is_first = momentum and buffers[run.members[0]] is None
            is_native = _is_native(optimizer, run)
            if is_native:
                roles = (self.ROLE,) if momentum else ()
                number = 1 if is_first else 2
                _step_native("sgd", run, self.native_range(run, roles), _sgd_hyper(group), number)
            for start, stop in () if is_native else run.pieces(group):
                block = run.bucket.flat[start:stop]
                new[0].append(block)
                new[1].append(run.bucket.flat_grad[start:stop])
                buffer = self.flat_state(run.bucket, self.ROLE)[start:stop] if momentum else None
                new[2].append(None if is_first else buffer)
                if momentum:
                    # torch keeps each buffer under state[block] too; on a first step it is the only place.
                    self._after.append(
                        functools.partial(_take_buffer, optimizer, block, buffer if is_first else None)
                    )
            if is_first:
                for i in run.members:
                    optimizer.state[params[i]][self.ROLE] = self.state_view(params[i], self.ROLE)
        _exchange(lists, new, members)
        if not momentum:
            buffers.clear()
        return result

    def _prepare(self, optimizer: torch.optim.Optimizer, param: torch.Tensor, buffer: torch.Tensor) -> None:
        if not self.is_flat(param, buffer, self.ROLE):
            flat = self.state_view(param, self.ROLE)
            local_of(flat).copy_(local_of(buffer))
            optimizer.state[param][self.ROLE] = flat


def _exchange(lists: tuple[Any, ...], new: list[list[Any]], members: set[int]) -> None:
    """Takes the members of runs out of ``lists`` and puts the runs in."""
    for old, added in zip(lists, new, strict=True):
        old[:] = [value for i, value in enumerate(old) if i not in members] + added


def _take_buffer(optimizer: torch.optim.Optimizer, block: torch.Tensor, into: torch.Tensor | None) -> None:
    buffer = optimizer.state.pop(block, {}).get(FlatSGD.ROLE)
    if into is not None:
        into.copy_(buffer)

"""The public functions: they wire the layers together and own nothing."""

from __future__ import annotations

import atexit
import contextlib
import functools
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerosharder.config import Config
from zerosharder.engine.build import Built, build_units, flatten_resident, move_rest, sync_buffers
from zerosharder.engine.compiler import hide_from_compiler
from zerosharder.engine.engine import Engine
from zerosharder.engine.groups import World, join_world
from zerosharder.engine.hooks import accept_full_state_dicts, install, wrap_method
from zerosharder.engine.materialize import has_meta, materialize_buffers
from zerosharder.engine.runtime import Runtime
from zerosharder.engine.stats import snapshot
from zerosharder.errors import DesyncError, ShardError, StateError
from zerosharder.observe.counters import Stats
from zerosharder.observe.events import write_trace
from zerosharder.observe.log import configure, log
from zerosharder.offload.memory import return_free_memory
from zerosharder.optim.adopt import Adoption
from zerosharder.partition.select import (
    ParamUse,
    UnitPlan,
    UnitsArgument,
    check_shardable,
    describe,
    find_params,
    select_units,
)

M = TypeVar("M", bound=nn.Module)
Opt = TypeVar("Opt", bound=torch.optim.Optimizer)

_ATTRIBUTE = "_zerosharder"
_live: weakref.WeakSet[Sharding] = weakref.WeakSet()


class Sharding:
    """What ``shard()`` leaves on a model: its engine and what became of its parameters."""

    def __init__(self, engine: Engine, built: Built, request: str) -> None:
        self.engine = engine
        owned = [(bucket, p) for unit in engine.units for bucket in unit.buckets for p in bucket.params]
        self.adoption = Adoption(built.replaced, owned)
        self.request = request  # settings and units; a second shard() with others is an error


@overload
def shard(
    model: M,
    optimizer: None = None,
    *,
    config: Config | None = None,
    mesh: DeviceMesh | None = None,
    units: UnitsArgument = None,
    ignored_params: Iterable[nn.Parameter] = (),
) -> M: ...


@overload
def shard(
    model: M,
    optimizer: Opt,
    *,
    config: Config | None = None,
    mesh: DeviceMesh | None = None,
    units: UnitsArgument = None,
    ignored_params: Iterable[nn.Parameter] = (),
) -> tuple[M, Opt]: ...


def shard(
    model: M,
    optimizer: Opt | None = None,
    *,
    config: Config | None = None,
    mesh: DeviceMesh | None = None,
    units: UnitsArgument = None,
    ignored_params: Iterable[nn.Parameter] = (),
) -> M | tuple[M, Opt]:
    """Shards ``model``'s parameters, gradients and optimizer state over all ranks (ZeRO-3), in place.

    Every rank calls it, before the first forward. The values of rank 0 win, as with DistributedDataParallel.

    Args:
        model: any module; classes, names and attribute access stay what they were. May be on the meta device.
        optimizer: any torch optimizer over parameters of ``model``; built before or after, passed now or in a
            second call.
        config: settings; fields not set there come from the environment (ZEROSHARDER_*, docs/settings.md).
        mesh: 1-D (shard) or 2-D (replicate, shard: HSDP); default: all ranks of the job in one dimension.
        units: what to gather together: classes, module names, or a predicate (name, module) -> bool. Default:
            repeated blocks, large leftovers, and the rest as one (partition/select.py).
        ignored_params: parameters to leave whole and unsynchronised on every rank.

    Returns:
        The same ``model``, or ``(model, optimizer)``.

    Raises:
        ShardError: a model, unit or parameter that cannot be sharded. ConfigError: a setting.
        OptimizerError: the optimizer. EnvironmentSetupError: an incomplete launcher environment.
        DesyncError: the ranks disagree about the model or the settings.

    Method: ZeRO stage 3 (Rajbhandari et al., 2020, arXiv 1910.02054); gathered units in persistent slots and a
    backward that replays the recorded forward are described in docs/design.md.
    """
    if not isinstance(model, nn.Module):
        raise ShardError(f"shard() takes a torch.nn.Module, got {type(model).__name__}")
    settings = Config.resolve(config)
    ignored = list(ignored_params)
    request = f"{settings} mesh={mesh} units={units!r} ignored={len(ignored)}"
    known = getattr(model, _ATTRIBUTE, None)
    if known is None:
        known = _shard_model(model, settings, mesh, units, ignored, request)
        model.__dict__[_ATTRIBUTE] = known
        model.__dict__["no_sync"] = functools.partial(no_sync, model)
    elif optimizer is None or (request != known.request and (config or mesh or units or ignored)):
        raise ShardError(
            f"{type(model).__name__} is already sharded. A second shard(model, optimizer) with the same settings "
            f"adopts an optimizer; it was sharded with: {known.request}; now: {request}"
        )
    if optimizer is None:
        return model
    known.adoption.adopt(optimizer)
    return model, optimizer


def _shard_model(
    model: nn.Module,
    config: Config,
    mesh: DeviceMesh | None,
    units: UnitsArgument,
    ignored: Sequence[nn.Parameter],
    request: str,
) -> Sharding:
    configure(config.log)
    uses = find_params(model, ignored)
    check_shardable(model, uses)
    inner = next(
        (name for name, m in model.named_modules() if m is not model and _ATTRIBUTE in m.__dict__), None
    )
    if inner is not None:
        raise ShardError(
            f"module {inner!r} of the model is already sharded by zerosharder; shard the whole model once"
        )
    plans = select_units(model, uses, units)
    world = join_world(config, mesh)
    if config.cpu_threads:
        torch.set_num_threads(config.cpu_threads)
    runtime = world.runtime(config)
    _check_agreement(uses, plans, config, runtime)
    on_meta = has_meta(model)
    casts = any(runtime.compute_dtype(use.param.dtype) != use.param.dtype for use in uses)
    if world.is_one and not casts:
        built = flatten_resident(plans, model, world.device)
    else:
        built = build_units(model, plans, runtime)
    if on_meta:
        materialize_buffers(model, world.device)
    move_rest(model, ignored, world.device)
    sync_buffers(model, runtime)
    return_free_memory()
    engine = Engine(model, built.units, runtime)
    install(engine)
    hide_from_compiler()
    accept_full_state_dicts(model, engine)
    sharding = Sharding(engine, built, request)
    _live.add(sharding)
    if config.trace:
        atexit.register(trace, config.trace)
    _announce(model, plans, world, runtime)
    return sharding


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Inside, backwards leave gradients on their rank; the first backward outside reduces their sum.

    Costs one whole gradient of the model on every rank, saves a reduction for each backward inside.
    """
    return _of(model).engine.no_sync()


@contextlib.contextmanager
def full_params(model: nn.Module, write: bool = False) -> Iterator[None]:
    """Inside, every parameter is whole on every rank; with ``write``, changes are taken over at the end.

    All ranks must enter and leave it. Forwards inside need no communication, so ranks may run different numbers of
    them (an evaluation on unequal data). With ``write`` each rank takes over its own rows of what it sees, so ranks
    must write the same values. Costs one whole copy of the weights on every rank.
    """
    with _of(model).engine.full_params(write):
        yield


def reset(model: nn.Module) -> None:
    """Brings a sharded model back to the state between two steps, after an exception left a forward or backward.

    All ranks must call it. Gradients, those of accumulated micro batches included, are dropped; weights and optimizer
    state stay.
    """
    _of(model).engine.reset()
    for param in model.parameters():  # a world of one leaves gradients to torch
        param.grad = None


def register_forward_method(model: nn.Module, name: str) -> None:
    """Lets ``model.name(...)`` (``generate``, ``encode``) use the parameters that ``model`` itself owns.

    Methods that only call the module or its blocks need no registration.
    """
    engine = _of(model).engine
    if engine.units:
        wrap_method(engine, engine.units[:1], model, name)
    elif not callable(getattr(model, name, None)):
        raise ShardError(f"{type(model).__name__} has no method {name!r} to register")


def stats(model: nn.Module) -> Stats:
    """A snapshot of this rank's counters and bytes."""
    return snapshot(model, _of(model).engine)


def trace(path: str | Path) -> None:
    """Writes what this rank's engines did so far to ``path``, for chrome://tracing and Perfetto.

    With more than one rank a dot and the rank are appended, unless ``path`` contains ``{rank}``.
    """
    engines = [s.engine for s in sorted(_live, key=lambda s: s.engine.runtime.number)]
    if not engines:
        raise StateError("no model is sharded, so there is nothing to trace")
    control = engines[0].runtime.control_group
    rank = control.rank() if control is not None else 0
    target = str(path) if control is None or "{rank}" in str(path) else f"{path}.{{rank}}"
    write_trace(target.replace("{rank}", str(rank)), rank, {e.model_name: e.runtime.log for e in engines})


def _of(model: nn.Module) -> Sharding:
    sharding = getattr(model, _ATTRIBUTE, None)
    if not isinstance(sharding, Sharding):
        raise StateError(f"{type(model).__name__} is not sharded; call zerosharder.shard(model) first")
    return sharding


def _check_agreement(
    uses: Sequence[ParamUse], plans: Sequence[UnitPlan], config: Config, runtime: Runtime
) -> None:
    """Raises DesyncError on every rank if ranks were given different models or settings."""
    group = runtime.control_group
    if group is None:
        return
    params = [f"{u.name} {tuple(u.param.shape)} {u.param.dtype} {u.param.requires_grad}" for u in uses]
    mine = {
        "settings": str(config),
        "units": str([plan.name for plan in plans]),
        "parameters": [zlib.crc32(line.encode()) for line in params],
    }
    everyone: list[dict[str, Any]] = [{}] * group.size()
    runtime.guarded("shard() of the model", "", lambda: dist.all_gather_object(everyone, mine, group=group))
    for rank, other in enumerate(everyone):
        if other == everyone[0]:
            continue
        for key in ("settings", "units"):
            if other[key] != everyone[0][key]:
                raise DesyncError(
                    f"rank {rank} shards with {key} {other[key]}, rank 0 with {everyone[0][key]}", (rank,)
                )
        ours, theirs = everyone[0]["parameters"], other["parameters"]
        pairs = enumerate(zip(ours, theirs, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
        here = params[at] if at < len(params) else "none"
        raise DesyncError(
            f"rank {rank} has {len(theirs)} parameters, rank 0 has {len(ours)}; the first that differs is number {at} "
            f"(on this rank: {here}): every rank must build the same model",
            (rank,),
        )


def _announce(model: nn.Module, plans: Sequence[UnitPlan], world: World, runtime: Runtime) -> None:
    if runtime.control_group is not None and runtime.control_group.rank() != 0:
        return
    scalars = sum(1 for plan in plans for use in plan.params if not use.param.shape)
    log.info(
        "%s on %s, %d-way sharded%s; units:\n%s",
        type(model).__name__,
        world.device,
        runtime.world,
        f", {world.mesh.size() // runtime.world} replicas" if runtime.replicate_group and world.mesh else "",
        describe(plans),
    )
    if scalars and runtime.world > 1:
        log.warning(
            "%d scalar parameters are replicated. torch's clip_grad_norm_(foreach=False) combines their norms "
            "wrongly; its default path is right",
            scalars,
        )

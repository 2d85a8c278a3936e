"""The public functions: they wire the layers together and own nothing."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerosharder.checkpoint import load as loading
from zerosharder.checkpoint import save as saving
from zerosharder.checkpoint.crew import crew_of
from zerosharder.config import Config
from zerosharder.config import settings as config_fields
from zerosharder.engine.agreement import Request
from zerosharder.engine.build import (
    Built,
    build_units,
    flatten_resident,
    move_rest,
    sync_buffers,
    values_of_rank_0,
)
from zerosharder.engine.compiler import hide_from_compiler
from zerosharder.engine.engine import Engine
from zerosharder.engine.groups import World, join_job, join_world
from zerosharder.engine.hooks import accept_full_state_dicts, install, wrap_method
from zerosharder.engine.materialize import has_meta, materialize_buffers
from zerosharder.engine.runtime import Runtime
from zerosharder.engine.stats import snapshot
from zerosharder.errors import ShardError, StateError
from zerosharder.observe.counters import Stats
from zerosharder.observe.events import write_trace
from zerosharder.observe.log import configure, log
from zerosharder.offload.memory import return_free_memory
from zerosharder.optim.adopt import Adoption, check_optimizer, describe_optimizer, parameter_names
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
# Settings that only concern the process itself may differ between ranks.
_OF_ALL_RANKS = [name for name in config_fields() if name not in ("cpu_threads", "trace", "log")]
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
    settings = Config.resolve(config)
    configure(settings.log)
    party = join_job(settings, mesh)
    ignored = list(ignored_params)
    request = f"{settings} mesh={mesh} units={units!r} ignored={len(ignored)}"

    def prepare() -> tuple[tuple[list[ParamUse], list[UnitPlan]], Request]:
        """All that can be refused is refused here, before anything is changed and before the ranks communicate."""
        known = _known(model)
        if known is None:
            uses, plans = _plan(model, units, ignored)
            names = parameter_names(model)
        elif optimizer is None or (request != known.request and (config or mesh or units or ignored)):
            raise ShardError(
                f"{type(model).__name__} is already sharded. A second shard(model, optimizer) with the same settings "
                f"adopts an optimizer; it was sharded with: {known.request}; now: {request}"
            )
        else:
            uses, plans, names = [], [], known.adoption.names(model)
        if optimizer is not None:
            check_optimizer(optimizer, names, is_sharded=party is not None)
        return (uses, plans), {
            "settings": [f"{name}={getattr(settings, name)}" for name in _OF_ALL_RANKS],
            "dimensions in mesh=": [str(size) for size in mesh.shape] if mesh is not None else [],
            "units": [plan.name for plan in plans],
            "parameters": [f"{u.name} {tuple(u.param.shape)} {u.param.dtype} {_trains(u)}" for u in uses],
            "entries for the optimizer": describe_optimizer(optimizer, names),
        }

    if party is None:
        (uses, plans), _ = prepare()
    else:
        uses, plans = party.agree("shard()", settings.timeout, prepare)
    known = _known(model)
    if known is None:
        world = join_world(settings, mesh, party)
        known = _shard_model(model, settings, world, uses, plans, ignored, request)
        model.__dict__[_ATTRIBUTE] = known
        model.__dict__["no_sync"] = functools.partial(no_sync, model)
    if optimizer is None:
        return model
    known.adoption.adopt(optimizer)
    return model, optimizer


def _plan(
    model: nn.Module, units: UnitsArgument, ignored: Sequence[nn.Parameter]
) -> tuple[list[ParamUse], list[UnitPlan]]:
    """The parameters of a model that is not sharded yet, and the units they go to."""
    if not isinstance(model, nn.Module):
        raise ShardError(f"shard() takes a torch.nn.Module, got {type(model).__name__}")
    inner = next((name for name, m in model.named_modules() if _ATTRIBUTE in m.__dict__), None)
    if inner is not None:
        raise ShardError(
            f"module {inner!r} of the model is already sharded by zerosharder; shard the whole model once"
        )
    uses = find_params(model, ignored)
    check_shardable(model, uses, ignored)
    return uses, select_units(model, uses, units)


def _shard_model(
    model: nn.Module,
    config: Config,
    world: World,
    uses: Sequence[ParamUse],
    plans: list[UnitPlan],
    ignored: Sequence[nn.Parameter],
    request: str,
) -> Sharding:
    if config.cpu_threads:
        torch.set_num_threads(config.cpu_threads)
    runtime = world.runtime(config)
    on_meta = has_meta(model)
    given = values_of_rank_0(model, plans, runtime) if not world.is_one else frozenset()
    casts = any(runtime.compute_dtype(use.param.dtype) != use.param.dtype for use in uses)
    if world.is_one and not casts:
        built = flatten_resident(plans, model, world.device)
    else:
        built = build_units(model, plans, runtime, given)
    if on_meta:
        materialize_buffers(model, world.device, given)
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


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    keep_last: int | None = None,
    **extra: Any,
) -> None:
    """Saves all that training needs to go on, as the folder ``path``. Every rank calls it and writes its shard.

    Weights as they are stored (fp32 masters), buffers, optimizer state and group settings by parameter name, and the
    random states of every rank. The folder appears complete or not at all; one of the same name is replaced then.

    Args:
        path: a folder on a file system that all ranks share.
        model, optimizer: what `shard` returned.
        keep_last: remove all but so many of the newest checkpoints beside ``path`` after this one is complete.
        extra: the same on every rank: objects with ``state_dict()`` (schedulers, a GradScaler, a data loader), and
            numbers, text, tensors, lists, tuples and dicts of such (step counters, the position in the data).

    Raises:
        CheckpointError: the disk failed, or a value cannot be saved. DesyncError: not every rank called, or an
            ``extra`` differs between ranks.
    """
    sharding = _of(model)
    _check_between_steps(sharding, "save()")
    if optimizer is not None:
        sharding.adoption.adopt(optimizer)
    saving.save(Path(path), model, optimizer, extra, crew_of(sharding.engine.runtime), keep_last)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **objects: Any,
) -> dict[str, Any]:
    """Loads what `save` wrote, at any number of ranks and on any mesh. Every rank calls it and reads its rows.

    Nothing is changed before all files have been verified and the model has been compared. No code that a file
    names is run.

    Args:
        path: the folder.
        model, optimizer: what `shard` returned; they keep their placement.
        objects: objects with ``load_state_dict()`` to restore, under the names they were saved with.

    Returns:
        What was given to `save` as ``extra``; of objects, their state dicts.

    Raises:
        CheckpointError: no checkpoint, a damaged one, one of a newer format or of another model.
        DesyncError: not every rank called.
    """
    sharding = _of(model)
    _check_between_steps(sharding, "load()")
    if optimizer is not None:
        sharding.adoption.adopt(optimizer)
    runtime = sharding.engine.runtime
    try:
        return loading.load(Path(path), model, optimizer, objects, crew_of(runtime))
    finally:
        runtime.shards_changed()


def _check_between_steps(sharding: Sharding, call: str) -> None:
    units = sharding.engine.units
    if any(param.is_installed_whole for unit in units for param in unit.params):
        raise StateError(f"{call} inside full_params(): leave it first")


def _known(model: nn.Module) -> Sharding | None:
    sharding = getattr(model, _ATTRIBUTE, None)
    return sharding if isinstance(sharding, Sharding) else None


def _of(model: nn.Module) -> Sharding:
    sharding = _known(model)
    if sharding is None:
        raise StateError(f"{type(model).__name__} is not sharded; call zerosharder.shard(model) first")
    return sharding


def _trains(use: ParamUse) -> str:
    return "trained" if use.param.requires_grad else "frozen"


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

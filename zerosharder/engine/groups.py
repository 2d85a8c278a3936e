"""The world a model is sharded over: device, mesh, process groups, and the watchdog that watches them.

Worlds are cached: every model of a job that is sharded over the same ranks shares groups and watchdog.
"""

from __future__ import annotations

import atexit
import itertools
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from zerosharder.config import Config, distributed_env
from zerosharder.engine.agreement import Party, forget_calls
from zerosharder.engine.collectives import Collectives, GroupCollectives, PairwiseExchange
from zerosharder.engine.runtime import DTYPES, Runtime
from zerosharder.engine.slots import SlotPool
from zerosharder.engine.watchdog import Watchdog
from zerosharder.errors import EnvironmentSetupError, ShardError


@dataclass
class World:
    """Groups of this rank. ``None`` groups mean a world of one there."""

    device: torch.device
    mesh: DeviceMesh | None
    shard: tuple[dist.ProcessGroup, dist.ProcessGroup] | None  # for gathers, for reductions
    replicate: dist.ProcessGroup | None
    control: dist.ProcessGroup | None
    watchdog: Watchdog | None
    shard_ranks: tuple[int, ...] = (0,)  # for each rank of the control group: which rows it holds

    @property
    def is_one(self) -> bool:
        """Whether there is nobody to share with."""
        return self.mesh is None

    def runtime(self, config: Config) -> Runtime:
        """A runtime for one model on this world."""
        pool = SlotPool(self.device)
        gather, reduce = self.shard if self.shard is not None else (None, None)
        collectives: Collectives
        if self.device.type == "cuda" and gather is not None and reduce is not None:
            collectives = GroupCollectives(gather, reduce, DTYPES[config.reduce_dtype])
        else:
            collectives = PairwiseExchange(gather, reduce, pool)
        outer: tuple[Placement, ...] = (Replicate(),) if self.mesh is not None and self.mesh.ndim == 2 else ()
        return Runtime(
            config=config,
            device=self.device,
            mesh=self.mesh,
            placements=(*outer, Shard(0)),
            replicated=(*outer, Replicate()),
            collectives=collectives,
            pool=pool,
            replicate_group=self.replicate,
            control_group=self.control,
            number=next(_numbers),
            shard_ranks=self.shard_ranks,
            watchdog=self.watchdog,
        )


_numbers = itertools.count()
_worlds: dict[object, World] = {}
_default_group: object = None


def join_job(config: Config, mesh: DeviceMesh | None) -> Party | None:
    """The ranks that shard together: those of ``mesh``, or all of the job. None if this rank is alone.

    Initialises the job's process group if the launcher left that to us.

    Raises:
        EnvironmentSetupError: started by a launcher with a variable missing, or a mesh without a process group.
        ShardError: a mesh of more than two dimensions, or one that this rank is not part of.
    """
    global _default_group
    environment = None if dist.is_initialized() else distributed_env()
    if environment is not None:
        with_cuda = torch.cuda.is_available()
        if with_cuda:
            torch.cuda.set_device(environment.local_rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if with_cuda else "gloo",
            timeout=timedelta(seconds=config.timeout),
            device_id=torch.device("cuda", environment.local_rank) if with_cuda else None,
        )
        atexit.register(_leave)
    if not dist.is_initialized():
        if mesh is not None:
            raise EnvironmentSetupError("mesh= needs a process group; start the script with torchrun")
        return None
    if _default_group is not dist.group.WORLD:
        _worlds.clear()
        forget_calls()
        _default_group = dist.group.WORLD
    if mesh is None:
        ranks = tuple(range(dist.get_world_size()))
    else:
        _check_mesh(mesh)
        ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    if len(ranks) == 1:
        return None
    return Party(dist.distributed_c10d._get_default_store(), dist.get_rank(), ranks)


def join_world(config: Config, mesh: DeviceMesh | None, party: Party | None) -> World:
    """The world of ``party``, which agreed on sharding over ``mesh`` (None: one dimension)."""
    if not dist.is_initialized():
        return World(_local_device(), None, None, None, None, None)
    device = _group_device()
    if party is None:
        return World(device, None, None, None, None, None)
    if mesh is None:
        mesh = init_device_mesh(device.type, (len(party.ranks),))
    key = (mesh, config.timeout)
    if key not in _worlds:
        _worlds[key] = _make_world(config, mesh, device, party)
    return _worlds[key]


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim not in (1, 2):
        names = mesh.mesh_dim_names or ""
        raise ShardError(f"mesh= has {mesh.ndim} dimensions {names}: give (shard,) or (replicate, shard)")
    if mesh.get_coordinate() is None:
        raise ShardError(
            f"rank {dist.get_rank()} is not part of mesh= {mesh}; call shard() on its ranks only"
        )


def _make_world(config: Config, mesh: DeviceMesh, device: torch.device, party: Party) -> World:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # _check_mesh
    ranks = mesh.mesh if mesh.ndim == 2 else mesh.mesh.unsqueeze(0)
    row, column = (coordinate[0], coordinate[1]) if mesh.ndim == 2 else (0, coordinate[0])
    timeout = timedelta(seconds=config.timeout)

    def group(members: list[int], backend: str | None = None) -> dist.ProcessGroup:
        made: dist.ProcessGroup = dist.new_group(
            members, timeout=timeout, backend=backend, use_local_synchronization=True
        )
        return made

    shard_ranks, replicas = ranks[row].tolist(), ranks[:, column].tolist()
    control = group(list(party.ranks), "gloo")
    shard = (group(shard_ranks), group(shard_ranks)) if len(shard_ranks) > 1 else None
    replicate = group(replicas) if len(replicas) > 1 else None
    columns = {int(member): index % ranks.shape[1] for index, member in enumerate(ranks.flatten().tolist())}
    # The name must be this mesh's on all of its ranks, and on no other's.
    name = f"zerosharder/{'-'.join(map(str, ranks.flatten().tolist()))}/{config.timeout}"
    watchdog = Watchdog(dist.PrefixStore(name, party.store), party.rank, list(party.ranks))
    return World(
        device, mesh, shard, replicate, control, watchdog, tuple(columns[member] for member in party.ranks)
    )


def _local_device() -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def _group_device() -> torch.device:
    """The device the job's process group serves: never a guess from what the machine has."""
    backend = dist.get_backend_config()
    if "cuda" in backend and "nccl" in backend and torch.cuda.is_available():
        return _local_device()
    return torch.device("cpu")


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()

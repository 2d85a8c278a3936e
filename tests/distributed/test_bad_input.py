"""Bad input gets an exception of zerosharder.errors that names the thing, the value and the fix, on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from harness import distributed, in_fresh_process
from parity import assert_same, full_params, reference_ddp
from tiny import features, mlp, rank
from torch import nn

import zerosharder as zs
from zerosharder.errors import (
    ConfigError,
    DesyncError,
    EnvironmentSetupError,
    OptimizerError,
    ShardError,
    ZerosharderError,
)

SHORT = zs.Config(timeout=2)


def _refused(call: Callable[[], Any], kind: type[ZerosharderError], *parts: str) -> str:
    """``call`` raises ``kind`` with all ``parts`` in its message, on every rank."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    text = str(caught.value)
    for part in parts:
        assert part in text, f"{part!r} is not in: {text}"
    everyone: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(everyone, True)  # nobody hangs in shard()
    assert all(everyone)
    return text


def _works(model: nn.Module) -> None:
    model(features(0)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# -- the model --


@pytest.mark.parametrize(
    "units, parts",
    [
        (["layers.9"], ["'layers.9'", "no module", "layers.0"]),
        (["Layr"], ["'Layr'", "no module"]),
        ([nn.GRU], ["GRU", "no module", "Layer", "Linear"]),
        ([], ["empty", "leave it out"]),
        (3, ["3", "classes, module names, or a predicate"]),
        (["layers.0", 5], ["5", "classes and names"]),
    ],
    ids=str,
)
@distributed(world=2)
def test_wrong_units(units: Any, parts: list[str]) -> None:
    model = mlp()
    _refused(lambda: zs.shard(model, units=units), ShardError, "units=", *parts)
    zs.shard(model)  # nothing was changed
    _works(model)


@distributed(world=2)
def test_a_predicate_that_chooses_nothing() -> None:
    _refused(lambda: zs.shard(mlp(), units=lambda name, module: False), ShardError, "predicate", "no module")


@distributed(world=2)
def test_not_a_module() -> None:
    _refused(lambda: zs.shard([mlp()]), ShardError, "torch.nn.Module", "list")
    _refused(lambda: zs.shard(mlp().parameters()), ShardError, "torch.nn.Module", "generator")


@distributed(world=2)
def test_a_model_under_ddp() -> None:
    wrapped = reference_ddp(mlp())
    text = "DistributedDataParallel; shard the module inside"
    _refused(lambda: zs.shard(wrapped), ShardError, "the model", text)
    _refused(lambda: zs.shard(nn.Sequential(nn.Linear(2, 2), wrapped)), ShardError, "module '1'", text)
    zs.shard(wrapped.module)  # the fix that the message names


@distributed(world=2)
def test_a_model_under_fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    _refused(lambda: zs.shard(wrapped), ShardError, "FullyShardedDataParallel; shard the module inside")


@distributed(world=2)
def test_a_model_under_fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    whole, part = mlp(), mlp()
    fully_shard(whole)
    _refused(lambda: zs.shard(whole), ShardError, "the model", "fully_shard (FSDP2)", "drop one")
    fully_shard(part.layers[1])
    _refused(lambda: zs.shard(part), ShardError, "module 'layers.1'", "fully_shard (FSDP2)", "drop one")


@distributed(world=2)
def test_a_model_whose_parameters_are_dtensors() -> None:
    """Tensor parallelism over another mesh dimension."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    model = mlp()
    mesh = init_device_mesh("cpu", (2,))
    model.project.weight = nn.Parameter(distribute_tensor(model.project.weight.detach(), mesh, [Replicate()]))
    _refused(lambda: zs.shard(model), ShardError, "'project.weight'", "DTensor", "ignored_params=")


@distributed(world=2)
def test_sharded_twice() -> None:
    model = zs.shard(mlp(), config=zs.Config(prefetch=0))
    _refused(lambda: zs.shard(model), ShardError, "MLP is already sharded", "prefetch=0")
    optimizer = tiny.sgd(model)
    other = zs.Config(prefetch=7)
    text = _refused(lambda: zs.shard(model, optimizer, config=other), ShardError, "already sharded")
    assert "prefetch=0" in text and "prefetch=7" in text, "both settings"
    _refused(lambda: zs.shard(model, optimizer, units=["Layer"]), ShardError, "already sharded", "'Layer'")
    assert zs.shard(model, optimizer) == (model, optimizer)
    assert zs.shard(model, optimizer, config=zs.Config(prefetch=0)) == (model, optimizer)
    _works(model)


@distributed(world=2)
def test_a_part_of_the_model_is_sharded_already() -> None:
    model = mlp()
    zs.shard(model.layers[0])
    _refused(lambda: zs.shard(model), ShardError, "module 'layers.0'", "already sharded", "whole model once")


@distributed(world=2)
def test_an_optimizer_added_later_trains() -> None:
    plain, model = mlp(), zs.shard(mlp())
    optimizer, reference = tiny.sgd(model), tiny.sgd(plain)
    zs.shard(model, optimizer)
    wrapped = reference_ddp(plain)
    for step in range(2):
        for m, o in ((model, optimizer), (wrapped, reference)):
            m(features(step)).pow(2).sum().backward()
            o.step()
            o.zero_grad()
    assert_same(full_params(model), full_params(plain))


@distributed(world=2)
def test_a_parameter_that_is_no_leaf() -> None:
    model = mlp()
    model.layers[1].linear._parameters["weight"] = torch.ones(8, 8, requires_grad=True) * 2
    _refused(lambda: zs.shard(model), ShardError, "'layers.1.linear.weight'", "not a leaf", "detach()")


@distributed(world=2)
def test_weight_norm_of_old() -> None:
    """It keeps a plain attribute that is computed anew in each forward; nothing is wrong with that."""
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    zs.shard(model)
    _works(model)


@distributed(world=2)
def test_a_model_without_parameters() -> None:
    _refused(lambda: zs.shard(nn.Sequential(nn.ReLU())), ShardError, "Sequential has no parameters")
    model = mlp()
    everything = list(model.parameters())
    _refused(
        lambda: zs.shard(model, ignored_params=everything), ShardError, "MLP has no parameters", "ignored"
    )


@distributed(world=2)
def test_ignored_parameters_that_are_not_the_models() -> None:
    model = mlp()
    _refused(
        lambda: zs.shard(model, ignored_params=[nn.Parameter(torch.ones(3))]),
        ShardError,
        "ignored_params=",
        "(3,)",
    )


@distributed(world=2)
def test_a_sparse_parameter() -> None:
    model = mlp()
    model.project.weight = nn.Parameter(torch.eye(8).to_sparse())
    _refused(lambda: zs.shard(model), ShardError, "'project.weight'", "sparse", "dense")


@distributed(world=2)
def test_an_uninitialised_lazy_module() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8))
    _refused(lambda: zs.shard(model), ShardError, "'0.weight'", "forward")


# -- the optimizer --


@distributed(world=2)
def test_an_optimizer_over_foreign_parameters() -> None:
    model, other = mlp(), nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(other.parameters())
    _refused(
        lambda: zs.shard(model, optimizer),
        OptimizerError,
        "AdamW holds none of the model's parameters",
        "(5, 3)",
        "model.parameters()",
    )


@distributed(world=2)
def test_not_an_optimizer() -> None:
    for wrong in (mlp().parameters(), "adamw", torch.optim.AdamW):
        _refused(lambda wrong=wrong: zs.shard(mlp(), wrong), OptimizerError, "torch.optim.Optimizer")


@distributed(world=2)
def test_an_optimizer_that_is_refused_leaves_the_model_as_it_was() -> None:
    """ShardError and OptimizerError come before anything is changed, so the call can be repeated."""
    model = mlp()
    before = {n: p for n, p in model.named_parameters()}
    with pytest.raises(OptimizerError):
        zs.shard(model, torch.optim.AdamW(nn.Linear(3, 5).parameters()))
    assert all(p is before[n] for n, p in model.named_parameters())
    zs.shard(model, tiny.adamw(model))
    _works(model)


# -- settings and environment --


@distributed(world=2, env={"ZEROSHARDER_PREFECTH": "1MiB"})
def test_an_unknown_setting() -> None:
    _refused(lambda: zs.shard(mlp()), ConfigError, "ZEROSHARDER_PREFECTH", "1MiB", "ZEROSHARDER_PREFETCH")


@distributed(world=2, env={"ZEROSHARDER_RESHARD": "sometimes"})
def test_an_unknown_value() -> None:
    _refused(
        lambda: zs.shard(mlp()), ConfigError, "ZEROSHARDER_RESHARD", "sometimes", "auto, always or never"
    )


def test_a_missing_variable_of_the_process_group():
    done = in_fresh_process(
        """
        import os, torch, zerosharder as zs
        from zerosharder.errors import EnvironmentSetupError
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        values = dict(zip(names, ("0", "2", "0", "2", "127.0.0.1", "29400")))
        for missing in names:
            os.environ.update(values)
            del os.environ[missing]
            try:
                zs.shard(torch.nn.Linear(2, 2))
            except EnvironmentSetupError as error:
                print("refused:", error)
        """
    )
    assert done.returncode == 0, done.stderr
    for missing in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        assert re.search(rf"refused: {missing} not set.*torchrun.*unset", done.stdout), done.stdout


def test_a_mesh_whose_process_group_is_gone(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()
    with pytest.raises(EnvironmentSetupError, match=r"mesh=.*torchrun"):
        zs.shard(mlp(), mesh=mesh)


# -- ranks that disagree --


def _disagree(call: Callable[[], Any], *parts: str) -> None:
    """Every rank raises a DesyncError that names rank 1."""
    text = _refused(call, DesyncError, "rank 1", *parts)
    with pytest.raises(DesyncError) as caught:
        call()
    assert caught.value.culprits == (1,), text


@distributed(world=2)
def test_ranks_with_different_models() -> None:
    width = 8 if rank() == 0 else 10
    _disagree(lambda: zs.shard(mlp(width), units=["Layer"]), "layers.0.linear.weight", "same model")


@distributed(world=2)
def test_ranks_with_different_numbers_of_parameters() -> None:
    _disagree(lambda: zs.shard(nn.Linear(4, 4, bias=rank() == 0)), "1 parameters", "2", "same model")


@distributed(world=2)
def test_ranks_with_different_dtypes() -> None:
    _disagree(lambda: zs.shard(mlp().to(torch.float64 if rank() else torch.float32)), "same model")


@distributed(world=2)
def test_ranks_with_different_frozen_parameters() -> None:
    def build() -> nn.Module:
        model = mlp()
        model.project.weight.requires_grad_(rank() == 0)
        return model

    _disagree(lambda: zs.shard(build()), "project.weight", "same model")


@distributed(world=2)
def test_ranks_with_different_settings() -> None:
    _disagree(lambda: zs.shard(mlp(), config=zs.Config(prefetch=rank())), "prefetch=1", "prefetch=0")


@distributed(world=2)
def test_ranks_with_different_units() -> None:
    _disagree(lambda: zs.shard(mlp(), units=["Layer"] if rank() else ["MLP", "layers.0"][1:]), "units")


@pytest.mark.parametrize("kind", ["class", "group", "order", "lr", "none"])
@distributed(world=2)
def test_ranks_with_different_optimizers(kind: str) -> None:
    """Different steps on the shards of one parameter: the model would rot without a word."""
    model = mlp()
    params = list(model.parameters())
    odd = rank() == 1
    optimizer: torch.optim.Optimizer | None
    if kind == "class":
        optimizer = torch.optim.SGD(params, lr=0.1) if odd else torch.optim.AdamW(params, lr=0.1)
    elif kind == "group":
        optimizer = torch.optim.AdamW(params[1:] if odd else params, lr=0.1)
    elif kind == "order":
        optimizer = torch.optim.AdamW(params[::-1] if odd else params, lr=0.1)
    elif kind == "lr":
        optimizer = torch.optim.AdamW(params, lr=0.2 if odd else 0.1)
    else:
        optimizer = None if odd else torch.optim.AdamW(params, lr=0.1)
    with pytest.raises(DesyncError) as caught:
        zs.shard(model, optimizer)
    assert "optimizer" in str(caught.value) and caught.value.culprits == (1,), caught.value


@distributed(world=2)
def test_shard_refused_on_one_rank_only() -> None:
    """The other waits in shard() for a rank that raised; it is told which."""
    if rank() == 1:
        with pytest.raises(ShardError, match="layers.9"):
            zs.shard(mlp(), units=["layers.9"], config=SHORT)
        dist.barrier()
        return
    with pytest.raises(DesyncError) as caught:
        zs.shard(mlp(), config=SHORT)
    assert caught.value.culprits == (1,) and "rank 1" in str(caught.value)
    dist.barrier()


@distributed(world=2, timeout=30, expect_pool_loss=True)  # the ranks have counted different numbers of calls
def test_shard_called_by_one_rank_only() -> None:
    if rank() == 1:
        dist.barrier()
        return
    with pytest.raises(DesyncError) as caught:
        zs.shard(mlp(), config=SHORT)
    assert caught.value.culprits == (1,) and "shard()" in str(caught.value)
    dist.barrier()

"""Group R of shared/cases.md: contexts that are always valid, settings that act or raise, errors that arrive."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import distributed, in_fresh_process
from parity import assert_same, full_grads
from tiny import features, mlp, rank
from torch import Tensor, nn

import zerosharder as zs
from zerosharder.config import RESERVED_VARIABLES, settings
from zerosharder.errors import ConfigError, DesyncError, ShardError
from zerosharder.offload.memory import host_buffer


def _engine(model: nn.Module) -> Any:
    return model.__dict__["_zerosharder"].engine


# -- R1: accumulation as trainers write it --


def _plain_sum(micro: int) -> dict[str, Tensor]:
    model = zs.shard(mlp())
    for step in range(micro):
        (model(features(step)).pow(2).mean() / micro).backward()
    return full_grads(model)


def _accelerate(model: nn.Module, sync: bool) -> contextlib.AbstractContextManager[None]:
    """What Hugging Face's accelerate does in ``accumulate``: the model's own ``no_sync`` if it has one."""
    return contextlib.nullcontext() if sync else getattr(model, "no_sync", contextlib.nullcontext)()


LOOPS: dict[str, Callable[[nn.Module, bool], contextlib.AbstractContextManager[None]]] = {
    "accelerate": _accelerate,
    "function": lambda model, sync: contextlib.nullcontext() if sync else zs.no_sync(model),
    "never": lambda model, sync: contextlib.nullcontext(),
}


@pytest.mark.parametrize("reshard", ["auto", "always", "never"])
@pytest.mark.parametrize("loop", list(LOOPS))
@distributed(world=2)
def test_r1_accumulation_loops(loop: str, reshard: str) -> None:
    micro = 3
    model = zs.shard(mlp(), config=zs.Config(reshard=reshard))
    for step in range(micro):
        with LOOPS[loop](model, step == micro - 1):
            (model(features(step)).pow(2).mean() / micro).backward()
    assert_same(full_grads(model), _plain_sum(micro), rtol=1e-6)


@distributed(world=2)
def test_r1_no_sync_nests_and_ends_with_an_exception() -> None:
    model = zs.shard(mlp())
    with model.no_sync():
        with zs.no_sync(model):
            model(features(0)).pow(2).mean().backward()
        model(features(1)).pow(2).mean().backward()
        assert zs.stats(model).reduces == 0, "the inner end must not end the outer one"
        assert all(p.grad is None for p in model.parameters())
    with pytest.raises(KeyError), model.no_sync():
        raise KeyError
    model(features(2)).pow(2).mean().backward()
    assert zs.stats(model).reduces > 0
    expected = {n: g * 3 for n, g in _plain_sum(3).items()}
    assert_same(full_grads(model), expected, rtol=1e-6)


@distributed(world=2)
def test_r1_no_sync_without_a_backward_or_around_evaluation() -> None:
    model = zs.shard(mlp())
    with model.no_sync():
        pass
    with model.no_sync(), torch.no_grad():
        model(features(0))
    model(features(0)).pow(2).mean().backward()
    assert_same(full_grads(model), _plain_sum(1))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_r1_in_a_world_of_one(dtype):
    """The same script runs on a laptop."""
    model = zs.shard(mlp(), config=zs.Config(param_dtype=dtype))
    with model.no_sync(), zs.no_sync(model):
        model(features(0)).float().sum().backward()
    model(features(1)).float().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


# -- R2: a setting acts, or it is refused --


ACTS: dict[str, Any] = {
    "offload_optimizer": None,  # only its default can be honoured; everything else is refused, see below
    "offload_params": None,
    "offload_activations": None,
    "param_dtype": "bf16",
    "reduce_dtype": "bf16",
    "reshard": "never",
    "prefetch": 0,
    "cpu_threads": 2,
    "timeout": 7.0,
    "trace": "events.json",
    "log": "error",
}


def test_r2_every_setting_is_looked_at_here():
    assert ACTS.keys() == settings().keys()


def _param_dtype(model: nn.Module) -> bool:
    return model(features(0)).dtype is torch.bfloat16


def _reduce_dtype(model: nn.Module) -> bool:
    model(features(0)).sum().backward()
    other = zs.shard(mlp())
    other(features(0)).sum().backward()
    mine, theirs = zs.stats(model).bytes_received["reduce"], zs.stats(other).bytes_received["reduce"]
    return mine <= 0.55 * theirs


def _reshard(model: nn.Module) -> bool:
    model(features(0)).sum().backward()
    return zs.stats(model).gathers == len(_engine(model).units)  # none is gathered a second time


def _prefetch(model: nn.Module) -> bool:
    other = zs.shard(mlp())
    for step in range(3):
        for each in (model, other):
            each(features(step)).sum().backward()
    return zs.stats(model).prefetched == 0 < zs.stats(other).prefetched


def _cpu_threads(model: nn.Module) -> bool:
    return torch.get_num_threads() == 2


def _timeout(model: nn.Module) -> bool:
    backend = _engine(model).runtime.control_group._get_backend(torch.device("cpu"))
    return backend.options._timeout.total_seconds() == 7.0


def _log(model: nn.Module) -> bool:
    return logging.getLogger("zerosharder").level == logging.ERROR


@pytest.mark.parametrize(
    "name", [name for name, value in ACTS.items() if value is not None and name != "trace"]
)
@distributed(world=2)
def test_r2_a_setting_that_is_accepted_acts(name: str) -> None:
    model = zs.shard(mlp(), config=zs.Config(**{name: ACTS[name]}))
    assert globals()[f"_{name}"](model), name


def test_r2_trace_is_written_at_exit(tmp_path):
    done = in_fresh_process(
        """
        import torch, zerosharder as zs
        model = zs.shard(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
        model(torch.ones(1, 4)).sum().backward()
        """,
        nproc=2,
        env={"ZEROSHARDER_TRACE": str(tmp_path / "events.{rank}.json")},
    )
    assert done.returncode == 0, done.stderr
    for r in (0, 1):
        events = json.loads((tmp_path / f"events.{r}.json").read_text())["traceEvents"]
        assert {"gather", "wait", "reduce", "free"} <= {e.get("cat") for e in events}
        assert {e["pid"] for e in events if "pid" in e} == {r}


@pytest.mark.parametrize("value", ["cpu", "nvme", "auto"])
@pytest.mark.parametrize("name", ["offload_optimizer", "offload_params", "offload_activations"])
def test_r2_tiers_that_do_not_exist_yet_are_refused(name, value, monkeypatch):
    with pytest.raises(ConfigError) as caught:
        zs.Config(**{name: value})
    assert name in str(caught.value) and value in str(caught.value)
    monkeypatch.setenv(f"ZEROSHARDER_{name.upper()}", value)
    with pytest.raises(ConfigError, match=f"ZEROSHARDER_{name.upper()}"):
        zs.shard(mlp())


@pytest.mark.parametrize("name", list(RESERVED_VARIABLES))
def test_r2_reserved_variables_are_refused_when_set(name, monkeypatch):
    monkeypatch.setenv(name, "/mnt/a" if name.endswith("PATH") else "1")
    with pytest.raises(ConfigError, match=name):
        zs.shard(mlp())


@distributed(world=2)
def test_r2_a_mesh_of_three_dimensions_is_refused_on_every_rank() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ShardError, match="3 dimensions"):
        zs.shard(mlp(), mesh=mesh)


# -- R3: names and values --


@distributed(world=2, env={"ZEROSHARDER_RESHRAD": "never"})
def test_r3_a_misspelt_variable_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"ZEROSHARDER_RESHRAD.*Did you mean ZEROSHARDER_RESHARD"):
        zs.shard(mlp())


@distributed(world=2, env={"zerosharder_reshard": "never"})
def test_r3_a_lower_case_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"zerosharder_reshard.*ZEROSHARDER_RESHARD"):
        zs.shard(mlp())


@pytest.mark.parametrize("text", ["NEVER", " never ", "Never"])
@distributed(world=2)
def test_r3_case_and_blanks_do_not_matter(text: str) -> None:
    import os

    os.environ["ZEROSHARDER_RESHARD"] = text  # the harness puts the environment back
    model = zs.shard(mlp())
    assert _engine(model).runtime.config.reshard == "never"


@pytest.mark.parametrize(
    "name, value",
    [
        ("RESHARD", "sometimes"),
        ("PREFETCH", "lots"),
        ("PREFETCH", "-1"),
        ("PARAM_DTYPE", "fp8"),
        ("TIMEOUT", "0"),
        ("TIMEOUT", "soon"),
        ("CPU_THREADS", "two"),
        ("LOG", "loud"),
    ],
)
def test_r3_a_value_that_means_nothing_is_refused_with_what_is_accepted(name, value, monkeypatch):
    monkeypatch.setenv(f"ZEROSHARDER_{name}", value)
    with pytest.raises(ConfigError) as caught:
        zs.shard(mlp())
    text = str(caught.value)
    assert f"ZEROSHARDER_{name}" in text and repr(value) in text
    assert "Accepted" in text or "accepted" in text


def test_r3_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="reshrad"):
        zs.Config(reshrad="never")
    with pytest.raises(ConfigError, match=r"config= must be a zerosharder\.Config, not dict"):
        zs.shard(mlp(), config={"reshard": "never"})


@distributed(world=2, env={"ZEROSHARDER_RESHARD": "always", "ZEROSHARDER_PREFETCH": "1MiB"})
def test_r3_the_config_wins_over_the_environment_field_by_field() -> None:
    found = _engine(zs.shard(mlp(), config=zs.Config(reshard="never"))).runtime.config
    assert (found.reshard, found.prefetch) == ("never", 1 << 20)
    assert dataclasses.asdict(found)["param_dtype"] == "fp32"


# -- R5: errors of the layers below --


def test_r5_the_kernels_refusal_has_errno_and_size():
    with pytest.raises(OSError) as caught:
        host_buffer(1 << 62)
    assert caught.value.errno == errno.ENOMEM and str(1 << 62) in str(caught.value)


@distributed(world=2, expect_pool_loss=True)
def test_r5_a_transport_error_names_operation_and_unit() -> None:
    model = zs.shard(mlp(), config=zs.Config(timeout=2))
    if rank() == 1:
        dist.barrier()  # somewhere else
        return
    with pytest.raises(DesyncError) as caught:
        model(features(0))
    text = str(caught.value)
    assert "gather of unit" in text and "rank 1" in text and caught.value.culprits == (1,)
    assert caught.value.__cause__ is not None, "the transport's own error is kept"
    dist.barrier()


def test_r5_a_trace_that_cannot_be_written_says_where(tmp_path):
    model = zs.shard(nn.Linear(2, 2), config=zs.Config(param_dtype="bf16"))
    model(torch.ones(1, 2))
    target = Path(tmp_path) / "no" / "such" / "folder.json"
    with pytest.raises(OSError) as caught:
        zs.trace(target)
    assert caught.value.errno == errno.ENOENT and str(target) in str(caught.value)

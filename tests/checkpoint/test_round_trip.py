"""Save and load: the same bits, at the same and at other numbers of ranks."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy
import pytest
import tiny
import torch
from harness import distributed, run_distributed
from parity import assert_same, full_params
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

import zerosharder as zs


def _build(
    seed: int, optimizer: str = "adamw", dtype: str = "fp32"
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = tiny.GPT()
    return zs.shard(
        model, tiny.OPTIMIZERS[optimizer](model.parameters()), config=zs.Config(param_dtype=dtype)
    )


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            found[f"{name}/{key}"] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
    return found


def _noisy_loss(model: nn.Module, step: int) -> torch.Tensor:
    """Draws from all three generators, so losses show whether their states came back."""
    factor = 1 + torch.rand(()) + random.random() + float(numpy.random.rand())
    return tiny.gpt_loss(model, step) * factor


@pytest.mark.parametrize("optimizer", ["adamw", "sgd_momentum"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@distributed(world=(1, 2, 4))
def test_eight_steps_are_four_save_load_and_four(tmp_path: Path, optimizer: str, dtype: str) -> None:
    model, its = _build(1, optimizer, dtype)
    scheduler = LambdaLR(its, lambda step: 1 / (1 + step))
    tiny.train(model, its, 4, _noisy_loss)
    scheduler.step()
    zs.save(tmp_path / "c", model, its, scheduler=scheduler, step=4, where=(1, "a"))
    expected = tiny.train(model, its, 4, _noisy_loss, first=4)

    other, loaded = _build(2, optimizer, dtype)
    fresh = LambdaLR(loaded, lambda step: 1 / (1 + step))
    extra = zs.load(tmp_path / "c", other, loaded, scheduler=fresh)
    assert (extra["step"], extra["where"]) == (4, (1, "a"))
    assert fresh.get_last_lr() == [group["lr"] for group in loaded.param_groups]
    assert_same(tiny.train(other, loaded, 4, _noisy_loss, first=4), expected, what="losses")
    assert_same(full_params(other), full_params(model), what="weights")
    assert_same(_moments(other, loaded), _moments(model, its), what="moments")


def _save_for_others(folder: Path) -> dict[str, torch.Tensor]:
    model, optimizer = _build(1)
    tiny.train(model, optimizer, 3)
    zs.save(folder, model, optimizer)
    return full_params(model) | _moments(model, optimizer)


def _load_and_compare(folder: Path) -> dict[str, torch.Tensor]:
    model, optimizer = _build(2)
    zs.load(folder, model, optimizer)
    return full_params(model) | _moments(model, optimizer)


@pytest.mark.parametrize("worlds", [(4, 1), (4, 2), (4, 3), (1, 4), (3, 2)])
def test_another_number_of_ranks_has_the_same_bits(tmp_path: Path, worlds: tuple[int, int]) -> None:
    saved = run_distributed(_save_for_others, worlds[0], {"folder": tmp_path / "c"})
    loaded = run_distributed(_load_and_compare, worlds[1], {"folder": tmp_path / "c"})
    for state in loaded:
        assert_same(state, saved[0])


@distributed(world=2)
def test_damaged_and_foreign_folders_are_refused_everywhere(tmp_path: Path) -> None:
    model, optimizer = _build(1)
    tiny.train(model, optimizer, 1)
    for step in (9, 10):
        zs.save(tmp_path / f"step-{step}", model, optimizer)
    assert zs.latest(tmp_path) == tmp_path / "step-10"
    before = full_params(model)
    torch.distributed.barrier()
    victim = tmp_path / "step-10" / "rank-00001.safetensors"
    if torch.distributed.get_rank() == 0:
        raw = bytearray(victim.read_bytes())
        raw[-1] ^= 1
        victim.write_bytes(raw)
    torch.distributed.barrier()
    assert zs.latest(tmp_path) == tmp_path / "step-9"
    with pytest.raises(zs.errors.CheckpointError, match="checksum"):
        zs.load(tmp_path / "step-10", model, optimizer)
    with pytest.raises(zs.errors.CheckpointError, match="no checkpoint"):
        zs.load(tmp_path, model, optimizer)
    foreign = zs.shard(tiny.mlp())
    with pytest.raises(zs.errors.CheckpointError, match="of another model"):
        zs.load(tmp_path / "step-9", foreign)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(tmp_path / "step-10")
    torch.distributed.barrier()
    zs.load(tmp_path / "step-9", model, optimizer)
    assert_same(full_params(model), before)


@distributed(world=2)
def test_a_save_replaces_the_one_before_and_prunes(tmp_path: Path) -> None:
    model, optimizer = _build(1)
    for step in range(4):
        zs.save(tmp_path / f"step-{step}", model, optimizer, keep_last=2, step=step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2", "step-3"]
    torch.distributed.barrier()
    zs.save(tmp_path / "step-3", model, optimizer, step=30)
    assert zs.load(tmp_path / "step-3", model, optimizer) == {"step": 30}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2", "step-3"]


@distributed(world=2)
def test_what_a_checkpoint_cannot_hold_is_named(tmp_path: Path) -> None:
    model, optimizer = _build(1)
    with pytest.raises(zs.errors.CheckpointError, match="place.*file.*object"):
        zs.save(tmp_path / "c", model, optimizer, place={"file": object()})
    with pytest.raises(zs.errors.DesyncError, match="place"):
        zs.save(tmp_path / "c", model, optimizer, place=torch.distributed.get_rank())
    assert not list(tmp_path.iterdir())


@distributed(world=2)
def test_what_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    """Other tools write a manifest.json too, and a save that replaces a folder removes what was in it."""
    model, optimizer = _build(1)
    other = tmp_path / "site-9"
    if torch.distributed.get_rank() == 0:
        other.mkdir()
        (other / "manifest.json").write_text('{"name": "site"}')
    torch.distributed.barrier()
    zs.save(tmp_path / "step-1", model, optimizer, keep_last=1)
    assert zs.latest(tmp_path) == tmp_path / "step-1"
    with pytest.raises(zs.errors.CheckpointError, match="site-9 exists and is no checkpoint"):
        zs.save(other, model, optimizer)
    assert (other / "manifest.json").read_text() == '{"name": "site"}'

"""Steps over flat shards against torch's own optimizer on the whole parameters."""

from __future__ import annotations

from typing import Any

import pytest
from harness import distributed
from twins import CASES, Twins, factory, run

from zerosharder.optim import flat, native
from zerosharder.optim.flat import BLOCK
from zerosharder.optim.roots import torch_roots

needs_native = pytest.mark.skipif(
    not native.available() or torch_roots() is None,
    reason="the extension is not built here, or this torch takes roots that nothing else gives",
)


@pytest.mark.parametrize("name", CASES)
def test_alone(name):
    run(name, 1)


@pytest.mark.parametrize("name", CASES)
@distributed(world=2)
def test_on_two_ranks(name: str, world: int) -> None:
    run(name, world)


@pytest.mark.parametrize("name", ["adamw", "adamw-foreach", "adamw-fused", "sgd-momentum", "sgd-nesterov"])
def test_groups_alone(name):
    run(name, 1, grouped=True)


@pytest.mark.parametrize("name", ["adamw", "adamw-foreach", "adamw-fused", "sgd-momentum", "sgd-nesterov"])
@distributed(world=2)
def test_groups_on_two_ranks(name: str, world: int) -> None:
    run(name, world, grouped=True)


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum-foreach"])
@distributed(world=2)
def test_built_after_the_model_was_sharded(name: str, world: int) -> None:
    run(name, world, late=True, grouped=True)


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum"])
@distributed(world=3)
def test_on_three_ranks(name: str, world: int) -> None:
    run(name, world)


def _lengths_of_torch(twins: Twins) -> list[int]:
    """Lengths of the tensors that torch's functional step got."""
    seen: list[int] = []
    original = twins.optimizer._init_group

    def spy(group: dict[str, Any], *lists: Any) -> Any:
        result = original(group, *lists)
        seen.extend(p.numel() for p in lists[0])
        return result

    twins.optimizer._init_group = spy
    twins.optimizer.step()
    twins.optimizer._init_group = original
    return seen


@pytest.fixture
def without_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)


def _check_runs(lengths: list[int]) -> None:
    # Runs end where a parameter got no gradient, and around the scalar, which is replicated.
    assert len([n for n in lengths if n]) <= 5 and max(lengths) > 2 * 8 * 8501


@pytest.mark.parametrize("name", ["adamw-foreach", "sgd-momentum-foreach"])
def test_neighbours_are_stepped_as_one(name, without_extension):
    twins = Twins(factory(name), 1)
    twins.backward(0)
    _check_runs(_lengths_of_torch(twins))


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum"])
def test_the_plain_step_runs_over_blocks(name, without_extension):
    twins = Twins(factory(name), 1)
    twins.backward(0)
    assert max(_lengths_of_torch(twins)) == BLOCK


@pytest.mark.parametrize("name", ["adamw", "adamw-amsgrad", "adamw-fused", "sgd", "sgd-nesterov"])
def test_without_the_extension_torch_steps(name, without_extension):
    run(name, 1)


def test_without_the_roots_of_torch_its_plain_adam_steps(monkeypatch):
    monkeypatch.setattr(flat, "torch_roots", lambda: None)
    monkeypatch.setattr(native, "step", lambda *_, **__: pytest.fail("these are not torch's bits"))
    run("adamw", 1)


@needs_native
@pytest.mark.parametrize("name", ["adamw", "adamw-foreach", "adamw-fused", "sgd-momentum"])
def test_native_code_steps_float32_runs(name, monkeypatch):
    stepped: list[int] = []
    original = native.step

    def spy(pool: native.StepPool, rule: str, tensors: native.Range, *args: Any, **options: Any) -> None:
        stepped.append(tensors.weight.numel())
        original(pool, rule, tensors, *args, **options)

    monkeypatch.setattr(native, "step", spy)
    twins = Twins(factory(name), 1)
    twins.backward(0)
    assert _lengths_of_torch(twins) == []
    _check_runs(stepped)


@needs_native
def test_a_native_step_counts_as_a_change_of_the_shard():
    """A unit that stays gathered tells by the version of its shard that it has to gather again."""
    twins = Twins(factory("adamw"), 1)
    twins.backward(0)
    bucket, _ = twins.optimizer._zerosharder_flat._owners[id(twins.model.up.weight)]
    before = bucket.flat._version
    twins.optimizer.step()
    assert bucket.flat._version > before

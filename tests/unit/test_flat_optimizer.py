"""Steps over flat shards against torch's own optimizer on the whole parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import distributed
from twins import CASES, Optimizer, Twins, factory, run

from zerosharder.optim.flat import BLOCK


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


def _lengths(optimizer: Optimizer, act: Callable[[], None]) -> list[int]:
    """Lengths of the tensors that the functional step got."""
    seen: list[int] = []
    original = optimizer._init_group

    def spy(group: dict[str, Any], *lists: Any) -> Any:
        result = original(group, *lists)
        seen.extend(p.numel() for p in lists[0])
        return result

    optimizer._init_group = spy
    act()
    optimizer._init_group = original
    return seen


@pytest.mark.parametrize("name", ["adamw-foreach", "sgd-momentum-foreach"])
def test_neighbours_are_stepped_as_one(name):
    twins = Twins(factory(name), 1)
    twins.backward(0)
    lengths = _lengths(twins.optimizer, twins.optimizer.step)
    # Runs end where a parameter got no gradient, and around the scalar, which is replicated.
    assert len([n for n in lengths if n]) <= 5 and max(lengths) > 2 * 8 * 8501


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum"])
def test_the_plain_step_runs_over_blocks(name):
    twins = Twins(factory(name), 1)
    twins.backward(0)
    lengths = _lengths(twins.optimizer, twins.optimizer.step)
    assert max(lengths) == BLOCK

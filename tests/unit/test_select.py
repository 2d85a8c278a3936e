"""The choice of units: models of the usual shapes, on the meta device, and every wrong ``units=``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zerosharder.errors import ShardError
from zerosharder.partition.select import (
    LARGE_NUMEL,
    UnitPlan,
    check_shardable,
    describe,
    find_params,
    select_units,
)

D = 64  # width of a block


class Block(nn.Module):
    def __init__(self, dim: int = D) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)


class GPT(nn.Module):
    def __init__(self, layers: int = 4, vocab: int = 8192, tied: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, D)
        self.wpe = nn.Embedding(16, D)
        self.h = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, vocab, bias=False)
        if tied:
            self.head.weight = self.wte.weight


class Stack(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embed = embedding
        self.block = nn.ModuleList(Block() for _ in range(2))
        self.final = nn.LayerNorm(D)


class T5(nn.Module):
    def __init__(self, vocab: int = 8192) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocab, D)
        self.encoder = Stack(self.shared)
        self.decoder = Stack(self.shared)
        self.head = nn.Linear(D, vocab, bias=False)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)


class MoEBlock(nn.Module):
    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(D, experts)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))


class MoE(nn.Module):
    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MoEBlock() for _ in range(layers))
        self.norm = nn.LayerNorm(D)


class Stage(nn.Module):
    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(depth)))
        self.downsample = nn.Conv2d(dim, 2 * dim, 2)


class Swin(nn.Module):
    """Stages repeat, and each repeats blocks; the last stage holds most of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 4)
        self.stages = nn.ModuleList(Stage(16 * 2**i, 2) for i in range(3))
        self.head = nn.Linear(128, 10)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, 8, 3)
        self.down_blocks = nn.ModuleList(Stage(D, 2) for _ in range(3))
        self.mid = Block()
        self.up_blocks = nn.ModuleList(Stage(D, 2) for _ in range(3))
        self.conv_out = nn.Conv2d(8, 3, 3)


def _plans(model: nn.Module, units: object = None) -> dict[str, UnitPlan]:
    uses = find_params(model)
    plans = select_units(model, uses, units)  # type: ignore[arg-type]
    assert sorted(id(use) for plan in plans for use in plan.params) == sorted(map(id, uses)), (
        "each exactly once"
    )
    assert plans[0].name == "" and plans[0].entries == [model], "the root comes first"
    assert all(plan.params for plan in plans[1:])
    return {plan.name: plan for plan in plans}


def _params(plan: UnitPlan) -> list[str]:
    return [use.name for use in plan.params]


@pytest.fixture(autouse=True)
def _on_meta():
    with torch.device("meta"):
        yield


# -- the usual shapes


def test_gpt():
    plans = _plans(GPT())
    assert list(plans) == ["", "wte", "h.0", "h.1", "h.2", "h.3", "head"]
    assert _params(plans[""]) == ["wpe.weight", "norm.weight", "norm.bias"]
    assert plans["h.1"].reason == "repeated block" and plans["head"].reason == "large leftover"
    assert _params(plans["h.1"]) == [
        "h.1.norm.weight",
        "h.1.norm.bias",
        "h.1.up.weight",
        "h.1.up.bias",
        "h.1.down.weight",
        "h.1.down.bias",
    ]


def test_gpt_with_tied_head():
    model = GPT(tied=True)
    plans = _plans(model)
    tied = plans["wte.weight"]
    assert tied.reason == "tied across units" and tied.entries == [model.wte, model.head]
    assert _params(tied) == ["wte.weight"]
    assert "wte" not in plans and "head" not in plans, "nothing else is left in either"


def test_a_small_tied_weight_moves_to_the_root():
    plans = _plans(GPT(vocab=100, tied=True))
    assert list(plans) == ["", "h.0", "h.1", "h.2", "h.3"]
    assert "wte.weight" in _params(plans[""])


def test_two_weights_tied_between_the_same_modules_are_one_unit():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
            self.b.weight, self.a.other = self.a.weight, nn.Parameter(torch.empty(LARGE_NUMEL))
            self.b.other = self.a.other

    model = Pair()
    plans = _plans(model)
    assert _params(plans["a.weight"]) == ["a.weight", "a.other"] and plans["a.weight"].entries == [
        model.a,
        model.b,
    ]


def test_encoder_decoder():
    model = T5()
    plans = _plans(model)
    names = [
        "",
        "shared",
        *(f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(2)),
        "head",
    ]
    assert sorted(plans) == sorted(names)
    # One module under three names: no tie across units, the module itself is the entry.
    assert plans["shared"].entries == [model.shared] and plans["shared"].reason == "large leftover"
    assert set(_params(plans[""])) == {
        f"{side}.final.{x}" for side in ("encoder", "decoder") for x in ("weight", "bias")
    }


def test_mixture_of_experts_is_gathered_by_layer():
    """Experts are chosen by data: a unit for each would make collectives depend on it."""
    plans = _plans(MoE())
    assert list(plans) == ["", *(f"layers.{i}" for i in range(8))]


def test_large_stages_are_split_and_small_ones_are_not():
    plans = _plans(Swin())
    assert "stages.2" not in plans and {"stages.2.blocks.0", "stages.2.blocks.1"} <= set(plans)
    assert "stages.0" in plans and "stages.0.blocks.0" not in plans
    assert "stages.2.downsample.weight" in _params(plans[""]) or "stages.2.downsample" in plans


def test_unet():
    plans = _plans(UNet())
    for side in ("down_blocks", "up_blocks"):
        for i in range(3):
            assert f"{side}.{i}" in plans or f"{side}.{i}.blocks.0" in plans
    assert {"conv_in.weight", "conv_out.weight", "mid.up.weight"} <= set(_params(plans[""]))


def test_a_container_of_different_modules_repeats_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), Block())
    assert list(_plans(model)) == [""]


def test_bare_layers_in_a_list_are_too_fine():
    assert list(_plans(nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))))) == [""]


def test_a_list_of_lists_is_looked_into():
    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))

    assert list(_plans(Grid())) == ["", "rows.0.0", "rows.0.1", "rows.1.0", "rows.1.1"]


def test_a_dict_of_blocks():
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleDict({"text": Block(), "image": Block()})

    assert list(_plans(Towers())) == ["", "towers.text", "towers.image"]


def test_a_block_that_stands_twice_in_the_list_is_one_unit():
    """Weight sharing as in ALBERT."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            one, two = Block(), Block()
            self.h = nn.ModuleList([one, two, one, two])

    plans = _plans(Shared())
    assert list(plans) == ["", "h.0", "h.1"]


def test_the_same_plan_every_time():
    a, b = (describe(list(_plans(GPT(tied=True)).values())) for _ in range(2))
    assert a == b


def test_ignored_parameters_are_in_no_unit():
    model = GPT()
    skip = model.h[1].up.weight
    uses = find_params(model, [skip])
    assert "h.1.up.weight" not in [use.name for use in uses]
    assert len(uses) == len(list(model.parameters())) - 1


def test_find_params_knows_every_owner():
    model = GPT(tied=True)
    (use,) = (use for use in find_params(model) if use.name == "wte.weight")
    assert use.owners == [(model.wte, "weight"), (model.head, "weight")]


def test_a_description_names_each_kind_with_its_reason():
    text = describe(list(_plans(GPT()).values()))
    assert "4 x Block (0.13 M parameters): repeated block [h.0 and 3 more]" in text
    assert (
        "1 x GPT" in text
        and "(root)" in text
        and "1 x Embedding (0.52 M parameters): large leftover [wte]" in text
    )


# -- chosen by the user


@pytest.mark.parametrize("units", [[Block], Block, ["Block"], "Block", ("h.0", "h.1", "h.2", "h.3")], ids=str)
def test_by_class_or_name(units):
    assert list(_plans(GPT(), units)) == ["", "h.0", "h.1", "h.2", "h.3"]


def test_by_predicate():
    plans = _plans(GPT(), lambda name, module: name.startswith("h.") and isinstance(module, nn.Linear))
    assert list(plans) == ["", *(f"h.{i}.{part}" for i in range(4) for part in ("up", "down"))]
    assert {plan.reason for plan in plans.values()} == {"root: what no other unit holds", "chosen by units="}
    assert "h.0.norm.weight" in _params(plans[""])


def test_a_predicate_never_sees_the_model_itself():
    seen = []
    _plans(GPT(), lambda name, module: bool(seen.append(name)) or name == "h.0")
    assert "" not in seen and "h" in seen


def test_nested_units_take_what_is_theirs():
    plans = _plans(GPT(layers=2), ["h.0", "h.0.up"])
    assert _params(plans["h.0.up"]) == ["h.0.up.weight", "h.0.up.bias"]
    assert "h.0.up.weight" not in _params(plans["h.0"]) and "h.0.down.weight" in _params(plans["h.0"])


def test_a_unit_without_parameters_of_its_own_is_dropped():
    assert list(_plans(GPT(layers=1), ["h.0", "h.0.up", "h.0.down", "h.0.norm"])) == [
        "",
        "h.0.norm",
        "h.0.up",
        "h.0.down",
    ]


@pytest.mark.parametrize(
    "units, parts",
    [
        (["nope"], ["'nope'", "no module", "wte"]),
        ("h.9", ["'h.9'", "no module"]),
        ([nn.GRU], ["GRU", "no module", "Block", "Embedding"]),
        ([], ["empty", "leave it out"]),
        ((), ["empty"]),
        (["h.0", 3], ["3", "classes and names"]),
        ([int], ["int", "classes and names"]),
        ([None], ["None", "classes and names"]),
        (7, ["7", "classes, module names, or a predicate"]),
        (1.5, ["1.5", "predicate"]),
        (lambda name, module: False, ["predicate", "no module", "True"]),
        ([GPT], ["GPT", "no module"]),
        ([""], ["''", "no module"]),
    ],
    ids=lambda v: repr(v) if not isinstance(v, list) or callable(v) else None,
)
def test_wrong_units(units, parts):
    with pytest.raises(ShardError) as caught:
        _plans(GPT(), units)
    for part in parts:
        assert part in str(caught.value), caught.value


def test_a_module_instance_is_not_a_unit_and_the_message_says_what_is():
    model = GPT()
    with pytest.raises(ShardError, match="classes and names"):
        _plans(model, [model.h[0]])


def test_a_predicate_that_raises_keeps_its_exception():
    def broken(name: str, module: nn.Module) -> bool:
        raise KeyError(name)

    with pytest.raises(KeyError):
        _plans(GPT(), broken)


# -- what cannot be sharded


def _check(model: nn.Module) -> None:
    check_shardable(model, find_params(model))


def test_shardable_models_pass():
    for model in (GPT(), GPT(tied=True), T5(), Swin()):
        _check(model)


def test_no_parameters():
    with pytest.raises(ShardError, match="Sequential has no parameters to shard"):
        _check(nn.Sequential(nn.ReLU(), nn.Dropout()))


def test_all_parameters_ignored():
    model = nn.Linear(2, 2)
    with pytest.raises(ShardError, match="Linear has no parameters to shard"):
        check_shardable(model, find_params(model, model.parameters()))


def test_a_wrapped_model():
    class FullyShardedDataParallel(nn.Module):
        pass

    for wrapper in (FullyShardedDataParallel(), nn.Sequential(FullyShardedDataParallel(), nn.Linear(2, 2))):
        with pytest.raises(
            ShardError, match="already wrapped by FullyShardedDataParallel; shard the module inside"
        ):
            _check(wrapper)


def test_a_parameter_that_is_no_leaf():
    class Odd(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.good = nn.Linear(2, 2)
            self.inner = nn.Module()
            self.inner._parameters["weight"] = weight  # what weight_norm and friends do

    with torch.device("cpu"):
        weight = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(ShardError, match=r"'inner\.weight' is not a leaf.*detach"):
        _check(Odd(weight))


def test_a_tensor_subclass():
    from torch.testing._internal.two_tensor import TwoTensor

    with torch.device("cpu"):
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    with pytest.raises(ShardError, match=r"'weight' is a TwoTensor.*ignored_params="):
        _check(model)


def test_a_sparse_parameter():
    with torch.device("cpu"):
        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(torch.eye(2).to_sparse())
    with pytest.raises(ShardError, match=r"'weight' has layout torch\.sparse_coo; only dense"):
        _check(model)

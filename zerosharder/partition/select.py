"""Which modules are gathered together: the choice of units.

A *unit* is a set of parameters that is gathered, used, reduced and freed together, and the modules whose forward
needs it (its *entries*). The rules, applied to any model without knowing its class:

1. Repeated blocks: where a container holds two or more children of one class that own parameters, each such child
   is a unit. The outermost repetition wins, unless a child is so large that gathering it would defeat the purpose
   and it repeats blocks itself (stages of a vision model).
2. Large leftovers: a module outside of the blocks that owns many parameters itself (embedding, head) is a unit.
3. Everything else belongs to the root unit, which stays gathered from the first use to the end of backward.
4. A large parameter used by modules of different units (tied weights) is a unit of its own, gathered for each of
   them; a small one moves to the root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from zerosharder.errors import ShardError

UnitsArgument = Callable[[str, nn.Module], bool] | Iterable[type[nn.Module] | str] | None

# A leftover module is large from here on (elements it owns itself, repeated blocks not counted).
LARGE_NUMEL = 256 * 1024
LARGE_SHARE = 0.02
# A repeated block above this share of the model is split further if it repeats blocks itself.
SPLIT_SHARE = 0.15


@dataclass
class ParamUse:
    """One parameter and every place in the module tree that refers to it."""

    param: nn.Parameter
    name: str  # fully qualified, of its first owner
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)


@dataclass
class UnitPlan:
    """What becomes a unit: a name, its entries, its parameters, and why it is one."""

    name: str
    entries: list[nn.Module]
    params: list[ParamUse]
    reason: str

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(use.param.numel() for use in self.params)


def find_params(model: nn.Module, ignored: Iterable[nn.Parameter] = ()) -> list[ParamUse]:
    """Every parameter of ``model`` that is not ignored, with all its owners, in registration order."""
    skip = {id(p) for p in ignored}
    uses: dict[int, ParamUse] = {}
    for prefix, module in model.named_modules():
        for attr, param in module._parameters.items():
            if param is None or id(param) in skip:
                continue
            name = f"{prefix}.{attr}" if prefix else attr
            uses.setdefault(id(param), ParamUse(param, name)).owners.append((module, attr))
    return list(uses.values())


def select_units(model: nn.Module, uses: Sequence[ParamUse], units: UnitsArgument = None) -> list[UnitPlan]:
    """Distributes ``uses`` over units; the root unit comes first (it may be empty), the others in module order."""
    names = {module: name for name, module in model.named_modules()}
    if units is None:
        chosen = _repeated_blocks(model)
        chosen.update(_large_leftovers(model, uses, chosen))
    else:
        chosen = _chosen_by_user(model, units)
    chosen.pop(model, None)
    return _assign(model, names, uses, chosen)


def describe(plans: Sequence[UnitPlan]) -> str:
    """One line for each kind of unit: how many, how large, and the reason."""
    kinds: dict[tuple[str, str], list[UnitPlan]] = {}
    for plan in plans:
        cls = type(plan.entries[0]).__name__ if plan.entries else "?"
        kinds.setdefault((cls, plan.reason), []).append(plan)
    lines = []
    for (cls, reason), group in kinds.items():
        numel = sum(plan.numel for plan in group)
        label = group[0].name or "(root)"
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        lines.append(f"  {len(group)} x {cls} ({numel / 1e6:.2f} M parameters): {reason} [{label}{more}]")
    return "\n".join(lines)


def _repeated_blocks(model: nn.Module) -> dict[nn.Module, str]:
    total = sum(p.numel() for p in model.parameters())
    names = {child: name for module in model.modules() for name, child in module.named_children()}
    found: dict[nn.Module, str] = {}

    def visit(module: nn.Module, name: str = "") -> None:
        if "expert" in name:
            return  # which of them run depends on the data, so ranks would gather different ones
        children = [child for child in module.children() if any(True for _ in child.parameters())]
        blocks: set[nn.Module] = set()
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            counts = Counter(type(child) for child in children)
            blocks = {
                c
                for c in children
                if counts[type(c)] >= 2 and not isinstance(c, nn.ModuleList | nn.ModuleDict)
            }
            if not any(any(True for _ in block.children()) for block in blocks):
                blocks = set()  # a list of bare layers: too fine, they stay with their parent
        for child in children:
            # A stage of blocks, not a block: stages differ in shapes, blocks have twins.
            is_stage = _repeats_inside(child) and not _has_twin(child, blocks)
            if child not in blocks or (is_stage and _numel(child) > SPLIT_SHARE * total):
                visit(child, names[child])
            else:
                found[child] = "repeated block"

    visit(model)
    return found


def _has_twin(child: nn.Module, blocks: set[nn.Module]) -> bool:
    """Whether another block has the same class and shapes."""
    shapes = [p.shape for p in child.parameters()]
    others = (b for b in blocks if b is not child and type(b) is type(child))
    return any([p.shape for p in other.parameters()] == shapes for other in others)


def _repeats_inside(module: nn.Module) -> bool:
    for inner in module.modules():
        if isinstance(inner, nn.ModuleList | nn.Sequential):
            counts = Counter(type(c) for c in inner.children() if any(True for _ in c.children()))
            if any(n >= 2 for n in counts.values()):
                return True
    return False


def _large_leftovers(
    model: nn.Module, uses: Sequence[ParamUse], blocks: dict[nn.Module, str]
) -> dict[nn.Module, str]:
    inside = {m for block in blocks for m in block.modules()}
    own: Counter[nn.Module] = Counter()
    for use in uses:
        for module in {owner for owner, _ in use.owners}:
            if module not in inside and module is not model:
                own[module] += use.param.numel()
    total = sum(use.param.numel() for use in uses)
    limit = max(LARGE_NUMEL, LARGE_SHARE * total)
    return {module: "large leftover" for module, numel in own.items() if numel >= limit}


def _chosen_by_user(model: nn.Module, units: UnitsArgument) -> dict[nn.Module, str]:
    named = dict(model.named_modules())
    if callable(units) and not isinstance(units, type):
        found = {m: "chosen by units=" for name, m in named.items() if m is not model and units(name, m)}
        if not found:
            raise ShardError(
                "units= is a predicate that chose no module; return True for the modules to gather"
            )
        return found
    if isinstance(units, str | type):
        units = [units]
    if not isinstance(units, Iterable):
        raise ShardError(
            f"units={units!r}: give classes, module names, or a predicate (name, module) -> bool"
        )
    chosen: dict[nn.Module, str] = {}
    for item in units:
        if isinstance(item, type) and issubclass(item, nn.Module):
            hits = [m for m in named.values() if isinstance(m, item) and m is not model]
            classes = sorted({type(m).__name__ for m in named.values()})
            hint = f"classes in this model: {', '.join(classes)}"
        elif isinstance(item, str):
            hits = [
                m
                for name, m in named.items()
                if m is not model and (name == item or type(m).__name__ == item)
            ]
            hint = f"names in this model start with: {', '.join(list(named)[1:9])}"
        else:
            raise ShardError(f"units= contains {item!r}: only module classes and names can stand in a list")
        if not hits:
            raise ShardError(f"units= contains {item!r}, which no module of the model matches; {hint}")
        chosen.update(dict.fromkeys(hits, "chosen by units="))
    if not chosen:
        raise ShardError("units= is empty; leave it out to let the units be picked")
    return chosen


def _assign(
    model: nn.Module, names: dict[nn.Module, str], uses: Sequence[ParamUse], chosen: dict[nn.Module, str]
) -> list[UnitPlan]:
    nearest: dict[nn.Module, nn.Module] = {}

    def mark(module: nn.Module, unit: nn.Module) -> None:
        if module in nearest:
            return
        nearest[module] = unit
        for child in module.children():
            mark(child, child if child in chosen else unit)

    mark(model, model)
    root = UnitPlan("", [model], [], "root: what no other unit holds")
    plans: dict[nn.Module, UnitPlan] = {model: root}
    for module in nearest:
        if module in chosen:
            plans[module] = UnitPlan(names[module], [module], [], chosen[module])
    shared: dict[tuple[int, ...], UnitPlan] = {}
    for use in uses:
        owners = {nearest[module] for module, _ in use.owners}
        if len(owners) == 1:
            plans[owners.pop()].params.append(use)
        elif use.param.numel() < LARGE_NUMEL:
            root.params.append(use)
        else:
            modules = list(dict.fromkeys(module for module, _ in use.owners))
            key = tuple(id(module) for module in modules)
            if key not in shared:
                shared[key] = UnitPlan(use.name, modules, [], "tied across units")
            shared[key].params.append(use)
    ordered = [plan for plan in plans.values() if plan is root or plan.params]
    return ordered + list(shared.values())


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def check_shardable(model: nn.Module, uses: Sequence[ParamUse], ignored: Iterable[nn.Parameter] = ()) -> None:
    """Raises ShardError for what cannot be sharded, naming the thing and the fix."""
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        kind = type(module).__name__
        if isinstance(module, nn.parallel.DistributedDataParallel) or kind == "FullyShardedDataParallel":
            raise ShardError(f"{where} is already wrapped by {kind}; shard the module inside it instead")
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            raise ShardError(f"{where} is already sharded by fully_shard (FSDP2); drop one of the two calls")
    own = {id(p) for p in model.parameters()}
    foreign = [p for p in ignored if id(p) not in own]
    if foreign:
        raise ShardError(
            f"ignored_params= contains a parameter of shape {tuple(foreign[0].shape)} that the model does not have; "
            "take them from model.parameters()"
        )
    if not uses:
        raise ShardError(
            f"{type(model).__name__} has no parameters to shard (all ignored, or none registered)"
        )
    for use in uses:
        if isinstance(use.param, nn.parameter.UninitializedParameter):
            raise ShardError(
                f"parameter {use.name!r} belongs to a lazy module and has no shape yet; run one forward on a small "
                "batch, or build the module with its sizes, before shard()"
            )
        if not use.param.is_leaf:
            raise ShardError(
                f"parameter {use.name!r} is not a leaf (it is the result of {use.param.grad_fn}); "
                "register a leaf nn.Parameter, or detach() it first"
            )
        if type(use.param.data) is not torch.Tensor:
            raise ShardError(
                f"parameter {use.name!r} is a {type(use.param.data).__name__}, not a plain tensor; tensor subclasses "
                "(tensor-parallel DTensors, quantised weights) are not supported in this release: "
                "pass it in ignored_params="
            )
        if use.param.layout != torch.strided:
            raise ShardError(
                f"parameter {use.name!r} has layout {use.param.layout}; only dense parameters are sharded"
            )

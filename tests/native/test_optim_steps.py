"""`zerosharder.optim.native`: the same bits on every instruction set, and those of torch.optim."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("zerosharder._C", reason="the extension is not built here")

from zerosharder.optim import native  # noqa: E402
from zerosharder.optim.native import Hyper, Range, StepPool  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RULES = {
    "adamw": ("adamw", 2, Hyper(lr=1e-3, weight_decay=0.01)),
    "adamw-amsgrad": ("adamw", 3, Hyper(lr=1e-3, weight_decay=0.01, amsgrad=True)),
    "adamw-low-beta": ("adamw", 2, Hyper(lr=1e-3, betas=(0.3, 0.6))),
    "adam": ("adam", 2, Hyper(lr=1e-3, weight_decay=0.01)),
    "adam-maximize": ("adam", 2, Hyper(lr=1e-3, maximize=True)),
    "sgd": ("sgd", 0, Hyper(lr=0.1, weight_decay=0.01)),
    "sgd-momentum": ("sgd", 1, Hyper(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01)),
    "sgd-nesterov": ("sgd", 1, Hyper(lr=0.1, momentum=0.9, nesterov=True)),
    "lion": ("lion", 1, Hyper(lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1)),
    "adagrad": ("adagrad", 1, Hyper(lr=0.01, lr_decay=0.1, eps=1e-10, weight_decay=0.01)),
}
rules = pytest.mark.parametrize("case", RULES)
VECTOR_ISAS = ("avx2", "avx512", "neon")


@pytest.fixture(scope="module")
def pool():
    with StepPool(2) as threads:
        yield threads


def need(isa: str) -> str:
    if isa not in native.usable_isas():
        pytest.skip(f"this CPU has no {isa}")
    return isa


def make(states: int, n: int, grad_dtype=torch.float32, copy=None, seed=0, offset=0) -> Range:
    generator = torch.Generator().manual_seed(seed)

    def flat(dtype=torch.float32):
        return torch.randn(n + offset, generator=generator).to(dtype)[offset:]

    state = [flat() * 0.1, *(flat().square() for _ in range(states - 1))] if states else []
    return Range(
        flat(), flat(grad_dtype), state, None if copy is None else torch.zeros(n + offset).to(copy)[offset:]
    )


def squares(case: str, tensors: Range) -> Range:
    """Adagrad's only state is a sum of squares."""
    return replace(tensors, state=[s.abs() for s in tensors.state]) if case == "adagrad" else tensors


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Every bit, except that all NaNs are one: their payload is the order of operands in an instruction."""
    whole = tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).clone()
    whole[tensor.isnan()] = -1
    return whole


def outcome(pool, case, tensors: Range, isa, **options) -> list[torch.Tensor]:
    rule, _, hyper = RULES[case]
    mine = Range(
        tensors.weight.clone(),
        tensors.grad,
        [s.clone() for s in tensors.state],
        None if tensors.copy is None else tensors.copy.clone(),
    )
    native.step(pool, rule, mine, hyper, isa=isa, **options)
    return [bits(t) for t in (mine.weight, *mine.state, *([] if mine.copy is None else [mine.copy]))]


def equal(left, right) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("isa", VECTOR_ISAS)
@rules
def test_every_length_gives_the_portable_bits(pool, case, isa):
    """Lengths 0 to 300 in turn through all types, at an odd offset and with a scale."""
    need(isa)
    kinds = list(itertools.product(DTYPES, (None, torch.bfloat16, torch.float16)))
    for n in range(301):
        grad, copy = kinds[n % len(kinds)]
        tensors = squares(case, make(RULES[case][1], n, grad, copy, seed=n, offset=n % 5))
        options = {"number": 1 + n % 7, "grad_scale": 0.37}
        assert equal(*(outcome(pool, case, tensors, i, **options) for i in (isa, "portable"))), n


@pytest.mark.parametrize("isa", VECTOR_ISAS)
@rules
def test_special_values_give_the_portable_bits(pool, case, isa):
    """Infinities, NaN, zeros of both signs, subnormals and the extremes, each as weight, gradient and state."""
    need(isa)
    values = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        math.inf,
        -math.inf,
        math.nan,
        1e-45,
        -1e-45,
        1.1e-38,
        3.4e38,
        -3.4e38,
        65504.0,
    ]
    grid = torch.tensor(list(itertools.product(values, repeat=3)))
    w, g, s = (grid[:, k].contiguous() for k in range(3))
    for grad in DTYPES:
        for copy in (torch.bfloat16, torch.float16):
            tensors = Range(
                w, g.to(grad), [s.clone() for _ in range(RULES[case][1])], torch.zeros_like(w).to(copy)
            )
            assert equal(*(outcome(pool, case, tensors, i, number=2) for i in (isa, "portable")))


@pytest.mark.parametrize("stream", [1, 2, 3])
@rules
def test_streaming_stores_change_nothing(pool, case, stream):
    """All bits of a range of several chunks, written past the caches or through them."""
    tensors = squares(case, make(RULES[case][1], 200_003, torch.bfloat16, torch.bfloat16))
    plain, streamed = (outcome(pool, case, tensors, "auto", stream=s, number=2) for s in (0, stream))
    assert equal(plain, streamed)


@rules
def test_threads_change_nothing(case):
    """1, 2, 3 and 5 threads give the same bits over a length that is no multiple of a chunk."""
    tensors = squares(case, make(RULES[case][1], 400_001))
    found = []
    for threads in (1, 2, 3, 5):
        with StepPool(threads) as some:
            found.append(outcome(some, case, tensors, "auto", number=3))
    assert all(equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("isa", ["portable", *VECTOR_ISAS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_sixteen_bit_gradient_is_read_exactly(pool, isa, dtype):
    """All 65,536 patterns: the momentum buffer of the first SGD step is the gradient as torch converts it."""
    need(isa)
    grad = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    buffer = torch.zeros(2**16)
    native.step(pool, "sgd", Range(torch.zeros(2**16), grad, [buffer]), Hyper(lr=0.0, momentum=0.9), isa=isa)
    assert torch.equal(bits(buffer), bits(grad.float()))


@pytest.mark.parametrize("isa", ["portable", *VECTOR_ISAS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_copy_rounds_to_nearest_even(pool, isa, dtype):
    """Each 16-bit value, the halfway points beside it and their neighbours, rounded as torch rounds them."""
    need(isa)
    base = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    base = base[base.isfinite()]
    following = torch.arange(-(2**15), 2**15).to(torch.int16).roll(-1).view(dtype).float()
    following = following[: base.numel()]
    middle = ((base.double() + following.double()) / 2).float()
    around = [torch.nextafter(middle, torch.tensor(x)) for x in (-math.inf, math.inf)]
    weight = torch.cat([base, middle, *around, torch.tensor([math.inf, -math.inf, math.nan, 3.4e38, 1e-45])])
    copy = torch.zeros(weight.numel(), dtype=dtype)
    expected = weight.to(dtype)
    native.step(pool, "sgd", Range(weight, torch.zeros_like(weight), [], copy), Hyper(lr=0.0), isa=isa)
    assert torch.equal(bits(copy), bits(expected))


def ulps(left: torch.Tensor, right: torch.Tensor) -> int:
    def ordered(x):
        whole = x.view(torch.int32).long()
        return torch.where(whole < 0, -(whole & 0x7FFFFFFF), whole)

    return int((ordered(left) - ordered(right)).abs().max())


def torch_optimizer(case: str, weight: torch.nn.Parameter) -> torch.optim.Optimizer:
    rule, _, h = RULES[case]
    if rule == "sgd":
        keys = ("momentum", "dampening", "nesterov")
        return torch.optim.SGD(
            [weight], lr=h.lr, weight_decay=h.weight_decay, foreach=False, **{k: getattr(h, k) for k in keys}
        )
    if rule == "adagrad":
        return torch.optim.Adagrad(
            [weight], lr=h.lr, lr_decay=h.lr_decay, eps=h.eps, weight_decay=h.weight_decay, fused=True
        )
    kind = torch.optim.AdamW if rule == "adamw" else torch.optim.Adam
    return kind(
        [weight],
        lr=h.lr,
        betas=h.betas,
        eps=h.eps,
        weight_decay=h.weight_decay,
        amsgrad=h.amsgrad,
        maximize=h.maximize,
        fused=True,
    )


@pytest.mark.parametrize("isa", ["portable", *VECTOR_ISAS])
@pytest.mark.parametrize("case", [case for case in RULES if case != "lion"])
def test_torch_takes_the_same_steps(pool, case, isa, record_property):
    """Six steps beside torch's (fused AdamW, Adam and Adagrad, plain SGD): at most 1 ulp anywhere, each step."""
    need(isa)
    rule, states, hyper = RULES[case]
    n = 100_003
    generator = torch.Generator().manual_seed(5)
    theirs = torch.nn.Parameter(torch.randn(n, generator=generator))
    optimizer = torch_optimizer(case, theirs)
    keys = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"] if rule.startswith("adam") else ["momentum_buffer"]
    keys = (["sum"] if rule == "adagrad" else keys)[:states]
    weight = theirs.detach().clone()
    state = [torch.zeros(n) for _ in range(states)]
    worst = 0
    for number in range(1, 7):
        theirs.grad = torch.randn(n, generator=generator) * 10.0 ** (number - 4)
        optimizer.step()
        native.step(pool, rule, Range(weight, theirs.grad, state), hyper, number=number, isa=isa)
        pairs = [
            (weight, theirs.detach()),
            *((s, optimizer.state[theirs][k]) for s, k in zip(state, keys, strict=True)),
        ]
        worst = max(worst, *(ulps(a, b) for a, b in pairs))
        for mine, reference in pairs:  # per step: the next one starts from the same numbers
            mine.copy_(reference)
    record_property("max_ulp", worst)
    assert worst <= 1, worst


def test_lion_follows_the_paper(pool):
    """Signs of interpolated gradients, decoupled decay, momentum by the second beta."""
    _, _, h = RULES["lion"]
    tensors = make(1, 10_001)
    w, m, g = (t.double() for t in (tensors.weight, tensors.state[0], tensors.grad))
    native.step(pool, "lion", tensors, h)
    direction = torch.sign(h.betas[0] * m + (1 - h.betas[0]) * g)
    torch.testing.assert_close(
        tensors.weight.double(), w - h.lr * (direction + h.weight_decay * w), rtol=1e-6, atol=1e-7
    )
    torch.testing.assert_close(
        tensors.state[0].double(), h.betas[1] * m + (1 - h.betas[1]) * g, rtol=1e-5, atol=1e-7
    )


def test_the_scale_is_that_of_a_scaled_gradient(pool):
    """One pass with a scale gives the bits of scaling first."""
    left, right = make(2, 5_000), make(2, 5_000)
    native.step(pool, "adamw", left, Hyper(lr=1e-3), grad_scale=1 / 3)
    native.step(pool, "adamw", replace(right, grad=right.grad * (1 / 3)), Hyper(lr=1e-3))
    assert torch.equal(left.weight, right.weight) and torch.equal(left.state[1], right.state[1])


def test_flushing_of_subnormals_in_the_caller_changes_nothing(pool):
    """A caller with flush-to-zero gets the bits that the pool's threads compute."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        tensors = make(1, 300_000)
        tensors.grad.fill_(1.0)
        tensors.weight.fill_(0.0)
        native.step(pool, "sgd", replace(tensors, state=[]), Hyper(lr=1e-40))
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(tensors.weight, torch.full((300_000,), -1e-40))


@pytest.mark.parametrize("dtype", DTYPES)
def test_squared_norm(dtype):
    """The same bits for every variant, number of threads and offset; close to a sum in float64."""
    for n in (0, 1, 15, 16, 17, 65_536, 65_537, 1_000_003):
        data = torch.randn(n + 3, generator=torch.Generator().manual_seed(n)).to(dtype)[3:]
        found = set()
        for threads in (1, 2, 3):
            with StepPool(threads) as some:
                found |= {native.squared_norm(some, data, isa=isa) for isa in native.usable_isas()}
        assert len(found) == 1
        assert found.pop() == pytest.approx(float(data.double().square().sum()), rel=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_nonfinite(pool, dtype, bad):
    """One bad value is found at the beginning, at chunk borders and in the tail; the largest finite one is not."""
    n = 200_001
    data = torch.full((n,), torch.finfo(dtype).max, dtype=dtype)
    for isa in native.usable_isas():
        assert not native.nonfinite(pool, data, isa=isa)
        for place in (0, 65_535, 65_536, 199_999, n - 1):
            data[place] = bad
            assert native.nonfinite(pool, data, isa=isa)
            data[place] = 0
        assert not native.nonfinite(pool, data[:0], isa=isa)

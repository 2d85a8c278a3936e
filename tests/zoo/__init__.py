"""Architectures that people wrote, in tiny random configurations: what `zs.shard` must take with nothing else said.

    arch = zoo.ZOO["llama"]
    model = arch.build()                                   # the same weights every time
    loss = arch.loss(model, arch.inputs(step=0, rank=1))   # deterministic: no dropout, no random masks

Nothing is downloaded. `transformers` and `diffusers` are imported by `build` alone, since that takes seconds.
"""

from __future__ import annotations

from zoo import audio, decoders, diffusion, encoders, torch_modules, vision
from zoo.architecture import Architecture

ZOO: dict[str, Architecture] = {}
for _module in (torch_modules, decoders, encoders, vision, audio, diffusion):
    assert not ZOO.keys() & _module.FAMILY.keys()
    ZOO |= _module.FAMILY

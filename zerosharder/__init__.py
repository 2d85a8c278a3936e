"""One line shards a PyTorch model, its gradients and its optimizer state over all ranks.

model, optimizer = zerosharder.shard(model, optimizer)
"""

from zerosharder.api import (
    full_params,
    load,
    no_sync,
    register_forward_method,
    reset,
    save,
    shard,
    stats,
    trace,
)
from zerosharder.checkpoint.folder import latest
from zerosharder.config import Config
from zerosharder.observe.counters import Stats

__version__ = "0.1.0"

__all__ = [
    "Config",
    "Stats",
    "full_params",
    "latest",
    "load",
    "no_sync",
    "register_forward_method",
    "reset",
    "save",
    "shard",
    "stats",
    "trace",
]

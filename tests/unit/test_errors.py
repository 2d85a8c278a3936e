"""What users catch."""

from __future__ import annotations

import pickle

import pytest

from zerosharder import errors


@pytest.mark.parametrize("name", errors.__all__)
def test_one_base(name):
    kind = getattr(errors, name)
    assert issubclass(kind, errors.ZerosharderError) and issubclass(kind, RuntimeError)
    assert issubclass(kind, ValueError) == (name in ("ConfigError", "ShardError", "OptimizerError"))


def test_culprits_survive_the_way_between_processes():
    error = errors.DesyncError("ranks differ", [3, 1, 3])
    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.culprits) == ("ranks differ", (1, 3))
    assert errors.DesyncError("unknown").culprits == ()

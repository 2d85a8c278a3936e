"""The exceptions a user of zerosharder may want to catch.

All derive from `ZerosharderError`. Those that report a wrong value are also `ValueError`, so code written
against torch's own conventions keeps working. Broken internal invariants are `AssertionError` and are not
listed here: they are bugs to report, not conditions to handle.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DesyncError",
    "EnvironmentSetupError",
    "OptimizerError",
    "ShardError",
    "StateError",
    "ZerosharderError",
]


class ZerosharderError(RuntimeError):
    """Base of everything zerosharder raises on purpose.

    Catch this one to handle any failure of the library without also hiding the errors of the model.
    """


class ConfigError(ZerosharderError, ValueError):
    """A setting is unknown, cannot be parsed, or cannot be applied.

    Raised when a `Config` is built and when settings are read from the environment, before anything is
    sharded. The message names the setting, the value and what is accepted; correct it and start again.
    """


class ShardError(ZerosharderError, ValueError):
    """The model, `units=`, `mesh=` or `ignored_params=` given to `shard()` cannot be used.

    Raised by `shard()` before the model is modified: a model without parameters, a non-leaf parameter, a
    module already wrapped by something else, a unit name that matches nothing. The message names the module
    or parameter; change the call as it says.
    """


class OptimizerError(ZerosharderError, ValueError):
    """The optimizer cannot be adopted.

    Raised by `shard()` when the optimizer holds parameters that are not the model's, or when its algorithm
    cannot work on shards. Build it from `model.parameters()`, or choose an optimizer that the message lists.
    """


class StateError(ZerosharderError):
    """An operation came at a moment when a unit cannot perform it.

    Raised for an illegal transition of a unit, typically after an exception left a forward or backward half
    done. Call `zerosharder.reset(model)` and go on with the next step; if it comes up without an earlier
    exception, the message names the unit and the order of calls that led here.
    """


class CheckpointError(ZerosharderError):
    """A checkpoint cannot be written or read.

    Raised on every rank, by saving when the disk or a value to save refuses, and by loading when the folder is no
    checkpoint, is damaged, is of a newer format or of another model. The message names the file, parameter or value.
    A save that raised this has left the previous checkpoint as it was.
    """


class DesyncError(ZerosharderError):
    """The ranks of the job are not doing the same thing.

    Raised on every rank, within the timeout, when ranks disagree about the model, the optimizer, the settings
    or the order of units, or when some of them do not take part in a collective. The state of the job cannot
    be repaired from inside: fix what differs between the ranks named in `culprits` and restart from a checkpoint.

    Attributes:
        culprits: global ranks that differ from the others or did not answer, ascending; empty if unknown.
    """

    culprits: tuple[int, ...]

    def __init__(self, message: str, culprits: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.culprits = tuple(sorted(set(culprits)))

    def __reduce__(self) -> tuple[type[DesyncError], tuple[str, tuple[int, ...]]]:
        # The default would rebuild from `args` alone, which loses the ranks on the way between processes.
        return (type(self), (str(self), self.culprits))


class EnvironmentSetupError(ZerosharderError):
    """A process-group variable (RANK, WORLD_SIZE, ...) is missing or makes no sense.

    Raised by `shard()` when the process looks like one of several ranks but the launcher's variables are
    incomplete. Start the script with `torchrun`, or unset the leftovers to run as a single process.
    """

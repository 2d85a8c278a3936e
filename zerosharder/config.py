"""All settings, and the only place of the package that reads the process environment.

A setting is one field of `Config`. The field carries its environment variable, parser, unit and sentence, so
that the parser, the error messages and the reference page (docs/settings.md) come from one declaration.

Where a value comes from, first match wins:

1. a keyword given to `Config.resolve(...)` (what `shard()` was called with),
2. a field the user set when building the `config=` object,
3. the environment variable of the field,
4. the default.

"Set by the user" means "passed to `Config(...)`", whether or not the value equals the default: the names are
remembered in `Config.explicit`. So `Config(prefetch=0)` still takes its timeout from ZEROSHARDER_TIMEOUT, and
`Config(reshard="auto")` wins over ZEROSHARDER_RESHARD=never. Building a `Config` never reads the environment.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from .errors import ConfigError, EnvironmentSetupError

__all__ = [
    "Config",
    "DistributedEnv",
    "DtypeName",
    "LogLevel",
    "ReshardPolicy",
    "Setting",
    "distributed_env",
    "parse_size",
    "settings",
]

PREFIX = "ZEROSHARDER_"

DtypeName = Literal["fp32", "bf16", "fp16"]
ReshardPolicy = Literal["auto", "always", "never"]
LogLevel = Literal["debug", "info", "warning", "error"]

# Known to setup.py only. Harmless when still exported at run time, so not an "unknown name" there.
BUILD_VARIABLES = frozenset({"ZEROSHARDER_BUILD_EXT", "ZEROSHARDER_BUILD_URING"})

_NO_TIER = "this release has no host or NVMe tier yet, only 'none' can be honoured"

# Names that the settings contract reserves and this release cannot honour: name -> reason.
RESERVED_VARIABLES: Mapping[str, str] = {
    "ZEROSHARDER_NVME_PATH": "this release has no NVMe tier yet",
    "ZEROSHARDER_DEVICE_MEMORY": "this release has no memory planner yet, nothing would keep to the budget",
    "ZEROSHARDER_HOST_MEMORY": "this release has no host tier yet, nothing would keep to the budget",
    "ZEROSHARDER_PINNED_MEMORY": "this release pins no host memory yet, nothing would keep to the budget",
    "ZEROSHARDER_IO_BACKEND": "this release does no file I/O of its own yet",
    "ZEROSHARDER_IO_DEPTH": "this release does no file I/O of its own yet",
    "ZEROSHARDER_IO_BLOCK": "this release does no file I/O of its own yet",
}


# ---------------------------------------------------------------------------------------------- parsers
# A parser takes text from the environment or a value from Python, returns the stored value, and raises
# ValueError with a short reason (or no reason) otherwise. The caller adds name, value and what is accepted.

_SIZE_UNITS: Mapping[str, int] = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*|%)", re.ASCII)
_MAX_SIZE = 2**63 - 1


def parse_size(value: object, *, total: int | None = None) -> int:
    """Return a size in bytes.

    Args:
        value: an int of bytes, or text such as `4096`, `512MiB`, `1.5GB` or (with `total`) `80%`. KB, MB, GB,
            TB are powers of 1000; KiB, MiB, GiB, TiB powers of 1024; case does not matter. Fractions of a
            byte are dropped.
        total: what 100 % means, in bytes. Without it a percentage is refused.

    Raises:
        ValueError: the text is no size, is negative, or exceeds 2**63 - 1 bytes.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"a size is an int of bytes or text, not {type(value).__name__}")
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE_PATTERN.fullmatch(value.strip().lower())
        if match is None:
            raise ValueError("not a size")
        number, unit = Fraction(match[1]), match[2]
        if unit == "%":
            if total is None:
                raise ValueError("a percentage has no meaning here, there is no total to take it of")
            if number > 100:
                raise ValueError("more than 100 %")
            size = int(number * total / 100)
        elif unit in _SIZE_UNITS:
            size = int(number * _SIZE_UNITS[unit])
        elif f"{unit}ib" in _SIZE_UNITS:
            raise ValueError(f"'{match[2].upper()}' is ambiguous: write {unit.upper()}iB or {unit.upper()}B")
        else:
            raise ValueError("unknown unit")
    if not 0 <= size <= _MAX_SIZE:
        raise ValueError("out of range")
    return size


def _one_of(*allowed: str, refused: Mapping[str, str] | None = None) -> Callable[[object], str]:
    """Return a parser for a closed set of words; `refused` maps known words to why they cannot apply."""

    def parse(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"expected text, got {type(value).__name__}")
        word = value.strip().lower()
        if refused and word in refused:
            raise ValueError(refused[word])
        if word not in allowed:
            raise ValueError
        return word

    return parse


def _prefetch(value: object) -> int | None:
    if value is None or (isinstance(value, str) and value.strip().lower() == "auto"):
        return None
    return parse_size(value)


def _threads(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"expected a whole number, got {type(value).__name__}")
    if isinstance(value, str):
        text = value.strip()
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text, re.ASCII):
            raise ValueError("not a whole number")
        value = int(text)
    if not 0 <= value <= 4096:
        raise ValueError("out of range")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected a number, got {type(value).__name__}")
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        raise ValueError("not a number") from None
    if not (math.isfinite(seconds) and 0 < seconds <= 30 * 86400):
        raise ValueError("out of range")
    return seconds


def _trace_path(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"expected a path, got {type(value).__name__}")
    path = os.fspath(value)
    if not isinstance(path, str):
        raise ValueError("expected a text path, got bytes")
    if not path.strip() or "\0" in path:
        raise ValueError("empty or unusable path")
    if path.endswith(os.sep):
        raise ValueError("a folder, not a file")
    return path


# ------------------------------------------------------------------------------------------- declaration


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known about one field of `Config` besides its name and type."""

    env: str
    """Environment variable."""
    default: object
    """Stored value when nothing sets it."""
    default_text: str
    """The default as one would write it in the environment; empty for "not set"."""
    parse: Callable[[object], object]
    """Text or Python value -> stored value; raises ValueError."""
    accepted: str
    """What is accepted, for error messages and the reference page."""
    unit: str
    """Unit of the stored value, or empty."""
    doc: str
    """One sentence."""


class _Unset:
    """Type of the marker that tells "not passed" from every real value."""

    def __repr__(self) -> str:
        return "<default>"


_UNSET = _Unset()


def _setting(
    name: str,
    parse: Callable[[object], object],
    *,
    default: object,
    default_text: str,
    accepted: str,
    doc: str,
    unit: str = "",
) -> Any:
    info = Setting(PREFIX + name, default, default_text, parse, accepted, unit, doc)
    # A factory, so that the marker does not become a class attribute that looks like a value.
    return field(default_factory=lambda: _UNSET, metadata={"setting": info})


def _offload(name: str, what: str, *known: str) -> Any:
    return _setting(
        name,
        _one_of("none", refused=dict.fromkeys(known, _NO_TIER)),
        default="none",
        default_text="none",
        accepted="none",
        doc=f"Tier for {what} besides the device; {_NO_TIER}.",
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one `shard()` call. See the module docstring for the order of precedence.

    Every argument is optional and accepts the Python value or the text its environment variable accepts
    (`prefetch="512MiB"`); what is stored has the declared type. A value that is not accepted raises
    `ConfigError`. Use `replace()` rather than `dataclasses.replace`, which would mark every field as set.
    """

    offload_optimizer: Literal["none"] = _offload(
        "OFFLOAD_OPTIMIZER", "the optimizer state", "cpu", "nvme", "auto"
    )
    offload_params: Literal["none"] = _offload("OFFLOAD_PARAMS", "the sharded weights", "cpu", "nvme", "auto")
    offload_activations: Literal["none"] = _offload(
        "OFFLOAD_ACTIVATIONS", "what the forward saves for the backward", "cpu", "nvme"
    )
    param_dtype: DtypeName = _setting(
        "PARAM_DTYPE",
        _one_of("fp32", "bf16", "fp16"),
        default="fp32",
        default_text="fp32",
        accepted="fp32, bf16 or fp16",
        doc="Dtype of the gathered weights: fp32 computes in the dtype the parameters have; bf16 and fp16 "
        "cast the gathered copy, the master weights stay as they are.",
    )
    reduce_dtype: DtypeName = _setting(
        "REDUCE_DTYPE",
        _one_of("fp32", "bf16", "fp16"),
        default="fp32",
        default_text="fp32",
        accepted="fp32, bf16 or fp16",
        doc="Widest dtype in which gradients are sent: fp32 sends them as the backward made them; bf16 and fp16 "
        "round fp32 gradients first, which halves the bytes. Sums over ranks are always in fp32 on the CPU.",
    )
    reshard: ReshardPolicy = _setting(
        "RESHARD",
        _one_of("auto", "always", "never"),
        default="auto",
        default_text="auto",
        accepted="auto, always or never",
        doc="Whether the gathered weights of a unit are freed after its forward: always saves memory and "
        "gathers again for the backward; never keeps them until the backward is done; auto keeps the unit "
        "that the backward needs first and frees the others.",
    )
    prefetch: int | None = _setting(
        "PREFETCH",
        _prefetch,
        default=None,
        default_text="auto",
        accepted="auto, or a size such as 512MiB, 1.5GB or 4096 (0 turns prefetching off)",
        unit="bytes",
        doc="How many bytes of gathered weights may be in flight ahead of the unit that computes; auto is the "
        "size of a typical unit, and at least one unit.",
    )
    cpu_threads: int = _setting(
        "CPU_THREADS",
        _threads,
        default=0,
        default_text="0",
        accepted="a whole number from 0 to 4096",
        unit="threads per rank",
        doc="Threads torch uses inside one operator on the CPU; 0 leaves torch's own setting alone.",
    )
    timeout: float = _setting(
        "TIMEOUT",
        _seconds,
        default=300.0,
        default_text="300",
        accepted="a number above 0, at most 2592000 (30 days)",
        unit="seconds",
        doc="How long a collective waits for the other ranks before it raises.",
    )
    trace: str | None = _setting(
        "TRACE",
        _trace_path,
        default=None,
        default_text="",
        accepted="the path of a file",
        doc="File the event log is written to when the process ends, for chrome://tracing; with more than one rank, "
        "a dot and the rank are appended unless the path contains {rank}.",
    )
    log: LogLevel = _setting(
        "LOG",
        _one_of("debug", "info", "warning", "error"),
        default="info",
        default_text="info",
        accepted="debug, info, warning or error",
        doc="Least severe message that is printed (on stderr, where the application did not configure logging).",
    )

    explicit: frozenset[str] = field(init=False, repr=False, compare=False, default=frozenset())
    """Names of the fields that were passed to the constructor."""

    def __post_init__(self) -> None:
        explicit = set()
        for name, info in _SETTINGS.items():
            value = getattr(self, name)
            if value is _UNSET:
                value = info.default
            else:
                explicit.add(name)
                value = _parse(info, value, f"Config.{name}")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "explicit", frozenset(explicit))

    @classmethod
    def resolve(
        cls, config: Config | None = None, *, environ: Mapping[str, str] | None = None, **explicit: object
    ) -> Config:
        """Return the settings to use: `explicit`, then `config`, then the environment, then defaults.

        Args:
            config: counts for the fields that were passed to its constructor, see `Config.explicit`.
            environ: read instead of the process environment (tests).
            explicit: field values by name, strongest of all.

        The whole environment is checked, also variables that a stronger source overrides: a misspelt or
        unusable `ZEROSHARDER_*` variable is a mistake wherever it stands. An empty variable counts as not
        set.
        Every field of the result counts as set, so resolving it again changes nothing.

        Raises:
            ConfigError: an unknown name, a value that cannot be parsed, or a setting that cannot apply.
        """
        if config is not None and not isinstance(config, Config):
            raise ConfigError(
                f"config= must be a zerosharder.Config, not {type(config).__name__} ({config!r})."
            )
        for name in explicit:
            if name not in _SETTINGS:
                raise ConfigError(f"Config has no setting {name!r}.{_nearest(name, _SETTINGS)}")
        values: dict[str, Any] = {name: info.default for name, info in _SETTINGS.items()}
        values.update(_from_environment(os.environ if environ is None else environ))
        if config is not None:
            values.update((name, getattr(config, name)) for name in config.explicit)
        values.update(explicit)
        return cls(**values)

    def replace(self, **changes: Any) -> Config:
        """Return a copy with `changes`; other fields keep their value and whether they count as set."""
        kept: dict[str, Any] = {name: getattr(self, name) for name in self.explicit}
        return type(self)(**{**kept, **changes})


_SETTINGS: Mapping[str, Setting] = {
    f.name: f.metadata["setting"] for f in dataclasses.fields(Config) if "setting" in f.metadata
}


def settings() -> Mapping[str, Setting]:
    """Return every setting by field name, in the order of declaration."""
    return dict(_SETTINGS)


def _parse(info: Setting, value: object, name: str) -> object:
    try:
        return info.parse(value)
    except ValueError as error:
        reason = f" ({error})" if str(error) else ""
        raise ConfigError(f"{name}={value!r} cannot be used{reason}. Accepted: {info.accepted}.") from None


def _nearest(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else f" Known: {', '.join(known)}."


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    """Return the fields that `environ` sets, and refuse names and values that mean nothing."""
    by_variable = {info.env: name for name, info in _SETTINGS.items()}
    found: dict[str, object] = {}
    for variable in sorted(environ):
        # Names are upper case; a lower-case one is a mistake to report, not a variable of someone else.
        if not variable.upper().startswith(PREFIX) or variable in BUILD_VARIABLES:
            continue
        text = environ[variable]
        if variable in by_variable:
            if text.strip():
                name = by_variable[variable]
                found[name] = _parse(_SETTINGS[name], text, variable)
        elif variable in RESERVED_VARIABLES:
            if text.strip():
                raise ConfigError(
                    f"{variable}={text!r} cannot apply: {RESERVED_VARIABLES[variable]}. Unset the variable."
                )
        else:
            raise ConfigError(
                f"{variable}={text!r}: there is no such setting.{_nearest(variable.upper(), by_variable)}"
            )
    return found


# ---------------------------------------------------------------------------- variables of the launcher


@dataclass(frozen=True, slots=True)
class DistributedEnv:
    """What torchrun tells each process. Ranks count from 0."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int


_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def distributed_env(environ: Mapping[str, str] | None = None) -> DistributedEnv | None:
    """Return what the launcher set, or None for a process that was started on its own.

    Args:
        environ: read instead of the process environment (tests).

    Raises:
        EnvironmentSetupError: only some of the variables are set, or a value makes no sense.
    """
    environ = os.environ if environ is None else environ
    given = {name: environ.get(name, "").strip() for name in _LAUNCHER_VARIABLES}
    present = [name for name in _LAUNCHER_VARIABLES if given[name]]
    if not present:
        return None
    missing = [name for name in _LAUNCHER_VARIABLES if not given[name]]
    if missing:
        raise EnvironmentSetupError(
            f"{', '.join(missing)} not set, although {', '.join(f'{n}={given[n]}' for n in present)} is. "
            f"Start the script with torchrun, which sets all of {', '.join(_LAUNCHER_VARIABLES)}; to run as "
            f"a single process, unset {', '.join(present)}."
        )

    def number(name: str, low: int, high: int, bound: str) -> int:
        text = given[name]
        if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII) or not low <= int(text) <= high:
            raise EnvironmentSetupError(
                f"{name}={text!r} cannot be used: it must be a whole number from {low} to {bound}. Start the "
                "script with torchrun, which sets it."
            )
        return int(text)

    world_size = number("WORLD_SIZE", 1, 10**9, "10**9")
    local_world_size = number("LOCAL_WORLD_SIZE", 1, world_size, f"WORLD_SIZE = {world_size}")
    return DistributedEnv(
        rank=number("RANK", 0, world_size - 1, f"WORLD_SIZE - 1 = {world_size - 1}"),
        world_size=world_size,
        local_rank=number(
            "LOCAL_RANK", 0, local_world_size - 1, f"LOCAL_WORLD_SIZE - 1 = {local_world_size - 1}"
        ),
        local_world_size=local_world_size,
        master_addr=given["MASTER_ADDR"],
        master_port=number("MASTER_PORT", 1, 65535, "65535"),
    )

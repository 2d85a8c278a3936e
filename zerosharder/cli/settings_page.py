"""The reference page of the settings, made from `Config` so that the two cannot disagree."""

from __future__ import annotations

from zerosharder.config import RESERVED_VARIABLES, Config, Setting, settings

_HEAD = """\
<!-- Generated: python -m zerosharder settings > docs/settings.md -->

# Settings

Every setting is a field of `zerosharder.Config` and an environment variable. The first of these that sets
it wins:

1. a keyword of the call,
2. `config=`, for the fields that were passed to `Config(...)`,
3. the environment variable,
4. the default.

An empty variable counts as not set. Words and units may be written in any case. An unknown `ZEROSHARDER_*`
name, a value that cannot be parsed, and a setting that cannot apply raise `zerosharder.errors.ConfigError` at
`shard()`, also when a stronger source sets the field.

Sizes are bytes (`4096`) or carry a unit: `KB`, `MB`, `GB`, `TB` are powers of 1000, `KiB`, `MiB`, `GiB`,
`TiB` powers of 1024.

| variable | field | default |
|---|---|---|
"""

_RESERVED = """\
## Reserved names

These belong to parts that this release does not have. Setting one of them raises `ConfigError` instead of
being ignored.

"""

_BUILD = """\
## When building

`ZEROSHARDER_BUILD_EXT=0` makes `pip install` leave the native extension out. `ZEROSHARDER_BUILD_URING=0` makes
it leave out io_uring although liburing is there. They have no effect at run time.
"""


def render() -> str:
    """Return the page as Markdown, ending in a newline."""
    known = settings()
    parts = [_HEAD]
    for name, info in known.items():
        parts.append(f"| [`{info.env}`](#{info.env.lower()}) | `{name}` | {_default(info)} |\n")
    parts.append("\n")
    parts.extend(_section(name, info) for name, info in known.items())
    parts.append(_RESERVED)
    parts.extend(f"- `{name}`: {reason}.\n" for name, reason in RESERVED_VARIABLES.items())
    parts.append("\n" + _BUILD)
    return "".join(parts)


def _default(info: Setting) -> str:
    return f"`{info.default_text}`" if info.default_text else "not set"


def _section(name: str, info: Setting) -> str:
    lines = [
        f"## {info.env}\n",
        f"{info.doc}\n",
        f"- Field: `Config.{name}`, `{Config.__annotations__[name]}`",
        f"- Accepted: {info.accepted}",
        f"- Default: {_default(info)}",
    ]
    if info.unit:
        lines.append(f"- Unit: {info.unit}")
    return "\n".join(lines) + "\n\n"

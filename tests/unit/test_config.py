"""The settings: every spelling accepted or refused, who wins, and that the list does not grow by accident."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
from pathlib import Path

import pytest

from zerosharder import config as config_module
from zerosharder.config import Config, DistributedEnv, distributed_env, parse_size, settings
from zerosharder.errors import ConfigError, EnvironmentSetupError, ZerosharderError

# The option surface. A new line here is a decision: it needs its sentence in docs/settings.md.
FROZEN = {
    "offload_optimizer": ("ZEROSHARDER_OFFLOAD_OPTIMIZER", "none"),
    "offload_params": ("ZEROSHARDER_OFFLOAD_PARAMS", "none"),
    "offload_activations": ("ZEROSHARDER_OFFLOAD_ACTIVATIONS", "none"),
    "param_dtype": ("ZEROSHARDER_PARAM_DTYPE", "fp32"),
    "reduce_dtype": ("ZEROSHARDER_REDUCE_DTYPE", "fp32"),
    "reshard": ("ZEROSHARDER_RESHARD", "auto"),
    "prefetch": ("ZEROSHARDER_PREFETCH", None),
    "cpu_threads": ("ZEROSHARDER_CPU_THREADS", 0),
    "timeout": ("ZEROSHARDER_TIMEOUT", 300.0),
    "trace": ("ZEROSHARDER_TRACE", None),
    "log": ("ZEROSHARDER_LOG", "info"),
}

WORDS = {
    "offload_optimizer": ["none"],
    "offload_params": ["none"],
    "offload_activations": ["none"],
    "param_dtype": ["fp32", "bf16", "fp16"],
    "reduce_dtype": ["fp32", "bf16", "fp16"],
    "reshard": ["auto", "always", "never"],
    "log": ["debug", "info", "warning", "error"],
}

ACCEPTED = [
    *[
        (name, spelling, word)
        for name, words in WORDS.items()
        for word in words
        for spelling in (word, word.upper())
    ],
    ("param_dtype", "  bf16 ", "bf16"),
    ("prefetch", "auto", None),
    ("prefetch", "AUTO", None),
    ("prefetch", "0", 0),
    ("prefetch", "4096", 4096),
    ("prefetch", "4096B", 4096),
    ("prefetch", "512MiB", 512 * 2**20),
    ("prefetch", "512 mib", 512 * 2**20),
    ("prefetch", "1.5GB", 1_500_000_000),
    ("prefetch", "2KB", 2000),
    ("prefetch", "0.3KiB", 307),
    ("prefetch", "1TiB", 2**40),
    ("cpu_threads", "0", 0),
    ("cpu_threads", " 8 ", 8),
    ("cpu_threads", "+8", 8),
    ("cpu_threads", "4096", 4096),
    ("timeout", "300", 300.0),
    ("timeout", "0.5", 0.5),
    ("timeout", "1e3", 1000.0),
    ("trace", "out.json", "out.json"),
    ("trace", "runs/a b/out.json", "runs/a b/out.json"),
]

REFUSED = [
    *[(name, spelling) for name in WORDS for spelling in ("yes", "1", "nope", "fp64", "none,none")],
    ("offload_optimizer", "cpu"),
    ("offload_optimizer", "nvme"),
    ("offload_optimizer", "auto"),
    ("offload_params", "cpu"),
    ("offload_params", "NVMe"),
    ("offload_params", "auto"),
    ("offload_activations", "cpu"),
    ("offload_activations", "nvme"),
    ("prefetch", "-1"),
    ("prefetch", "many"),
    ("prefetch", "512M"),
    ("prefetch", "12 parsecs"),
    ("prefetch", "MiB"),
    ("prefetch", "1e9"),
    ("prefetch", "80%"),
    ("prefetch", "99999999999TiB"),
    ("prefetch", "\u0661\u0662"),  # digits for int(), not for us
    ("cpu_threads", "-1"),
    ("cpu_threads", "1.5"),
    ("cpu_threads", "four"),
    ("cpu_threads", "4097"),
    ("cpu_threads", "9" * 5000),
    ("timeout", "0"),
    ("timeout", "-3"),
    ("timeout", "nan"),
    ("timeout", "inf"),
    ("timeout", "5 minutes"),
    ("timeout", "1e300"),
    ("trace", "folder/"),
]


def test_the_list_of_settings_is_frozen():
    assert {name: (info.env, info.default) for name, info in settings().items()} == FROZEN
    fields = [f.name for f in dataclasses.fields(Config)]
    assert fields == [*FROZEN, "explicit"]


def test_defaults():
    config = Config()
    assert {name: getattr(config, name) for name in FROZEN} == {
        name: value for name, (_, value) in FROZEN.items()
    }
    assert config.explicit == frozenset()
    for info in settings().values():
        if info.default_text:
            assert info.parse(info.default_text) == info.default
        assert info.doc.endswith(".") and info.accepted


@pytest.mark.parametrize(("name", "spelling", "value"), ACCEPTED)
def test_accepted(name, spelling, value):
    variable = FROZEN[name][0]
    for config in (Config.resolve(environ={variable: spelling}), Config(**{name: spelling})):
        got = getattr(config, name)
        assert got == value and type(got) is type(value)


@pytest.mark.parametrize(("name", "spelling"), REFUSED)
def test_refused(name, spelling):
    variable = FROZEN[name][0]
    with pytest.raises(ConfigError) as caught:
        Config.resolve(environ={variable: spelling})
    message = str(caught.value)
    assert variable in message and repr(spelling) in message and settings()[name].accepted in message
    with pytest.raises(ConfigError, match=f"Config.{name}"):
        Config(**{name: spelling})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cpu_threads", True),
        ("cpu_threads", 2.0),
        ("cpu_threads", None),
        ("prefetch", False),
        ("prefetch", 1.5),
        ("prefetch", 2**63),
        ("timeout", True),
        ("timeout", None),
        ("timeout", 10**400),
        ("trace", 3),
        ("trace", ""),
        ("trace", "a\0b"),
        ("trace", b"out.json"),
        ("log", 10),
        ("reshard", True),
        ("param_dtype", None),
    ],
)
def test_refused_python_values(name, value):
    with pytest.raises(ConfigError, match=f"Config.{name}"):
        Config(**{name: value})
    with pytest.raises(ConfigError, match=name):
        Config.resolve(environ={}, **{name: value})


def test_python_values_are_stored_with_the_declared_type():
    config = Config(prefetch=10, cpu_threads=2, timeout=5, trace=Path("a") / "b.json")
    assert (config.prefetch, config.cpu_threads, config.timeout, config.trace) == (10, 2, 5.0, "a/b.json")
    assert type(config.timeout) is float
    assert Config(prefetch=None).prefetch is None


@pytest.mark.parametrize("name", ["offload_optimizer", "offload_params", "offload_activations"])
def test_offload_says_that_there_is_no_tier(name):
    with pytest.raises(ConfigError, match="no host or NVMe tier yet"):
        Config.resolve(environ={FROZEN[name][0]: "nvme"})


@pytest.mark.parametrize("name", sorted(config_module.RESERVED_VARIABLES))
def test_reserved_names_cannot_apply(name):
    with pytest.raises(ConfigError, match=f"{name}='x' cannot apply: this release"):
        Config.resolve(environ={name: "x"})
    assert Config.resolve(environ={name: ""}) == Config()


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("ZEROSHARDER_PREFETH", "ZEROSHARDER_PREFETCH"),
        ("ZEROSHARDER_PARAMS_DTYPE", "ZEROSHARDER_PARAM_DTYPE"),
        ("ZEROSHARDER_OFFLOAD_OPTIM", "ZEROSHARDER_OFFLOAD_OPTIMIZER"),
        ("ZEROSHARDER_LOG_LEVEL", "ZEROSHARDER_LOG"),
        ("ZEROSHARDER_THREADS", "ZEROSHARDER_CPU_THREADS"),
        ("zerosharder_reshard", "ZEROSHARDER_RESHARD"),
    ],
)
def test_unknown_variable_names_the_nearest(wrong, right):
    with pytest.raises(ConfigError, match=rf"{wrong}='1': there is no such setting\. Did you mean {right}\?"):
        Config.resolve(environ={wrong: "1"})


def test_unknown_names_of_fields():
    with pytest.raises(ConfigError, match="'prefetsh'. Did you mean prefetch?"):
        Config.resolve(environ={}, prefetsh=0)
    with pytest.raises(TypeError):
        Config(prefetsh=0)


def test_other_variables_are_nobodys_business():
    environ = {"PATH": "/bin", "ZEROSHARDERX": "1", "MY_ZEROSHARDER_LOG": "x", "ZEROSHARDER_BUILD_EXT": "0"}
    assert Config.resolve(environ=environ) == Config()


def test_empty_variables_count_as_not_set():
    assert Config.resolve(environ={variable: " " for variable, _ in FROZEN.values()}) == Config()


def test_precedence():
    environ = {"ZEROSHARDER_TIMEOUT": "10", "ZEROSHARDER_RESHARD": "never", "ZEROSHARDER_LOG": "debug"}
    given = Config(reshard="always", log="info")
    config = Config.resolve(given, environ=environ, log="error")
    assert config.log == "error"  # keyword over config
    assert config.reshard == "always"  # config over environment
    assert config.timeout == 10.0  # environment over default
    assert config.cpu_threads == 0  # default


def test_a_field_set_to_its_default_still_wins_over_the_environment():
    environ = {"ZEROSHARDER_RESHARD": "never", "ZEROSHARDER_PREFETCH": "0"}
    config = Config.resolve(Config(reshard="auto", prefetch=None), environ=environ)
    assert (config.reshard, config.prefetch) == ("auto", None)


def test_a_bad_variable_raises_even_if_overridden():
    with pytest.raises(ConfigError, match="ZEROSHARDER_TIMEOUT"):
        Config.resolve(Config(timeout=5), environ={"ZEROSHARDER_TIMEOUT": "soon"}, timeout=6)


def test_resolving_again_changes_nothing():
    config = Config.resolve(environ={"ZEROSHARDER_TIMEOUT": "10"})
    assert config.explicit == frozenset(FROZEN)
    assert Config.resolve(config, environ={"ZEROSHARDER_TIMEOUT": "20"}) == config


def test_config_must_be_a_config():
    with pytest.raises(ConfigError, match="not dict"):
        Config.resolve({"prefetch": 0}, environ={})  # type: ignore[arg-type]


def test_building_never_reads_the_environment(monkeypatch):
    monkeypatch.setenv("ZEROSHARDER_TIMEOUT", "nonsense")
    assert Config().timeout == 300.0
    with pytest.raises(ConfigError):
        Config.resolve()
    monkeypatch.setenv("ZEROSHARDER_TIMEOUT", "7")
    assert Config.resolve().timeout == 7.0


def test_frozen_copied_pickled_replaced():
    config = Config(prefetch=0, log="info")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.prefetch = 1  # type: ignore[misc]
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config and twin.explicit == config.explicit and hash(twin) == hash(config)
    changed = config.replace(timeout=9)
    assert (changed.prefetch, changed.log, changed.timeout) == (0, "info", 9.0)
    assert changed.explicit == {"prefetch", "log", "timeout"}
    assert "timeout=9.0" in repr(changed)


def test_parse_size_with_a_total():
    assert parse_size("80%", total=1000) == 800
    assert parse_size("12.5 %", total=1000) == 125
    assert parse_size("100%", total=7) == 7
    with pytest.raises(ValueError, match="more than 100"):
        parse_size("101%", total=1000)
    with pytest.raises(ValueError, match="no total"):
        parse_size("80%")


def test_only_config_reads_the_environment():
    package = Path(config_module.__file__).parent
    readers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "environ" in (text := path.read_text(encoding="utf-8"))
        and "os.environ" in text
        or "getenv" in text
    }
    assert readers == {"config.py"}


# ------------------------------------------------------------------------------ variables of the launcher

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_launcher_variables():
    assert distributed_env({"PATH": "/bin"}) is None
    assert distributed_env(TORCHRUN) == DistributedEnv(3, 4, 1, 2, "127.0.0.1", 29500)


def test_launcher_variables_come_from_the_process(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    assert distributed_env() is None
    monkeypatch.setitem(os.environ, "RANK", "0")
    with pytest.raises(EnvironmentSetupError):
        distributed_env()


@pytest.mark.parametrize("name", TORCHRUN)
def test_a_missing_launcher_variable_is_named(name):
    for environ in ({k: v for k, v in TORCHRUN.items() if k != name}, {**TORCHRUN, name: " "}):
        with pytest.raises(EnvironmentSetupError, match=rf"^{name} not set, although .*torchrun"):
            distributed_env(environ)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "4"),
        ("RANK", "-1"),
        ("RANK", "one"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "1e3"),
        ("LOCAL_RANK", "2"),
        ("LOCAL_WORLD_SIZE", "5"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
    ],
)
def test_a_senseless_launcher_variable_is_named(name, value):
    with pytest.raises(EnvironmentSetupError, match=f"^{name}='{value}' cannot be used"):
        distributed_env({**TORCHRUN, name: value})


def test_errors_are_what_users_expect_to_catch():
    assert issubclass(ConfigError, ZerosharderError) and issubclass(ConfigError, ValueError)
    assert issubclass(EnvironmentSetupError, ZerosharderError)

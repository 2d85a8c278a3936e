"""`python -m zerosharder`: doctor, and the settings page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zerosharder.cli import doctor, settings_page
from zerosharder.cli.main import main
from zerosharder.config import RESERVED_VARIABLES, settings
from zerosharder.offload import memory
from zerosharder.optim import native

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_committed_settings_page_is_the_generated_one(capsys):
    assert main(["settings"]) == 0
    printed = capsys.readouterr().out
    assert printed == settings_page.render()
    committed = (REPOSITORY / "docs" / "settings.md").read_text(encoding="ascii")
    assert committed == printed, "run: python -m zerosharder settings > docs/settings.md"


def test_the_settings_page_has_every_name():
    page = settings_page.render()
    for info in settings().values():
        assert f"## {info.env}\n" in page and info.doc in page and info.accepted in page
    for name in RESERVED_VARIABLES:
        assert f"`{name}`" in page


def test_doctor_as_json(capsys):
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["devices"][-1] == "cpu"
    assert facts["cores"]["usable"] >= 1
    assert 0 < facts["memory"]["available_bytes"] <= facts["memory"]["total_bytes"]
    assert facts["extension"] is memory.extension_present()
    assert "gloo" in facts["process_group_backends"]


def test_doctor_as_text(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for label in (
        "Python",
        "torch",
        "devices",
        "cores",
        "memory",
        "cgroup limit",
        "to be had",
        "to be locked",
        "huge pages",
        "extension",
        "kernels",
        "backends",
        "file I/O",
    ):
        assert f"\n{label} " in "\n" + text
    assert "ready:" in text


def test_doctor_says_what_a_missing_extension_costs(monkeypatch, capsys):
    monkeypatch.setattr(memory, "_C", None)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "extension     missing" in text and "slower to allocate" in text and "compiler" in text


def test_doctor_says_what_huge_pages_off_cost(monkeypatch, tmp_path, capsys):
    setting = tmp_path / "enabled"
    setting.write_text("always madvise [never]\n")
    monkeypatch.setattr(doctor, "_HUGE_PAGES", setting)
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "huge pages    never" in text and "slower" in text


def test_doctor_fails_on_settings_that_shard_would_refuse(monkeypatch, capsys):
    monkeypatch.setenv("ZEROSHARDER_PREFETCHES", "1")
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "problem: ZEROSHARDER_PREFETCHES" in text and "ready:" not in text


def test_wrong_commands_show_the_usage(capsys):
    for argv in ([], ["nonsense"]):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2
        assert "usage: python -m zerosharder" in capsys.readouterr().err


def test_as_a_module():
    command = [sys.executable, "-m", "zerosharder", "settings"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPOSITORY, check=True)
    assert result.stdout == settings_page.render()


def test_doctor_names_the_optimizer_kernels(capsys):
    """One line with the chosen variant; without the extension it says whose steps are used instead."""
    assert main(["doctor", "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["optimizer_kernels"]
    if native.available():
        assert kernels["chosen"] == kernels["usable"][0] and kernels["usable"][-1] == "portable"
    else:
        assert kernels is None


@pytest.mark.skipif(not native.available(), reason="the extension is not built here")
@pytest.mark.parametrize("flow", ["fp32", "mixed"])
def test_bench_optimizer(flow, capsys):
    """One row for each implementation, with positive times and the ratio to torch."""
    options = ["--elements", "70K", "--threads", "1", "--runs", "2", "--flows", flow, "--json"]
    assert main(["bench", "optimizer", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["pages"] for row in found["rows"]} == {"torch", "huge"}
    names = {"zerosharder", "zerosharder-stream", "bound", "bound-stream", "torch-fused"}
    assert names <= {row["name"] for row in found["rows"]}
    for row in found["rows"]:
        assert row["seconds"] > 0 and row["over_torch"] > 0
        if row["name"] == "torch-fused":
            assert row["over_torch"] == 1


@pytest.mark.parametrize("words", [["--elements", "0"], ["--elements", "ten"], ["--flows", "fp8"]])
def test_bench_refuses_nonsense(words, capsys):
    """Wrong sizes and flows show the usage."""
    with pytest.raises(SystemExit):
        main(["bench", "optimizer", *words])
    assert "usage:" in capsys.readouterr().err

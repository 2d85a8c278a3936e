"""Every script in benchmarks/ runs at a tiny size and tells what it promises. Times are not judged here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zerosharder

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = ("--sizes", "tiny", "--seq", "16")
MACHINE = {"cpu", "cores", "memory_gib", "kernel", "torch", "load_average_before", "load_average_after"}


def run(script: str, *options: str) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """Measurements, summary, and the table of a run with ``--json -``."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ZEROSHARDER_")}
    environment["PYTHONPATH"] = str(Path(zerosharder.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options, "--json", "-"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    *measurements, summary = (json.loads(line) for line in done.stdout.splitlines())
    assert {m["kind"] for m in measurements} == {"measurement"}
    assert summary["kind"] == "summary"
    assert summary["machine"].keys() >= MACHINE
    return measurements, summary, done.stderr


def test_step_compares_all_engines() -> None:
    options = ("--dtypes", "fp32", "--rounds", "1", "--steps", "2", "--warmup", "2")
    measurements, summary, table = run("step.py", *TINY, *options)
    engines = ["plain", "plain_pair", "ddp", "fsdp2", "zerosharder"]
    assert [m["engine"] for m in measurements] == engines
    assert [m["world"] for m in measurements] == [1, 2, 2, 2, 2]
    for m in measurements:
        assert len(m["step_s"]) == 2
        assert len(m["losses"]) == 4
        assert len(m["peak_rss_mib"]) == len(m["peak_pss_mib"]) == m["world"]
        assert all(pss < rss for pss, rss in zip(m["peak_pss_mib"], m["peak_rss_mib"], strict=True))
        assert m["tokens_per_s"] > 0
    assert summary["losses_agree"] is True
    results = {r["engine"]: r for r in summary["results"]}
    assert list(results) == engines
    for engine in ("ddp", "fsdp2", "zerosharder"):
        assert results[engine]["loss_deviation"] < 1e-4
        assert results[engine]["time_ratio"].keys() == {"plain", "ddp", "fsdp2"}
        assert results[engine]["memory_ratio"].keys() == {"plain", "ddp", "fsdp2"}
        assert f"| {engine}" in table
    assert results["fsdp2"]["time_ratio"]["fsdp2"] == results["ddp"]["memory_ratio"]["ddp"] == 1.0


def test_step_compares_a_world_of_one_with_plain() -> None:
    options = ("--world", "1", "--dtypes", "bf16", "--rounds", "3", "--steps", "1", "--warmup", "2")
    measurements, summary, _ = run("step.py", *TINY, *options)
    assert [m["engine"] for m in measurements] == ["plain", "zerosharder"] * 3  # interleaved
    assert len(measurements[0]["losses"]) == 3
    assert len(measurements[-1]["losses"]) == 1  # still alive in round three: no second start
    assert all(r["losses_agree"] for r in summary["results"])


def test_step_fails_when_losses_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _common
    import step

    monkeypatch.setattr(sys, "argv", ["step.py", "--sizes", "tiny", "--dtypes", "fp32"])

    def measured(*_: object) -> tuple[dict[str, Any], list[float]]:
        series = {e: step.Series([1.0], [1.0], [2.0, 1.0], 100.0) for e in ("plain", "ddp", "zerosharder")}
        series["zerosharder"].losses = [2.0, 1.001]
        return series, [2.0, 1.0]

    monkeypatch.setattr(step, "measure", measured)
    with pytest.raises(SystemExit, match="losses differ"):
        step.main()
    printed = capsys.readouterr().out
    assert "1.0e-03 WRONG" in printed
    assert "0.0e+00 WRONG" not in printed
    assert _common.union([(10, 20), (0, 5), (12, 25), (13, 14)]) == 20
    assert _common.ratio([1.0, 4.0, 3.0], [2.0, 2.0, 2.0]) == 1.5


def test_a_worker_that_dies_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _common

    options = ["--size", "gigantic", "--dtype", "fp32", "--batch", "1", "--seq", "8"]
    with pytest.raises(
        _common.GroupError, match=r"(?s)plain, rank 0 of 1 exited with 2 in 'start'.*gigantic"
    ):
        with _common.Group("plain", 1, options) as group:
            group.call("start")


def test_memory_accounts_for_every_byte() -> None:
    measurements, summary, table = run("memory.py", *TINY, "--engines", "fsdp2", "--steps", "2")
    assert [m["engine"] for m in measurements] == ["fsdp2", "zerosharder"]
    (result,) = summary["results"]
    held, formula = result["measured_mib"], result["formula_mib"]
    assert held.keys() - {"the rest"} == formula.keys()
    assert sum(held.values()) == pytest.approx(result["above_base_mib"]["zerosharder"])
    # Each rank pads its shards to whole pages, so a small model is a little above the formula.
    for category in ("shards", "gradients", "optimizer"):
        assert 0.9 * formula[category] <= held[category] <= 1.5 * formula[category] + 0.1
    assert formula["shards"] == formula["gradients"] == formula["optimizer"] / 2 > 0
    assert formula["activations"] > 0
    assert result["ratio_to_formula"].keys() == {"fsdp2", "zerosharder"}
    assert "activations" in table


def test_overhead_covers_both_modes_and_both_parts() -> None:
    measurements, summary, _ = run("overhead.py", "--units", "4", "--rounds", "3")
    ways = [(m["mode"], m["part"]) for m in measurements]
    assert ways == [(m, p) for m in ("default", "full") for p in ("forward_backward", "with_optimizer")]
    for m in measurements:
        assert len(m["pairs_s"]) == 3
        assert m["per_unit_us"].keys() == {"median", "min", "max"}
        assert 0 < m["plain_s"] < 60 and 0 < m["sharded_s"] < 60
    assert len(summary["results"]) == 4


def why_no_namespaces() -> str:
    """Why this machine cannot join two network namespaces; empty if it can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"needs the commands {missing} of iproute2"
    name = f"zerosharder-probe-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return done.stderr.strip() and f"no network namespaces here: {done.stderr.strip()}"


def test_slow_link_cleans_up_after_itself() -> None:
    if reason := why_no_namespaces():
        pytest.skip(reason)
    before = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    options = ("--rounds", "1", "--steps", "2", "--warmup", "1", "--engines", "fsdp2", "zerosharder")
    measurements, summary, _ = run("slow_link.py", *TINY, *options)
    assert [m["name"] for m in measurements] == ["compute", "communication", "fsdp2", "zerosharder"]
    assert measurements[2]["losses"] == pytest.approx(measurements[3]["losses"], rel=1e-4)
    (result,) = summary["results"]
    assert result["bytes_each_way"] > 900_000
    assert result["ratio_to_bound"].keys() == {"fsdp2", "zerosharder"}
    assert result["ratio_to_fsdp2"]["fsdp2"] == 1.0
    assert subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout == before

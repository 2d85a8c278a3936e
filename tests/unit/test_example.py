"""examples/train_lm.py, run as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zerosharder

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def train(folder: Path, *options: str, ranks: int = 1) -> tuple[dict[str, Any], str]:
    """The JSON report of a quick run, and what it printed."""
    report = folder / f"report-{ranks}-{len(options)}.json"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ZEROSHARDER_")}
    package = str(Path(zerosharder.__file__).parents[1])
    environment.update(OMP_NUM_THREADS="1", PYTHONPATH=package, CUDA_VISIBLE_DEVICES="")
    launcher = (*TORCHRUN, str(ranks)) if ranks > 1 else ()
    script = (str(EXAMPLES / "train_lm.py"), "--quick", "--json", str(report))
    done = subprocess.run(
        [sys.executable, *launcher, *script, *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(report.read_text()), done.stdout


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    return train(tmp_path_factory.mktemp("sharded"), "--clip", "0", ranks=2)


def test_two_sharded_ranks_have_the_losses_of_ddp_to_the_bit(
    sharded: tuple[dict[str, Any], str], tmp_path: Path
) -> None:
    # Without clipping: the norm of shards is summed in another order than that of whole gradients.
    report, _ = sharded
    reference, _ = train(tmp_path, "--clip", "0", "--unsharded", ranks=2)
    assert report["losses"] == reference["losses"]
    assert report["held_out_loss"] == reference["held_out_loss"]
    assert report["sample"] == reference["sample"]


def test_report_says_what_happened(sharded: tuple[dict[str, Any], str]) -> None:
    report, printed = sharded
    assert report["world"] == 2
    assert len(report["losses"]) == 12
    assert report["losses"][-1] < report["losses"][0] - 0.5  # it learns
    assert report["losses"][-1] == pytest.approx(report["held_out_loss"], abs=1.0)
    assert report["tokens_per_s"] == pytest.approx(12 * 4 * 64 / report["seconds"])
    assert len(report["peak_rss_mib"]) == 2
    assert all(50 < peak < 50_000 for peak in report["peak_rss_mib"])
    progress = [line for line in printed.splitlines() if line.startswith("step ")]
    assert progress and all(word in progress[-1] for word in ("loss", "lr", "tokens/s", "rss"))
    assert report["sample"] in printed
    assert "gathers" in printed  # the closing report of zs.stats


def test_one_process_trains_on_the_same_stream(sharded: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    report, _ = sharded
    alone, printed = train(tmp_path, "--clip", "0")
    assert alone["world"] == 1
    assert alone["losses"] == pytest.approx(report["losses"], rel=1e-4)
    assert alone["held_out_loss"] == pytest.approx(report["held_out_loss"], rel=1e-4)


def test_accumulation_clipping_and_bf16_together(tmp_path: Path) -> None:
    options = ("--accumulate", "2", "--clip", "0.5", "--steps", "6")
    report, _ = train(tmp_path, *options, "--dtype", "bf16", ranks=2)
    reference, _ = train(tmp_path, *options, "--unsharded")
    assert report["losses"] == pytest.approx(reference["losses"], rel=2e-2)


def test_text_is_split_by_file_and_batches_are_disjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import _text

    text, held_out = _text.load()
    assert len(text) > 8 * len(held_out) > 1_000_000
    assert all((a == b).all() for a, b in zip(_text.load(), (text, held_out), strict=True))

    seq, batch, steps = 16, 12, 9
    text = text[: seq * 50 + 1]  # 50 windows: the run crosses into a second epoch

    def stream(world: int, parts: int) -> list[list[int]]:
        ranks = [
            _text.Batches(text, seq, batch, seed=3, rank=r, world=world, parts=parts) for r in range(world)
        ]
        order = [(s, r, p) for s in range(steps) for r in range(world) for p in range(parts)]
        return [row.tolist() for s, r, p in order for row in ranks[r].get(s, p)[0]]

    whole = stream(1, 1)
    assert stream(2, 1) == stream(3, 2) == stream(4, 3) == whole
    starts = {tuple(text[i : i + seq].tolist()) for i in range(0, seq * 50, seq)}
    assert {tuple(row) for row in whole[:50]} == starts  # an epoch has every window once
    tokens, targets = _text.Batches(text, seq, batch, seed=3, rank=0, world=2).get(0)
    assert (tokens[:, 1:] == targets[:, :-1]).all()
    with pytest.raises(SystemExit, match="not divisible"):
        _text.Batches(text, seq, batch, seed=3, rank=0, world=5)

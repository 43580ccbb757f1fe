"""Methods compared at equal sparsity: figures against the reference, and the script that writes them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from blasst.core.reference import reference_attention
from blasst.evals.selector_quality import decode_quality, prefill_quality
from blasst.selectors import H2O, MInference, Quest, RocketKV, SnapKV, XAttention
from blasst.testing import heavy_tailed_inputs

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "selector_quality.py"


def real_like(length, block, seed=5):
    return heavy_tailed_inputs(1, length, length, 4, 2, 16, block=block, noise=1.0, drop=(1, 8), seed=seed)


def by_method(rows):
    return {row.method: row for row in rows}


def test_prefill_figures_are_those_of_the_reference():
    q, k, v = real_like(600, 128)
    rows = prefill_quality(q, k, v, sparsities=[0.3], name="x", selectors=[XAttention()])
    assert [row.method for row in rows] == ["oracle", "blasst", "XAttention", "XAttention + blasst"]
    row = by_method(rows)["blasst"]
    truth = reference_attention(q, k, v, causal=True, threshold=row.setting)
    dense = reference_attention(q, k, v, causal=True).out
    assert row.sparsity == pytest.approx(float(truth.counts.sparsity), abs=1e-9) and row.sparsity > 0.2
    assert row.rows == 600 * 4 and row.seqlen_k == 600
    # float32 sums of weights that add up to 1
    assert row.mass_mean == pytest.approx(float(truth.skipped_mass.mean()), abs=1e-5)
    assert row.mass_max == pytest.approx(float(truth.skipped_mass.max()), abs=1e-5)
    assert row.mass_p99 == pytest.approx(float(truth.skipped_mass.quantile(0.99)), rel=0.02)
    assert row.error == pytest.approx(float((truth.out - dense).norm() / dense.norm()), rel=1e-3)
    assert all(0 <= r.mass_mean <= r.mass_p99 <= r.mass_max <= 1 for r in rows)
    assert all(0.15 < r.sparsity <= 0.3 + 1e-9 for r in rows)


def test_decode_figures_are_those_of_the_reference():
    q, k, v = real_like(1000, 64)
    selectors = [Quest(), RocketKV(), SnapKV(), H2O()]
    rows = decode_quality(q, k, v, prompt=980, stride=5, sparsities=[0.4], name="x", selectors=selectors)
    assert len(rows) == 2 + 4 + 2
    row = by_method(rows)["blasst"]
    truths = [
        reference_attention(
            q[:, p : p + 1], k[:, : p + 1], v[:, : p + 1], phase="decode", threshold=row.setting
        )
        for p in range(980, 1000, 5)
    ]
    mass = torch.cat([truth.skipped_mass.flatten() for truth in truths])
    counts = [sum(int(getattr(t.counts, n).sum()) for t in truths) for n in ("skipped", "visited")]
    assert row.sparsity == pytest.approx(counts[0] / counts[1], abs=1e-9) and row.sparsity > 0.3
    assert row.mass_mean == pytest.approx(float(mass.mean()), abs=1e-5)
    assert row.mass_max == pytest.approx(float(mass.max()), abs=1e-5)
    assert row.rows == len(mass) == 4 * 4


def test_nothing_beats_the_oracle_in_mean_mass():
    q, k, v = real_like(600, 128, seed=6)
    rows = prefill_quality(q, k, v, sparsities=[0.3, 0.5], name="x", selectors=[XAttention(), MInference()])
    for wanted in (0.3, 0.5):
        of = by_method(r for r in rows if r.wanted == wanted)
        for method, row in of.items():
            if row.sparsity >= of["oracle"].sparsity - 1e-9:
                assert row.mass_mean >= of["oracle"].mass_mean - 1e-6, method
        assert of["oracle"].sparsity == pytest.approx(wanted, abs=0.01)


def test_leaving_nothing_out_costs_nothing():
    q, k, v = real_like(300, 128)
    for row in prefill_quality(q, k, v, sparsities=[0.0], name="x", selectors=[XAttention()]):
        assert row.sparsity == 0 and row.mass_max == 0 and row.error < 1e-6


def test_a_prompt_must_leave_positions_to_decode():
    q, k, v = real_like(64, 64)
    with pytest.raises(ValueError, match=r"^prompt: got 64, want 1 to 63"):
        decode_quality(q, k, v, prompt=64, sparsities=[0.5], name="x")


def test_the_script_appends_one_line_per_method_and_sparsity(tmp_path):
    q, k, v = real_like(260, 64)
    torch.save({"q": q, "k": k, "v": v, "softmax_scale": 0.25, "name": "tiny"}, tmp_path / "qkv.pt")
    out = tmp_path / "rows.jsonl"
    arguments = [str(tmp_path / "qkv.pt"), "--out", str(out), "--sparsities", "0.3", "--steps", "2"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 7 + 8
    assert {line["phase"] for line in lines} == {"prefill", "decode"}
    for line in lines:
        assert line["schema"] == 1 and line["inputs"] == "tiny" and line["environment"]["torch"]
        assert str(tmp_path) not in json.dumps(line)

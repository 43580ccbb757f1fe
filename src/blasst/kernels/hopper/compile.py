"""CUDA C++ to cubin by NVRTC, kept in a folder on disk; loading into the current CUDA context.

The folder is $BLASST_CACHE_DIR, default ~/.cache/blasst; a file is named by the hash of everything that the
cubin depends on, so nothing there can be stale and all of it may be deleted. It holds the cubin's hash, then
the cubin: a file that was cut off is compiled again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

#: Options of every kernel. Contraction stays off: dense and threshold 0 must round alike.
ARCH = "sm_90a"

#: Shared memory that a CTA may have.
SHARED_BYTES = 227 * 1024

#: Bytes of the hash in front of a cubin on disk.
_DIGEST = hashlib.sha256().digest_size


def sources() -> dict[str, str]:
    """Texts of the CUDA files beside this module, by name."""
    files = sorted([*FOLDER.glob("*.cu"), *FOLDER.glob("*.cuh")])
    return {path.name: path.read_text(encoding="utf-8") for path in files}


def cache_folder() -> Path | None:
    """Where compiled kernels are kept; None where a user without a home names no folder."""
    chosen = os.environ.get("BLASST_CACHE_DIR")
    try:
        return Path(chosen) if chosen else Path.home() / ".cache" / "blasst"
    except RuntimeError:
        return None


def compiler_version() -> str:
    """Version of NVRTC."""
    major, minor = _compiler_version()
    return f"{major}.{minor} (cuda-bindings {importlib.metadata.version('cuda-bindings')})"


def compiler_major() -> int:
    """CUDA that NVRTC belongs to."""
    return _compiler_version()[0]


def _compiler_version() -> tuple[int, int]:
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    if int(status) != 0:
        raise RuntimeError(f"NVRTC does not answer: {status}")
    return major, minor


def compile_source(file: str, macros: Mapping[str, int], *, verbose: bool = False) -> tuple[bytes, str]:
    """Compile a CUDA file of this folder.

    Args:
        file: its name.
        macros: what it needs defined.
        verbose: also ask the assembler for registers, shared memory and spills.

    Returns:
        (cubin, log of the compiler).

    Raises:
        RuntimeError: it does not compile.
    """
    import io

    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=file,
        arch=ARCH,
        std="c++17",
        fma=False,
        include_path=str(FOLDER),
        define_macro=[(name, str(value)) for name, value in sorted(macros.items())],
        ptxas_options=["-v"] if verbose else None,
    )
    log = io.StringIO()
    try:
        program = Program(sources()[file], "c++", options)
        code = program.compile("cubin", logs=log)
    except Exception as error:
        text = f"{file} with {dict(macros)} does not compile:\n{error}\n{log.getvalue()}"
        raise RuntimeError(text) from error
    return bytes(code.code), log.getvalue()


def cached_cubin(file: str, macros: Mapping[str, int]) -> bytes:
    """compile_source, from disk where it was done before."""
    folder = cache_folder()
    if folder is None:
        return compile_source(file, macros)[0]
    key = hashlib.sha256(repr((file, sorted(macros.items()), sources(), ARCH, compiler_version())).encode())
    path = folder / f"{file}-{key.hexdigest()[:32]}.cubin"
    with suppress(OSError):
        content = path.read_bytes()
        if hashlib.sha256(content[_DIGEST:]).digest() == content[:_DIGEST]:
            return content[_DIGEST:]
    cubin, _ = compile_source(file, macros)
    with suppress(OSError):  # a folder that cannot be written: compile again next time
        _write(path, hashlib.sha256(cubin).digest() + cubin)
    return cubin


def _write(path: Path, content: bytes) -> None:
    """A file that is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            part = file.name
            file.write(content)
        os.replace(part, path)
    except OSError:
        if part is not None:
            Path(part).unlink(missing_ok=True)
        raise


def checked(result: tuple[Any, ...]) -> Any:
    """The value of a CUDA driver call.

    Raises:
        RuntimeError: the call failed.
    """
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA driver: {status.name}")
    return values[0] if values else None


@cache
def load_kernel(device: int, file: str, name: str, macros: tuple[tuple[str, int], ...]) -> int:
    """A kernel in the current context, allowed all the dynamic shared memory there is.

    Args:
        device: index of the current device (each has its own copy).
        file: CUDA file of this folder.
        name: of the kernel in it.
        macros: what the file needs defined.

    Returns:
        CUfunction.
    """
    from cuda.bindings import driver

    module = checked(driver.cuModuleLoadData(cached_cubin(file, dict(macros))))
    function = checked(driver.cuModuleGetFunction(module, name.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuFuncSetAttribute(function, attribute, SHARED_BYTES))
    return int(function)

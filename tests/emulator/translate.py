"""Preprocessed CUDA C++ to C++ that g++ takes: `asm` becomes calls of ptx.h.

Every instruction form is listed here; one that is not ends the translation with its text. To add one, write a
function in ptx.h and name it in INSTRUCTIONS.
"""

from __future__ import annotations

import re

_COPY = "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
_ZEROS = " ".join(f"mov.f32 %{i}, 0f00000000;" for i in range(4))

#: Text of an asm statement, white space made single -> function of ptx.h, which takes the operands in their
#: order ("nothing" takes none of them).
INSTRUCTIONS = {
    "": "nothing",
    "mbarrier.init.shared::cta.b64 [%0], %1;": "mbarrier_init",
    "mbarrier.arrive.shared::cta.b64 _, [%0];": "mbarrier_arrive",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;": "mbarrier_arrive_expect_tx",
    "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}": (
        "mbarrier_try_wait"
    ),
    "fence.mbarrier_init.release.cluster;": "nothing",
    "fence.proxy.async.shared::cta;": "async_proxy_fence",
    "bar.sync %0, %1;": "bar_sync",
    "bar.arrive %0, %1;": "bar_arrive",
    "{.reg .pred p, q; setp.ne.s32 p, %1, 0; bar.red.and.pred q, %2, %3, p; selp.s32 %0, 1, 0, q;}": (
        "bar_red_and"
    ),
    "setmaxnreg.dec.sync.aligned.u32 %0;": "setmaxnreg_dec",
    "setmaxnreg.inc.sync.aligned.u32 %0;": "setmaxnreg_inc",
    "prefetch.tensormap [%0];": "nothing",
    _COPY + " [%0], [%1, {%3, %4, %5, %6}], [%2];": "tensor_load",
    _COPY + ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;": "tensor_load_hinted",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];": "bulk_load",
    "wgmma.fence.sync.aligned;": "nothing",
    "wgmma.commit_group.sync.aligned;": "wgmma_commit",
    "wgmma.wait_group.sync.aligned %0;": "wgmma_wait",
    "ex2.approx.ftz.f32 %0, %1;": "ex2_approx_ftz",
    "lg2.approx.f32 %0, %1;": "lg2_approx",
    "max.NaN.f32 %0, %1, %2;": "max_nan",
    "cvt.rn.f16x2.f32 %0, %1, %2;": "cvt_f16x2",
    "cvt.rn.bf16x2.f32 %0, %1, %2;": "cvt_bf16x2",
    "{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}": "unpack_f16x2",
    "{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, a;}": "widen_e4m3x2",
    "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};": "stmatrix_x2_trans",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];": "ldmatrix_x4_trans",
    "ld.shared.v2.b32 {%0, %1}, [%2];": "ld_shared_v2",
    "ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];": "ld_shared_v4",
    "st.shared.b32 [%0], %1;": "st_shared",
    "st.shared.v4.b32 [%0], {%1, %1, %1, %1};": "st_shared_v4_same",
    "st.shared.v4.b32 [%0], {%1, %2, %3, %4};": "st_shared_v4",
    "ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];": "ld_global_v4",
    "st.global.v4.b32 [%0], {%1, %2, %3, %4};": "st_global_v4",
    "st.v2.b32 [%0], {%1, %2};": "st_global_v2",
    "st.b32 [%0], %1;": "st_global",
    f"{{.reg .pred p; setp.ne.s32 p, %5, 0; {_ZEROS} @p ld.v4.f32 {{%0, %1, %2, %3}}, [%4];}}": "ld_v4_if",
    "{.reg .pred p; setp.ne.s32 p, %3, 0; mov.f32 %0, 0f00000000; mov.f32 %1, 0f00000000;"
    " @p ld.v2.f32 {%0, %1}, [%2];}": "ld_v2_if",
    "st.relaxed.gpu.global.u64 [%0], %1;": "st_relaxed",
    "ld.relaxed.gpu.global.u64 %0, [%1];": "ld_relaxed",
    "atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;": "atom_add",
}

#: wgmma with a predicate for "accumulate"; a in four registers or named by a descriptor.
_WGMMA = re.compile(
    r"\{\.reg \.pred p; setp\.ne\.b32 p, %(?P<accumulate>\d+), 0; ?"
    r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<columns>\d+)k\d+\.(?:f32|s32)\.(?P<element>\w+)\.(?P=element)"
    r" \{(?P<d>[%\d, ]+)\}, (?:\{(?P<registers>[%\d, ]+)\}|%(?P<a>\d+)), %(?P<b>\d+), p"
    r"(?:, 1, 1)?(?:, %(?P<first>\d+))?(?:, %(?P<second>\d+))?;\}"
)

_STRING = re.compile(r'\s*"((?:[^"\\]|\\.)*)"')
_ASM = re.compile(r"\basm\b(?:\s+volatile\b)?\s*\(")
_SHARED = re.compile(r"\bextern\s+__shared__\s+(?:__align__\(\d+\)\s+)?(\w+)\s+(\w+)\s*\[\s*\]\s*;")
_LINE_MARK = re.compile(r"^# \d+ .*$", re.MULTILINE)


class UnknownInstruction(ValueError):
    """An asm statement that no function of ptx.h stands for."""


def translate(text: str) -> str:
    """C++ for a preprocessed kernel file.

    Raises:
        UnknownInstruction: an asm statement is not listed; the message has its text.
        ValueError: shared memory that is not one dynamic array.
    """
    text = _SHARED.sub(r"\1* const \2 = reinterpret_cast<\1*>(emulated::shared_memory());", text)
    if "__shared__" in text:
        raise ValueError("__shared__: only one dynamic array, extern __shared__ T name[], is emulated")
    parts, at = [], 0
    while found := _ASM.search(text, at):
        end = _closing(text, found.end())
        parts += [text[at : found.start()], _call(text[found.end() : end])]
        at = end + 1
    return "".join([*parts, text[at:]])


def _closing(text: str, at: int) -> int:
    """Index of the parenthesis that closes what was opened before `at`."""
    depth = 1
    while depth:
        if text[at] == '"':
            at = _STRING.match(text, at).end()
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at - 1


def _call(statement: str) -> str:
    """C++ in place of asm(statement)."""
    lines = "\n" * statement.count("\n")  # what follows keeps its line
    code, at = "", 0
    statement = _LINE_MARK.sub("", statement)
    while found := _STRING.match(statement, at):
        code, at = code + found.group(1), found.end()
    operands = _operands(statement[at:])
    code = re.sub(r"\s+", " ", code).strip()
    if found := _WGMMA.fullmatch(code):
        return _product(found, operands) + lines
    if code not in INSTRUCTIONS:
        raise UnknownInstruction(f"asm {code!r} is not in INSTRUCTIONS of {__file__}")
    name = INSTRUCTIONS[code]
    return f"emulated::{name}({'' if name == 'nothing' else ', '.join(operands)})" + lines


def _operands(text: str) -> list[str]:
    """The C++ expressions of outputs and inputs."""
    expressions, at = [], 0
    while found := re.search(r'"[^"]*"\s*(\()?', text[at:]):
        if found.group(1) is None:  # a clobber
            break
        begin = at + found.end()
        end = _closing(text, begin)
        expressions.append(f"({text[begin:end].strip()})")
        at = end + 1
    return expressions


def _product(form: re.Match[str], operands: list[str]) -> str:
    """The call for a wgmma."""
    registers = [operands[int(i)] for i in re.findall(r"\d+", form["d"])]
    immediates = [form[name] for name in ("first", "second") if form[name] is not None]
    values = [operands[int(i)] for i in immediates]
    if form["registers"] is None:
        a, own = "nullptr", f"{operands[int(form['a'])]}"
        transpose_a, transpose_b = values if values else ("0", "0")
    else:
        words = [operands[int(i)] for i in re.findall(r"\d+", form["registers"])]
        a, own = "emulated_a", "0"
        transpose_a, transpose_b = "0", values[0] if values else "0"
    declared = f"const emulated::u32 emulated_a[] = {{{', '.join(words)}}}; " if own == "0" else ""
    return (
        f"do {{ void* const emulated_d[] = {{{', '.join('&' + r for r in registers)}}}; {declared}"
        f"emulated::wgmma({form['columns']}, emulated::Element::{form['element']}, emulated_d, {a}, {own}, "
        f"{operands[int(form['b'])]}, {operands[int(form['accumulate'])]}, {transpose_a}, {transpose_b}); }} "
        "while (0)"
    )

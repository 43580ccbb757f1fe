"""What the assembler says of a build: registers, shared and local memory, and remarks that cost speed."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Resources:
    """One compiled kernel.

    Attributes:
        registers: per thread at launch (warps then trade them by setmaxnreg).
        shared: bytes of static shared memory; what a launch asks for comes on top.
        stack: bytes of stack frame.
        spill_stores: bytes.
        spill_loads: bytes.
        local: bytes of local memory.
        remarks: ptxas remarks C75xx: wgmma serialised, setmaxnreg ignored.
    """

    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int
    local: int
    remarks: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """Whether nothing leaves the registers and no remark was made."""
        return not (self.stack or self.spill_stores or self.spill_loads or self.local or self.remarks)


def read_log(log: str) -> Resources:
    """Resources of the one kernel in a verbose compiler log.

    Args:
        log: what `compile_source(..., verbose=True)` returned with the cubin.

    Raises:
        ValueError: the log does not speak of one kernel.
    """
    if len(re.findall(r"Compiling entry function", log)) != 1:
        raise ValueError(f"log: got {log!r}, want ptxas -v of one kernel")

    def number(pattern: str, needed: bool = False) -> int:
        found = [int(text) for text in re.findall(pattern, log)]
        if needed and not found:
            raise ValueError(f"log: got {log!r}, want it to match {pattern!r}")
        return sum(found)

    remarks = [
        line.strip() for line in log.splitlines() if re.search(r"\bC75\d\d\b|setmaxnreg|serializ", line)
    ]
    return Resources(
        registers=number(r"Used (\d+) registers", needed=True),
        shared=number(r"(\d+) bytes smem"),
        stack=number(r"(\d+) bytes stack frame", needed=True),
        spill_stores=number(r"(\d+) bytes spill stores", needed=True),
        spill_loads=number(r"(\d+) bytes spill loads", needed=True),
        local=number(r"(\d+) bytes lmem"),
        remarks=tuple(remarks),
    )

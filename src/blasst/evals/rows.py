"""Measured rows in a JSONL file that a stopped run can go on with, and the time that a run may take."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class RowFile:
    """Rows told apart by some of their fields; each is written as soon as it is measured.

    Attributes:
        path: the file; a torn last line, which a killed run leaves, is cut off.
        rows: all rows, read and appended.
    """

    def __init__(self, path: Path, key_fields: Sequence[str], common: Mapping[str, Any]) -> None:
        """Read what is there.

        Args:
            path: JSONL file; need not exist.
            key_fields: fields that tell rows apart.
            common: fields that every new row gets, such as the model and the environment.
        """
        self.path, self.key_fields, self.common = path, tuple(key_fields), dict(common)
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                path.write_bytes(whole)
            self.rows = [json.loads(line) for line in whole.splitlines()]
        self._keys = {self.key(row) for row in self.rows}

    def key(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        """What tells a row from others."""
        return tuple(row.get(name) for name in self.key_fields)

    def has(self, **fields: Any) -> bool:
        """Whether there is a row with these key fields."""
        return self.key(fields) in self._keys

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row.

        Args:
            row: its fields, without the common ones.

        Raises:
            ValueError: a row with the same key is there.
        """
        full = {**self.common, **row}
        if self.key(full) in self._keys:
            raise ValueError(f"{self.path}: there is a row of {dict(zip(self.key_fields, self.key(full)))}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(full, allow_nan=False) + "\n")
        self.rows.append(full)
        self._keys.add(self.key(full))


class TimeLimit:
    """Minutes that a run may take; work begins only while some are left.

    Attributes:
        end: time.monotonic() of the end; None = no limit.
    """

    def __init__(self, minutes: float | None) -> None:
        """Begin.

        Args:
            minutes: None = no limit.
        """
        self.start = time.monotonic()
        self.end = None if minutes is None else self.start + 60 * minutes

    @property
    def over(self) -> bool:
        """Whether nothing more should begin."""
        return self.end is not None and time.monotonic() > self.end

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.start

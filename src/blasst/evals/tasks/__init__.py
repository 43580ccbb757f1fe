"""The 13 task kinds of RULER (arXiv:2404.06654), in our own words and with generated facts only."""

from __future__ import annotations

from blasst.evals.tasks import cwe, fwe, niah, qa, vt
from blasst.evals.tasks.item import CountTokens, Item, Task

#: Every task kind by name, in RULER's order.
TASKS: dict[str, Task] = {
    task.name: task for task in (*niah.TASKS, *vt.TASKS, *cwe.TASKS, *fwe.TASKS, *qa.TASKS)
}

__all__ = ["TASKS", "CountTokens", "Item", "Task"]

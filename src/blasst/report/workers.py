"""Jobs on one small model in several processes, one thread each: attention on a CPU scales better so.

With more threads than free cores OpenMP's waiting threads spin against each other: a calibration of one
minute then takes more than ten (seen on 2 cores with two busy neighbours).
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from blasst.core.profile import ProfileWarning
from blasst.evals.models import LoadedModel, load_model

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Job:
    """A call of function(loaded, **arguments) in a worker; both must be picklable.

    Attributes:
        label: for the progress display.
        function: a function of a module, taking the loaded model first.
        arguments: its keyword arguments.
    """

    label: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)


_loaded: LoadedModel | None = None


def _start(folder: Path, name: str, threads: int) -> None:
    """Load the model once in a worker."""
    global _loaded
    from transformers.utils import logging

    logging.set_verbosity_error()
    warnings.simplefilter("ignore", ProfileWarning)  # the parent says once what is out of reach
    torch.set_num_threads(threads)
    _loaded = load_model(folder)._replace(name=name)


def _run(job: Job) -> Any:
    """Run one job in a worker."""
    assert _loaded is not None
    return job.function(_loaded, **job.arguments)


class WorkerPool:
    """Processes that hold the same model; use as a context manager."""

    def __init__(self, folder: Path, name: str, *, workers: int, threads: int = 1) -> None:
        """Start no process yet; they start with the first jobs.

        Args:
            folder: model folder that transformers saved.
            name: name of the model for reports.
            workers: processes.
            threads: torch threads of each.
        """
        self._pool = ProcessPoolExecutor(
            workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(folder, name, threads),
        )

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, jobs: Sequence[Job], progress: Progress | None = None) -> list[Any]:
        """Run jobs, in the order given as workers get free.

        Args:
            jobs: longest first wastes least time.
            progress: called with jobs done, jobs in all, and the label of the last that ended.

        Returns:
            Results in the order of jobs.

        Raises:
            Exception: what a job raised; the others are cancelled.
        """
        futures = {self._pool.submit(_run, job): index for index, job in enumerate(jobs)}
        results: dict[int, Any] = {}
        if progress is not None:
            progress(0, len(jobs), jobs[0].label if jobs else "nothing to do")
        for future in as_completed(futures):
            index = futures[future]
            results[index] = future.result()
            if progress is not None:
                progress(len(results), len(jobs), jobs[index].label)
        return [results[index] for index in range(len(jobs))]

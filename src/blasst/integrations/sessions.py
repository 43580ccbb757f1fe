"""A session on a model for a while, in place of the one that is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar


class Activatable(Protocol):
    """A session that can be put on its model and taken off it."""

    def activate(self) -> None:
        """Put it on."""

    def deactivate(self) -> None:
        """Take it off."""


SessionT = TypeVar("SessionT", bound=Activatable)


@contextmanager
def in_place_of(previous: Activatable | None, make: Callable[[], SessionT]) -> Iterator[SessionT]:
    """Another session is active inside; afterwards the model is as before, also if it could not be made.

    Args:
        previous: the active session of the model, or None.
        make: makes the other one, of a model without an active session.
    """
    if previous is not None:
        previous.deactivate()
    session = None
    try:
        session = make()
        session.activate()
        yield session
    finally:
        if session is not None:
            session.deactivate()
        if previous is not None:
            previous.activate()

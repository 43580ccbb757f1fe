"""Exceptions of the library; each message names the argument, what came and what is wanted."""

from __future__ import annotations


class BlasstError(Exception):
    """Base class of every exception that this library defines."""


class UnsupportedError(BlasstError, NotImplementedError):
    """The request is valid, but no available kernel can serve it; never replaced by a silent dense run."""


class ProfileError(BlasstError, ValueError):
    """A calibration profile or an interchange file is broken, of an unknown version, or does not match."""


class CalibrationError(BlasstError, ValueError):
    """The samples cannot support a calibration (too short, too few, or the target is unreachable)."""

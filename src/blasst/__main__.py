"""Entry point of the command line: python -m blasst, and the blasst script."""

from __future__ import annotations

import sys

from blasst._version import __version__

_MISSING = 'The blasst command line needs typer and rich: pip install "blasst[cli]"'


def main() -> None:
    """Run the command line; --version works without its extra packages.

    Raises:
        SystemExit: always; 0 = done, 1 = failed, 2 = bad arguments.
    """
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"blasst {__version__}\n")
        raise SystemExit(0)
    try:
        from blasst.cli import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(_MISSING + "\n")
        raise SystemExit(2) from None
    raise SystemExit(run())


if __name__ == "__main__":
    main()

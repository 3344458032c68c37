"""`python -m resolute COMMAND`: the same as `resolute COMMAND`."""

from __future__ import annotations

from resolute.cli import run

if __name__ == "__main__":
    run()

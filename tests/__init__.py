"""The tests. `ROOT` is the repository; `SHARED_DATA` lies beside it where real photos are at hand."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"

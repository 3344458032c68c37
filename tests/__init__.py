"""The test suite. `ROOT` is the repository; `SHARED_DATA`, beside it, holds real photos where they are available."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"

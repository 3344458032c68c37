"""`make` with an environment that only records its calls."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests import ROOT

# Replaces the environment's Python: records its arguments as one JSON list per line.
STUB = f"""#!{sys.executable} -IS
import json, sys
with open("calls", "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
"""


class Make:
    """`make` in a copy of the checkout that holds only the Makefile and a finished environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "locks").mkdir()
        for name in ("Makefile", "pyproject.toml", "locks/cuda12.txt", "locks/cuda13.txt"):
            shutil.copy2(ROOT / name, folder / name)
        (folder / ".venv" / "bin").mkdir(parents=True)
        (folder / ".venv" / "bin" / "python").write_text(STUB)
        (folder / ".venv" / "bin" / "python").chmod(0o755)
        for stamp in (".resolute-ready", ".resolute-tools"):
            (folder / ".venv" / stamp).touch()

    def __call__(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        # why no other variables: `make test` exports its own SHARDS and RECIPE to the tests
        env = {"PATH": os.environ["PATH"], **variables}
        return subprocess.run(["make", *words], cwd=self.folder, env=env, capture_output=True, text=True, check=False)

    def calls(self, *words: str, **variables: str) -> list[list[str]]:
        """The arguments of each Python process that `make` has started."""
        done = self(*words, **variables)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]

    def refusal(self, *words: str) -> str:
        """The error of a `make` that starts nothing."""
        done = self(*words)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1, done.stderr
        assert not (self.folder / "calls").exists()
        return done.stderr

"""The inputs of a run of prep, listed in this process as `resolute shards` lists them, without converting any photo."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError
from resolute.prep.listing.checks import input_warnings
from resolute.prep.listing.database import Database
from resolute.prep.listing.inputs import Inputs, list_sources, split_inputs
from resolute.prep.listing.wording import describe_ignored
from resolute.prep.settings import Settings

__all__ = ["Listed", "list_inputs", "refusal"]


@dataclass(frozen=True, kw_only=True)
class Listed:
    """`ignored` is in words; `said` are the lines that describe the targets and the warnings."""

    inputs: Inputs
    ignored: str
    said: str

    @property
    def classes(self) -> list[str]:
        return list(self.inputs.classes)


def list_inputs(work: Path, **settings: Any) -> Listed:
    """The inputs of these settings of prep (paths may be of any type); `work` is a folder for the tables.

    Raises `ResoluteError` as prep does before it converts anything.
    """
    work.mkdir(exist_ok=True)
    texts: dict[str, Any] = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    all_settings = Settings(**{"out": str(work / "out"), "val_frac": 0, **texts})
    database = Database(Path(tempfile.mkdtemp(dir=work)))
    sources, ignored = list_sources(all_settings, database, work / "scan_cache")
    inputs = split_inputs(all_settings, sources, ignored)
    said = [*inputs.about, *input_warnings(all_settings, inputs)]
    return Listed(inputs=inputs, ignored=describe_ignored(inputs.ignored), said="\n".join(said))


def refusal(work: Path, **settings: Any) -> str:
    """The message with which prep refuses these settings; "" if it does not."""
    try:
        list_inputs(work, **settings)
    except ResoluteError as error:
        return str(error)
    return ""

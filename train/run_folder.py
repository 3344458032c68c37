"""Resolves RUN to a folder, in the same way for all commands.

RUN is a name below `runs/` (`first`, `group/first`), a path (`runs/first`, `/data/first`, `./first`), or, where a
command reads a checkpoint, one of its `.pt` files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from resolute.errors import ResoluteError
from resolute.files import check_output, used_folder, write_errors
from resolute.urls import without_credentials

__all__ = ["RUNS", "default_run", "existing_run", "new_run", "page_file"]

RUNS = Path("runs")
_LISTED = 10
_NO_NAME = ("", ".", "..")


def existing_run(target: str, *, runs: Path = RUNS) -> Path:
    """The folder of a run or of several folds, or a checkpoint file. Raises `ResoluteError` listing existing runs."""
    with _places(target, runs) as places:
        for path in places:
            if _is_run(path) or path.is_file():
                return path
    raise ResoluteError(
        f"{target}: no run or checkpoint, got nothing at {' or '.join(map(str, places))}; {_choices(runs)}"
    )


def default_run(recipe: Path, shards: str | Path) -> str:
    """The name of a run without RUN: that of its recipe and of its set, `rn50-imagenet` for example.

    A set's name is that of its folder, or of the one above if its folder is called `shards`. If recipe and set have the
    same name, it stands once.
    """
    path = without_credentials(str(shards)).rpartition("://")[2]
    folders = [part for part in path.split("/") if part not in _NO_NAME]
    if folders[-1:] == ["shards"] and len(folders) > 1:
        folders.pop()
    return recipe.stem if folders[-1:] in ([], [recipe.stem]) else f"{recipe.stem}-{folders[-1]}"


def new_run(target: str, *, runs: Path = RUNS) -> Path:
    """The folder to train in, of an existing or a new run; not created here. Raises `ResoluteError`."""
    with _places(target, runs) as places:
        # why: only a target that looks like a path may lie outside `runs`
        path = next((place for place in places if "/" in target and _is_run(place)), places[0])
        if path.is_file():
            raise ResoluteError(f"RUN: got {target}, which is a file, expected a run's name; choose another")
        return path


@contextlib.contextmanager
def page_file(out: Path | None, name: str, *, runs: Path = RUNS) -> Iterator[Path]:
    """The HTML file that a command writes in the block: `out`, or `name` below `runs`, which is created for it.

    A command that fails leaves no empty `runs`. Raises `ResoluteError` as `check_output`.
    """
    path = out or runs / name
    with contextlib.ExitStack() as stack:
        if out is None:
            with write_errors(runs):
                stack.enter_context(used_folder(runs))
        check_output(path, setting="--out", suffixes=(".html",), named=out is not None)
        yield path


@contextlib.contextmanager
def _places(target: str, runs: Path) -> Iterator[list[Path]]:
    """Candidate paths of `target`, most likely first; a new run uses the first.

    Raises `ResoluteError` if they are not folders of one run, or the block cannot read them.
    """
    path, expected = Path(target), f"expected the name or path of a run; {_choices(runs)}"
    # why: `runs/x` must not become runs/runs/x, and the run `demo` is not a folder `demo` in the working directory
    is_path = path.is_absolute() or target.startswith(("./", "../")) or path.is_relative_to(runs)
    places = [path] if is_path else [runs / path, path]
    try:
        here, parent = Path.cwd(), runs.resolve()
        taken = {here, *here.parents, parent, *parent.parents}
        if not target.strip() or target.startswith("-") or any(place.resolve() in taken for place in places):
            raise ResoluteError(f"RUN: got {target.strip() or 'nothing'}, {expected}")
        yield places
    except (OSError, RuntimeError, ValueError) as error:  # also a loop of links, a name that is too long
        reason = error.strerror if isinstance(error, OSError) else error
        raise ResoluteError(f"RUN: got {target[:80]}, which cannot be read ({reason}), {expected}") from None


def _is_run(path: Path) -> bool:
    return any(any(path.glob(pattern)) for pattern in ("run.jsonl", "*.pt", "fold-*/run.jsonl", "fold-*/*.pt"))


def _choices(runs: Path) -> str:
    try:
        names = sorted(
            str(path.relative_to(runs))
            for path in [*runs.glob("*"), *runs.glob("*/*")]
            if not path.name.startswith(("fold-", ".")) and _is_run(path)
        )
    except OSError:
        names = []
    if not names:
        return f"there are no runs in {runs} yet: train one, or name the path of a run"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"runs in {runs}: {', '.join(names[:_LISTED])}{more}"

"""Shared code of the examples: options of the command line, the plan, and exit statuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from resolute import Augment, Plan, ResoluteError, ShardSet, Stage
from resolute.cli import program
from resolute.settings import described, setting, settings

__all__ = ["Options", "ResumingOptions", "command", "open_plan"]


@settings("")
class Options:
    shards: Annotated[str, described("shard set (folder or URL)", min_length=1)]
    res: tuple[Annotated[int, Field(ge=1)], ...] = setting(
        (), "resolutions, px, one per stage (default: the two smallest of the set)"
    )
    device: str = setting("cpu", "cpu, cuda or cuda:N")
    epochs: int = setting(2, "epochs of each stage", ge=1)
    batch_size: int = setting(64, "samples per step, over all processes", ge=1)


@settings("")
class ResumingOptions(Options):
    checkpoint: Path = setting(
        Path("example-run"), "checkpoint to write after each epoch, and to resume from if it exists"
    )
    stop: int | None = setting(None, "end after this many epochs; a later run continues", ge=1)


AnyOptions = TypeVar("AnyOptions", bound=Options)


def open_plan(options: Options) -> Plan:
    """A plan with a stage for each resolution of the options.

    Raises `ResoluteError` if the set lacks one, or has labels or values instead of classes.
    """
    shards = ShardSet.open(options.shards, resolutions=options.res or None)
    if shards.target.kind != "class":
        raise ResoluteError(
            f"{options.shards}: got {shards.target.kind} as targets, expected a class per sample; the "
            "examples train classifiers: use `resolute train`, or another set"
        )
    resolutions = options.res or shards.resolutions[:2]
    stages = [Stage(res=res, epochs=options.epochs, batch_size=options.batch_size) for res in resolutions]
    return Plan(shards, stages, augment=Augment(mixup_alpha=0.2, cutmix_alpha=1.0))


def command(
    name: str, train: Callable[[AnyOptions], Any], options: type[AnyOptions], about: str | None
) -> Callable[..., int]:
    """The command line of the example `name`: calls `train` with its options, and returns the exit status.

    about: the text of its `--help`. Its words are by default those of the process. A `ResoluteError` is printed as one
    line on stderr, with status 2.
    """
    paragraphs = [" ".join(part.split()) for part in (about or "").split("\n\n")]

    def work(chosen: AnyOptions) -> None:
        train(chosen)

    def main(words: Sequence[str] | None = None) -> int:
        module = f"python -m resolute.pipeline.examples.{name}"
        return program(module, options, work, words, help="\n\n".join(paragraphs), positional="shards")

    return main

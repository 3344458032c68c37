"""`resolute COMMAND`: all commands, and how their settings become options of the command line.

An option is a field of the command's settings class (`resolute.settings`): its name with "-" for "_", its help, default
and check. A command's classes and program are imported only when it is named, so that `--help` and mistakes are
answered at once. Exit status: 0 done, 1 for a check that found a fault, 2 for a problem that the one line on stderr
explains, 128 + the signal's number if interrupted.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

from . import __version__, console
from .errors import ResoluteError, as_typed, check_stack, from_os_error

if TYPE_CHECKING:
    from cyclopts import App

__all__ = ["COMMANDS", "main", "program", "run", "wandb_hidden"]

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: where its settings class and its program are, as "module:name" below `resolute`."""

    help: str
    options: str
    program: str  # called with an instance of `options`; returns the exit status, or None for 0
    positional: str = ""  # the option that may be given without its name
    more: str = ""  # text after the help
    epilogue: str = ""  # "module:name" of a function that returns more text after the help
    # the command to run next, and {its option: the option of this command that has the value, or the value}
    then: tuple[str, Mapping[str, str]] | None = None


_RESUMES = (
    "It is safe to run the same command again: an unfinished set resumes, and a finished one is left as it is, except "
    "that missing resolutions are added, and shards rebuilt that `resolute verify` found damaged."
)
COMMANDS: dict[str, Command] = {
    "shards": Command(
        help="Turn photos into pre-resized WebDataset shards: each photo is decoded once, resized to every resolution "
        "and written in one shuffled order.",
        options="prep.settings:ShardsOptions",
        program="prep.commands:shards",
        positional="src",
        more=_RESUMES,
        then=("train", {"shards": "out"}),
    ),
    "verify": Command(
        help="Read and decode a whole shard set again, and report damage (status 1).",
        options="prep.settings:VerifyOptions",
        program="prep.commands:verify",
        positional="shards",
    ),
    "show": Command(
        help="Draw the model's input per stage and split, with labels and mix weights.",
        options="train.options:ShowOptions",
        program="train.show:main",
        positional="shards",
        then=("plan", {"shards": "shards", "recipe": "recipe", "set": "set_"}),
    ),
    "lr": Command(
        help="Draw learning rate, resolution and regularisation over all steps.",
        options="train.options:LrOptions",
        program="train.plot_lr:main",
        positional="shards",
        then=("train", {"shards": "shards", "recipe": "recipe", "set": "set_"}),
    ),
    "lr-find": Command(
        help="Learning rate range test on the first stage; suggests optim.lr.",
        options="train.options:LrFindOptions",
        program="train.lr_find:main",
        positional="shards",
        then=("lr", {"shards": "shards", "recipe": "recipe", "set": "set_"}),
    ),
    "plan": Command(
        help="Measure a few steps per stage and print the expected time of a run.",
        options="train.options:PlanOptions",
        program="train.planner.plan:main",
        positional="shards",
        then=("train", {"shards": "shards", "recipe": "recipe", "set": "set_", "run": "run"}),
    ),
    "recipe": Command(
        help="Write a starter recipe that fits a shard set, to edit: its size, classes, resolutions and the device.",
        options="train.options:RecipeOptions",
        program="train.planner.new_recipe:main",
        positional="out",
        then=("train", {"shards": "shards", "recipe": "out"}),
    ),
    "train": Command(
        help="Train on a shard set. The same command again resumes an unfinished run.",
        options="train.options:TrainOptions",
        program="train.command:main",
        positional="shards",
        epilogue="train.recipe:included",
    ),
    "eval": Command(
        help="Exact metrics of a run, at one or more resolutions.",
        options="train.options:EvalOptions",
        program="train.inference.evaluate:main",
        positional="run",
        then=("export", {"run": "run"}),
    ),
    "predict": Command(
        help="Classes, labels or values of images, from a run or its folds.",
        options="train.options:PredictOptions",
        program="train.inference.predict:main",
        positional="run",
    ),
    "export": Command(
        help="Write the best weights for timm or ONNX Runtime, with a program that predicts (predict.py).",
        options="train.options:ExportOptions",
        program="train.inference.export:main",
        positional="run",
    ),
    "report": Command(
        help="Draw RUN/report.html from its log again; a run writes it each epoch.",
        options="train.options:ReportOptions",
        program="train.report.page:report",
        positional="run",
    ),
    "compare": Command(
        help="Draw several runs on one page, and what differs in them.",
        options="train.options:CompareOptions",
        program="train.report.page:compare",
        positional="runs",
    ),
    "keys": Command(
        help="Print every recipe key with its type, range, default and meaning (a Markdown table).",
        options="train.options:KeysOptions",
        program="train.recipe.keys:main",
    ),
    "bench": Command(
        help="Measure loader, model and the cost of a stage change in 90 s, compared with a DataLoader at its best.",
        options="benchmarks.options:BenchOptions",
        program="benchmarks.bench:main",
        positional="shards",
    ),
    "bench-all": Command(
        help="Measure everything that README and docs/ show, compared with other tools; takes hours and continues.",
        options="benchmarks.options:BenchAllOptions",
        program="benchmarks.publish:main",
    ),
    "jobs plan": Command(
        help="First of three commands that make a set by separate jobs: list the photos and write a plan to OUT.",
        options="prep.settings:JobsPlanOptions",
        program="prep.commands:jobs_plan",
        more="Repeated plans keep finished shards.",
        then=("jobs range", {"out": "out", "range": ":"}),
    ),
    "jobs range": Command(
        help="Convert a range of the planned shards, except those that are finished.",
        options="prep.settings:JobsRangeOptions",
        program="prep.commands:jobs_range",
        then=("jobs finish", {"out": "out"}),
        more="Shards are numbered from 0: those of train, then those of val. Any number of these jobs may run at the "
        "same time, in any order, on any machines that see OUT and the photos under the same names; each may be killed "
        "and repeated, and ranges may overlap.",
    ),
    "jobs finish": Command(
        help="Complete the set when all shards are converted: index, lists, report, and the manifest last.",
        options="prep.settings:JobsFinishOptions",
        program="prep.commands:jobs_finish",
        then=("train", {"shards": "out"}),
    ),
}
_JOBS = "Make a set by separate jobs on any number of machines: plan, then ranges of shards, then finish."


def run() -> None:
    """The console script: runs `main` in a process prepared for signals and closed streams, and exits."""
    console.guard_process()
    # why no teardown: after imports such as numba's it takes 0.1 s, and nothing is left to do
    console.run_main(main, teardown=False)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line `words` (default: the process's own); returns the exit status."""
    words = sys.argv[1:] if words is None else list(map(str, words))
    name = _command_name(words)
    console.set_program(f"resolute {name}".strip(), words[len(name.split()) :])

    def work() -> int | None:
        if not name:
            _run(_app(complete="--install-completion" in words), words)
            return 0
        command = COMMANDS[name]
        options = _load(command.options)
        values = _parse(f"resolute {name}", command, options, words[len(name.split()) :])
        if values is None:  # only the help was asked for
            return 0
        if name not in _BASE:
            check_stack(training=True)
        from .settings import build

        chosen: Any = build(options, values)
        # why the environment: a process that torchrun has started must not start others
        if getattr(chosen, "gpus", None) and "LOCAL_RANK" not in os.environ:
            return int(_load("train.launch:launch")(chosen, words))
        _announce_first_start(command.program)
        status: int | None = _load(command.program)(chosen)
        if not status and (line := _next_line(command, chosen)):
            print(line)
        return status

    return _exit_status(work, "interrupted; the same command again resumes" if name in _RESUMED else "interrupted")


def program(
    name: str,
    options: type[Options],
    work: Callable[[Options], int | None],
    words: Sequence[str] | None,
    *,
    help: str,
    positional: str = "",
) -> int:
    """Run a program other than `resolute`, such as a benchmark, like one of its commands; returns the exit status.

    name: "python -m …". options: its settings class, with which `work` is called. words: its command line (default:
    the process's own). positional: the option that may be given without its name.
    """
    words = sys.argv[1:] if words is None else list(map(str, words))
    console.set_program(name, words)

    def parsed() -> int | None:
        from .settings import build

        values = _parse(name, Command(help=help, options="", program="", positional=positional), options, words)
        return None if values is None else work(build(options, values))

    return _exit_status(parsed, "interrupted")


def _exit_status(work: Callable[[], int | None], interrupted: str) -> int:
    """Call `work`; returns its status (None counts as 0), or that of an error, which is said in one line."""
    try:
        return work() or 0
    except ResoluteError as error:
        console.say(error)
        return error.exit_status
    except OSError as error:
        if not console.is_of_storage(error):
            raise
        console.say(from_os_error(error))
        return 2
    except KeyboardInterrupt:
        if "LOCAL_RANK" not in os.environ:  # else the process that started all of them says it
            console.say(interrupted)
        return 130


def _announce_first_start(program: str) -> None:
    """Say what takes long the first time that a command of training starts: Python compiles what it imports.

    Some installers, such as uv, leave this to the first start. The durations were measured on two cores of a server.
    """
    if not program.startswith("train.") or program.startswith(_WITHOUT_TORCH) or sys.dont_write_bytecode:
        return
    spec = importlib.util.find_spec("timm")
    if spec is None or not spec.origin or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    is_new = not Path(importlib.util.cache_from_source(spec.origin)).exists()
    if is_new and os.access(Path(spec.origin).parent, os.W_OK):
        print("importing torch and timm for the first time: about 15 s; later starts take 5 s", flush=True)


def _next_line(command: Command, options: Any) -> str:
    """What to run after `command` with these options, "" if nothing follows."""
    if command.then is None or getattr(options, "dry", False):
        return ""
    name, source = command.then
    values = {option: getattr(options, field, field) for option, field in source.items()}
    if not values.get("shards", True):  # `resolute lr --samples` has no set
        return ""
    texts = {
        option: " ".join(value) if isinstance(value, tuple) else str(value) for option, value in values.items() if value
    }
    return f"next: {as_typed(name, texts)}"


_WITHOUT_TORCH = ("train.recipe.keys", "train.report")
# Commands of a base install, which need neither torch nor DALI nor timm.
_BASE = ("shards", "verify", "jobs plan", "jobs range", "jobs finish", "keys", "report", "compare")
_RESUMED = ("shards", "jobs plan", "jobs range", "train")


def _command_name(words: Sequence[str]) -> str:
    """The command that `words` begin with, "" if they begin with none."""
    return next((name for name in COMMANDS if name.split() == list(words[: len(name.split())])), "")


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    with wandb_hidden():
        return getattr(importlib.import_module(f"{__package__}.{module}"), name)


@contextlib.contextmanager
def wandb_hidden() -> Iterator[None]:
    """timm imports wandb where it is installed, which takes seconds, for functions that are not called here."""
    if "wandb" in sys.modules:
        yield
        return
    sys.modules["wandb"] = None  # type: ignore[assignment]  # Python takes it for not installed
    try:
        yield
    finally:
        del sys.modules["wandb"]


def _app(*, complete: bool = False) -> App:
    """The command line without a command: help, version, mistakes in the command's name.

    complete: with the options of all commands, which the shell's completion needs.
    """
    from cyclopts import App

    app = App(
        name="resolute",
        help="Progressive-resizing training of image classifiers, with stage changes that cost less than a step.",
        help_epilogue="Each command has --help.",
        version=__version__,
        help_format="plaintext",
        result_action="return_value",
    )
    app.command(jobs := App(name="jobs", help=_JOBS))
    for name, command in COMMANDS.items():
        made = App(name=name.split()[-1], help=command.help)
        if complete:
            made.default(_function(command, _load(command.options)))
        (jobs if " " in name else app).command(made)
    if complete:
        app.register_install_completion_command()
    return app


def _parse(name: str, command: Command, options: type, words: Sequence[str]) -> dict[str, str] | None:
    """The options in `words` as texts; None after printing the help. Raises `ResoluteError` for unknown ones."""
    from cyclopts import App

    from .settings import option_name

    more = command.more
    if command.epilogue and "--help" in words:
        more = f"{more}\n\n{_load(command.epilogue)()}".strip()
    app = App(
        name=name,
        help=command.help,
        help_epilogue=more or None,
        version_flags=(),
        help_format="plaintext",
        result_action="return_value",
    )
    app["--help"].group = "Parameters"
    app.default(_function(command, options))
    values: dict[str, str] | None = _run(app, words, options)
    for option, value in (values or {}).items():
        if value == "":
            raise ResoluteError(f"{option_name(option)}: got an empty value; give it one or leave it out")
    return values


def _run(app: App, words: Sequence[str], options: type | None = None) -> Any:
    """Run `app`, which has these options; its mistakes become `ResoluteError`s."""
    from cyclopts import (
        CycloptsError,
        MissingArgumentError,
        UnknownCommandError,
        UnknownOptionError,
        UnusedCliTokensError,
    )

    try:
        return app(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        text = " ".join(str(error).split()).rstrip(".")
        if isinstance(error, MissingArgumentError) and error.argument:
            text = f"{error.argument.name}: missing"
        elif isinstance(error, UnknownOptionError) and options is not None:
            option = (error.token.keyword or error.token.value).partition("=")[0]
            if advice := _meant_options(option, options):
                raise ResoluteError(f"{option}: no such option; {advice}") from None
            text = f"{option}: no such option"
        elif isinstance(error, UnknownCommandError):
            text = text.partition(" Available commands")[0].rstrip(".")
        elif isinstance(error, UnusedCliTokensError):
            text = f"got {' '.join(error.unused_tokens or ())}, expected no more values"
        raise ResoluteError(
            f"{text}{' See' if text.endswith('?') else '; see'} `{' '.join(app.name)} --help`"
        ) from None


def _meant_options(option: str, options: Any) -> str:
    """The question whether an unknown option means another one, or a key of a recipe; "" if it resembles none."""
    from .settings import as_question, everywhere, meant, option_name

    known = {name.rstrip("_"): field for name, field in options.__pydantic_fields__.items()}
    keys: dict[str, list[str]] = {}
    if "set" in known:
        for name, places in everywhere(_load("train.recipe.schema:Recipe")).items():
            texts = [place.partition(",")[0].replace("stages.", "stages[0].") for place in places]
            keys[name] = [f"--set '{text}=VALUE'" if "[" in text else f"--set {text}=VALUE" for text in texts]
    found = []
    for each in meant(option.lstrip("-"), known, keys):
        name, _, choice = each.partition(" = ")
        found.append(
            each if each.startswith("--") else " ".join([option_name(name), *filter(None, [choice.strip('"')])])
        )
    return as_question(found) if found else ""


def _function(command: Command, options: type) -> Callable[..., dict[str, str]]:
    """A function with the settings of `options` as parameters, which returns those that were given."""
    from cyclopts import Parameter

    from .settings import definitions, option_name

    parameters = []
    for setting in definitions(options):
        is_flag = setting.annotation is bool
        is_required = setting.default is MISSING
        shown = "" if setting.default in (None, "", (), False) else f" (default: {_text(setting.default)})"
        is_first = setting.name == command.positional
        several = setting.metavar or (is_first and setting.is_list)
        kind: Any = bool if is_flag else tuple[str, ...] if several else str | None
        annotation = Annotated[
            kind,
            Parameter(
                name=None if is_first else option_name(setting.name),
                help=setting.help + (" (required)" if is_required else shown),
                show_default=False,
                metavar=None if is_flag else setting.metavar or _metavar(setting.name, setting.annotation),
                negative="",
                allow_repeating=True,
            ),
        ]
        place = inspect.Parameter.POSITIONAL_OR_KEYWORD if is_first else inspect.Parameter.KEYWORD_ONLY
        default = () if kind == tuple[str, ...] else False if is_flag else None
        parameter = inspect.Parameter(setting.name, place, default=default, annotation=annotation)
        parameters.append((not is_required, parameter))

    parameters.sort(key=lambda each: (each[1].kind, each[0]))
    signature = inspect.Signature([parameter for _, parameter in parameters])

    def function(*values: Any, **named: Any) -> dict[str, Any]:
        return signature.bind(*values, **named).arguments

    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def _metavar(name: str, annotation: Any) -> str:
    choices = next((get_args(hint) for hint in (annotation, *get_args(annotation)) if get_origin(hint) is Literal), ())
    return "|".join(map(str, choices)) or name.rpartition("_")[2].upper()


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

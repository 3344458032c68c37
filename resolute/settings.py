"""One definition per setting: frozen, validated dataclasses, of which each field is one setting.

    @settings("augment")
    class Augment:
        flip_prob: float = setting(0.5, "probability of a horizontal flip", ge=0, le=1)

A field has its type, default, range and one sentence of help. The same checks hold for a TOML file, for a command line
and for code that calls the constructor: `Augment(flip_prob=2)` raises `ResoluteError` with the line that a recipe gets.
Help texts, the tables of the documentation and the JSON Schema for editors are made from the fields too.

Values are taken as JSON has them: lists for tuples, whole numbers for floats, NumPy scalars for numbers; neither text
for a number nor a bool for an integer. `checked` does the same for the arguments of a function.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, dataclass_transform

import pydantic
from pydantic import ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic.json_schema import SkipJsonSchema

from .errors import ResoluteError

__all__ = [
    "Setting",
    "as_question",
    "build",
    "checked",
    "closest",
    "definitions",
    "describe",
    "described",
    "everywhere",
    "groups_by_kind",
    "meant",
    "option_name",
    "repeatable",
    "setting",
    "settings",
    "type_text",
]

T = TypeVar("T")
P = ParamSpec("P")
_MAX_SHOWN = 200  # characters of a wrong value
_MAX_MEANT = 4  # names that may be meant
_FEW = 3  # letters, which too many names contain
# parts of names that say nothing of what is set
_GENERIC = frozenset(("alpha", "epochs", "factor", "kind", "mode", "name", "prob", "rate", "scale", "size", "steps"))
_WORDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
_NAMES = {int: "integer", float: "number", bool: "`true`, `false`", str: "text", dict: "table"}


def setting(default: T, help: str, **bounds: Any) -> T:
    """A field with a default. `bounds`: `gt`, `ge`, `lt`, `le`, `min_length`; those of the items of a tuple and of the
    members of a union belong into the type, as `Annotated[float, Field(gt=0)]`."""
    return typing.cast(T, Field(default=default, description=help, **bounds))


def repeatable(help: str, *, metavar: str) -> tuple[str, ...]:
    """A field for an option of a command line that may be given several times, each with a text such as `metavar`."""
    return typing.cast(tuple[str, ...], Field(default=(), description=help, json_schema_extra={"metavar": metavar}))


def described(help: str, **bounds: Any) -> Any:
    """The same for a field that is required, or has a `default_factory`: `Annotated[int, described("…", ge=1)]`."""
    return Field(description=help, **bounds)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def settings(where: str, other_names: Mapping[str, str] | None = None) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen, keyword-only dataclass whose constructor checks its arguments.

    where: name of the group, which begins the messages ("augment" for "augment.flip_prob: got …"); "" for none.
    other_names: names that settings had before or have in other libraries, and their names here ("augment.scale"), for
    the message about such a name.
    """

    def decorate(cls: type[T]) -> type[T]:
        config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
        made: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=config)(cls)

        def __init__(self: Any, **values: Any) -> None:
            try:
                text = json.dumps({**values, **_with_kinds(made, values)}, default=_plain)
                made.__pydantic_validator__.validate_json(text, self_instance=self)
            except ValidationError as error:
                raise describe(error, made, where) from None
            except (TypeError, ValueError) as error:  # of json: not a value that JSON has
                raise ResoluteError(f"{where or cls.__name__}: {error}; correct it") from None

        def __repr__(self: Any) -> str:
            values = {each.name: (getattr(self, each.name), each.default) for each in definitions(made)}
            changed = ", ".join(f"{name}={value!r}" for name, (value, default) in values.items() if value != default)
            return f"{cls.__name__}({changed})"

        __init__.__qualname__ = f"{cls.__qualname__}.__init__"  # in Python's message about unnamed arguments
        made.__init__, made.__repr__ = __init__, __repr__
        made.__settings_name__ = where
        made.__settings_other_names__ = other_names or {}
        return typing.cast(type[T], made)

    return decorate


def _with_kinds(cls: Any, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tables among `values` for a union of groups by `kind`, with the kind of its default if they name none."""
    fields = cls.__pydantic_fields__
    return {
        name: {"kind": fields[name].default.kind, **value}
        for name, value in values.items()
        if isinstance(value, dict) and name in fields and groups_by_kind(fields[name].annotation)
    }


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """An instance from texts, as a command line has them: "3" for a number, "a,b" for a list, "1" for true.

    Raises `ResoluteError` as the constructor does.
    """
    listed = {setting.name for setting in definitions(cls) if setting.is_list and not setting.metavar}
    taken = {
        name: value.split(",") if name in listed and isinstance(value, str) else value for name, value in values.items()
    }
    try:
        return typing.cast(T, pydantic.TypeAdapter(cls).validate_python(taken, strict=False))
    except ValidationError as error:
        raise describe(error, cls, "--") from None


def checked(where: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Check the keyword arguments of a function whose types are numbers, texts, choices and tuples of them.

    They are converted as `settings` does, and refused with the same messages; `where` begins these. Other arguments are
    left alone.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        parameters = {
            name: parameter
            for name, parameter in inspect.signature(function).parameters.items()
            if name not in ("self", "cls")
        }

        @functools.cache  # on the first call, when all types are defined
        def group() -> Any:
            hints = {
                name: hint
                for name, hint in typing.get_type_hints(function, include_extras=True).items()
                if name in parameters and parameters[name].kind is inspect.Parameter.KEYWORD_ONLY and _is_plain(hint)
            }
            defaults = {
                name: parameters[name].default
                for name in hints
                if parameters[name].default is not inspect.Parameter.empty
            }
            return settings(where)(type(where, (), {"__annotations__": hints, **defaults}))

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs:
                if name not in parameters:
                    raise ResoluteError(f"{where}.{name}: no such argument; {closest(name, parameters)}")
            given = {name: value for name, value in kwargs.items() if name in group().__pydantic_fields__}
            good = group()(**given)
            return function(*args, **{**kwargs, **{name: getattr(good, name) for name in given}})

        return call

    return decorate


def describe(error: ValidationError, cls: Any, where: str) -> ResoluteError:
    """The first of pydantic's errors as one line: where, got, expected.

    where: name of the group of settings, or "--" for the options of a command line.
    """
    # an unknown name first: it explains why another one is missing
    first = min(error.errors(), key=lambda each: each["type"] != "unexpected_keyword_argument")
    if first["type"] == "json_invalid":  # a lone surrogate, as in a file name that is not UTF-8
        return ResoluteError(f"{where or cls.__name__}: got text that is not Unicode, expected UTF-8; correct it")
    owner, names = cls, list(filter(None, [where]))
    kinds: dict[str, Any] = {}  # of a union: {kind: its group}
    is_union = False
    field: FieldInfo | None = None
    for part in first["loc"]:
        if isinstance(part, int):  # the number of a table or item of a list
            continue
        if is_union:  # the part is a kind
            owner, is_union = kinds[part], False
            continue
        fields: Mapping[str, FieldInfo] = getattr(owner, "__pydantic_fields__", {})
        if part not in fields:
            if first["type"] in ("unexpected_keyword_argument", "missing"):
                names.append(part)
            break
        field = fields[part]
        names.append(part)
        owner = next(filter(dataclasses.is_dataclass, _members(field.annotation)), None)
        if of_field := groups_by_kind(field.annotation):
            kinds, is_union = of_field, True
    if first["type"] == "union_tag_invalid":
        got, expected = repr(first["input"]["kind"]), ", ".join(kinds)
        return ResoluteError(f"{'.'.join(names)}.kind: got {got}, expected {expected}; correct it")
    name = option_name(names[-1]) if where == "--" else ".".join(names)
    expected = type_text(field).replace("`", "") if field else first["msg"]
    if first["type"] == "missing" and isinstance(first["loc"][-1], str):  # else an item of a list
        return ResoluteError(f"{name}: missing, expected {expected}; add it")
    if first["type"] == "unexpected_keyword_argument":
        others = getattr(owner, "__settings_other_names__", {})
        if now := next((others[each] for each in others if _alike(each, names[-1])), None):
            return ResoluteError(f"{name}: no such setting, expected {now}; rename it")
        known = getattr(owner, "__pydantic_fields__", {})
        if same := next((kind for kind in kinds if _alike(kind, names[-1])), None):
            return ResoluteError(f'{name}: no such setting; did you mean kind = "{same}"?')
        if readers := [kind for kind, group in kinds.items() if names[-1] in group.__pydantic_fields__]:
            kind = next(kind for kind, group in kinds.items() if group is owner)
            group = ".".join(names[:-1])
            return ResoluteError(
                f"{name}: without effect, {group}.kind is {kind}, expected {' or '.join(readers)}; remove it or change "
                f"{group}.kind"
            )
        return ResoluteError(f"{name}: no such setting; {closest(names[-1], known, everywhere(cls, without=owner))}")
    got = repr(first["input"])
    got = got if len(got) <= _MAX_SHOWN else f"{got[:_MAX_SHOWN]}…"
    return ResoluteError(f"{name}: got {got}, expected {expected}; correct it")


def option_name(name: str) -> str:
    """The option of a command line for the setting `name`; Python's keywords have a "_" at their end."""
    return "--" + name.rstrip("_").replace("_", "-")


def closest(name: str, known: Mapping[str, Any], elsewhere: Mapping[str, Sequence[str]] | None = None) -> str:
    """Advice on an unknown name: the known ones that may be meant, best first, or all of them.

    - `known`: {name: its definition}; choices and help of a field are compared too
    - `elsewhere`: see `everywhere`
    """
    found = meant(name, known, elsewhere)
    return as_question(found) if found else f"known: {', '.join(known)}"


def as_question(found: Sequence[str]) -> str:
    """A few names that may be meant, the best one first: "did you mean lr? (or head_lr_scale)"."""
    others = f" (or {', '.join(found[1:])})" if len(found) > 1 else ""
    return f"did you mean {found[0]}?{others}"


def everywhere(cls: Any, *, without: Any = None) -> dict[str, list[str]]:
    """{name: its settings} of a class and all groups in it: {"lr": ["optim.lr"], "learning_rate": ["optim.lr"]}.

    `without`: a group that is left out.
    """
    found: dict[str, list[str]] = {}
    left_out = f"{getattr(without, '__settings_name__', '')}."

    def visit(group: Any, outer: tuple[Any, ...]) -> None:
        where = group.__settings_name__
        own = group.__settings_other_names__ if where else {}
        inner = []
        for name, field in group.__pydantic_fields__.items():
            groups = [member for member in _members(field.annotation) if hasattr(member, "__settings_name__")]
            if field.description and not groups:
                own = {**own, name: f"{where}.{name}" if where else f"{name}, at the top of the file"}
            inner += groups
        for name, place in own.items() if group is not without else ():
            if not place.startswith(left_out) and place not in found.setdefault(name, []):
                found[name].append(place)
        for member in inner:
            if member not in outer:
                visit(member, (*outer, group))

    visit(cls, ())
    return found


def meant(name: str, known: Mapping[str, Any], elsewhere: Mapping[str, Sequence[str]] | None = None) -> list[str]:
    """The few names that may be meant by an unknown one, best first; see `closest`."""
    elsewhere = elsewhere or {}
    name = name.lower().replace("-", "_")
    own = name.split("_")
    places = [place for each in elsewhere.values() for place in each]
    parts = {each: each.split("_") for each in known}
    others = {each: each.split("_") for each in elsewhere}
    # the first of these with any name decides; each is weaker than the one before
    found: Iterator[list[str]] = iter(
        (
            [
                *(each for each in known if each == f"{name}s" or each.startswith(f"{name}_")),
                *elsewhere.get(name, ()),
                *(each for each in places if each.replace(".", "_") == name),
                *(each for each in known if name in parts[each]),
            ],
            difflib.get_close_matches(name, known, n=1, cutoff=0.8),
            [
                f'{each} = "{choice}"'
                for each, field in known.items()
                for choice in _choices(field)
                if _alike(choice, name)
            ],
            [each for each in known if _contains(own, parts[each])],
            [each for each in known if len(name) >= _FEW and (each.startswith(name) or name.startswith(each))],
            [
                place
                for each in others
                if each.startswith(f"{name}_") or name in others[each]
                for place in elsewhere[each]
            ],
            [each for each, field in known.items() if _in_words(own, getattr(field, "description", None))],
            [each for each in difflib.get_close_matches(name, known, n=1) if each[0] == name[0]],
            [each for each in known if any(len(part) > _FEW and part in name for part in {*parts[each]} - _GENERIC)],
        )
    )
    return [*dict.fromkeys(next(filter(None, found), []))][:_MAX_MEANT]


def _choices(field: Any) -> list[str]:
    """The texts that a setting may have."""
    arms = _members(getattr(field, "annotation", None))
    return [
        each
        for arm in arms
        if typing.get_origin(arm) is Literal
        for each in typing.get_args(arm)
        if isinstance(each, str)
    ]


def _alike(one: str, other: str) -> bool:
    return re.sub("[-_]", "", one) == re.sub("[-_]", "", other)


def _contains(parts: Sequence[str], inner: Sequence[str]) -> bool:
    """Whether `inner` is a run of `parts` that says what is set: "jitter" in "color_jitter"."""
    runs = [parts[start : start + len(inner)] for start in range(len(parts) - len(inner) + 1)]
    return [*inner] in [[*run] for run in runs] and not {*inner} <= _GENERIC


def _in_words(parts: Sequence[str], text: str | None) -> bool:
    """Whether a help text has all parts of a name as words, or as beginnings of words."""
    words = re.findall("[a-z]+", (text or "").lower())
    return all(len(part) >= _FEW and any(word.startswith(part) for word in words) for part in parts)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting as documentation and command lines show it."""

    name: str
    kind: str  # type and range, as `type_text`
    default: Any  # `dataclasses.MISSING` if it is required
    help: str
    annotation: Any
    metavar: str = ""  # of an option that may be given several times; else ""

    @property
    def is_list(self) -> bool:
        """Whether it takes several values, separated by commas on a command line."""
        return any(typing.get_origin(arm) is tuple for arm in _arms(self.annotation))


def definitions(cls: Any) -> Iterator[Setting]:
    """The settings of a class, in the order of their definition."""
    for name, field in cls.__pydantic_fields__.items():
        default = dataclasses.MISSING if field.is_required() else field.get_default(call_default_factory=True)
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        yield Setting(
            name=name,
            kind=type_text(field),
            default=default,
            help=field.description or "",
            annotation=field.annotation,
            metavar=str(extra.get("metavar", "")),
        )


def type_text(field: FieldInfo) -> str:
    """A field's type and range in words: "integer, 1 to 4", "2 numbers, above 0"."""
    return _text(field.annotation, field.metadata)


def _text(hint: Any, metadata: Any = ()) -> str:
    if typing.get_origin(hint) is Annotated:
        hint, *more = typing.get_args(hint)
        metadata = [*metadata, *(item for info in more for item in getattr(info, "metadata", [info]))]
    limits = _range(metadata)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        members = (_text(arg, metadata) for arg in args if arg is not types.NoneType and not _is_internal(arg))
        shown = [*dict.fromkeys(members)]
        # "number or 2 numbers, above 0": members that follow each other share their range
        groups = itertools.groupby((text.partition(", ") for text in shown), key=lambda parts: parts[1:])
        return " or ".join(" or ".join(kind for kind, *_ in group) + "".join(limits) for limits, group in groups)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(arg)}`" for arg in args)
    if origin is tuple:
        many = args[-1] is Ellipsis
        inner = typing.get_args(args[0])[1:] if typing.get_origin(args[0]) is Annotated else ()
        limits = limits or _range([item for info in inner for item in getattr(info, "metadata", [info])])
        item = typing.get_args(args[0])[0] if typing.get_origin(args[0]) is Annotated else args[0]
        if item not in (int, float):
            return f"list of {_text(item)}"
        return ", ".join(filter(None, ["list of numbers" if many else f"{len(args)} numbers", limits]))
    if dataclasses.is_dataclass(hint) or (origin is dict and args[1] is Any):
        return "table"
    if origin is dict:
        return f"table: {_text(args[1])}"
    return ", ".join(filter(None, [_NAMES.get(origin or hint, getattr(hint, "__name__", "text").lower()), limits]))


def _range(metadata: Any) -> str:
    bounds = {name: getattr(item, name) for item in metadata for name in _WORDS if hasattr(item, name)}
    if {*bounds} == {"ge", "le"}:
        return f"{bounds['ge']} to {bounds['le']}"
    return ", ".join(f"{_WORDS[name]} {bound}" for name, bound in bounds.items())


def _arms(hint: Any) -> tuple[Any, ...]:
    """The members of a union; else the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _members(hint: Any) -> list[Any]:
    """The types of a union, or of the items of a tuple; else the type itself."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union, tuple, Annotated):
        return [member for arg in typing.get_args(hint) for member in _members(arg)]
    return [hint]


def groups_by_kind(hint: Any) -> dict[str, Any]:
    """{kind: its class} of a union of groups that differ in their `kind`; empty for any other type."""
    hint = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
    return {
        kind: member
        for member in _arms(hint)
        if "kind" in getattr(member, "__pydantic_fields__", {}) and len(_arms(hint)) > 1
        for kind in typing.get_args(member.__pydantic_fields__["kind"].annotation)
    }


def _is_internal(hint: Any) -> bool:
    """Whether a member of a union is for code alone: neither in the documentation nor in the JSON Schema."""
    return any(isinstance(item, SkipJsonSchema) for item in typing.get_args(hint)[1:])  # type: ignore[misc]


def _is_plain(hint: Any) -> bool:
    """Whether JSON has all values of a type."""
    if typing.get_origin(hint) is Literal or hint in (int, float, bool, str, types.NoneType, Ellipsis):
        return True
    if typing.get_origin(hint) is Annotated:
        return _is_plain(typing.get_args(hint)[0])
    is_known = typing.get_origin(hint) in (types.UnionType, typing.Union, tuple)
    return is_known and all(map(_is_plain, typing.get_args(hint)))


def _plain(value: Any) -> Any:
    """A NumPy value, an instance of a settings class or a path as JSON represents it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"got {value!r}, expected a number, text, list or table")

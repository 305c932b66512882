"""From a TOML document to a validated model, with errors that name the place and the closest known key."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from schemas.errors import PreplayError

Model = TypeVar("Model", bound=BaseModel)


def read_toml(file: Path, error: type[PreplayError]) -> dict[str, Any]:
    """Parse a TOML file. Raises `error` for a missing, unreadable or malformed one."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error("no such file", file=file) from None
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"can't be read ({problem})", file=file) from None
    except tomllib.TOMLDecodeError as problem:
        raise error(f"not valid TOML: {problem}", file=file) from None


def validated(
    model: type[Model], data: Any, *, error: type[PreplayError], file: str | Path | None = None, place: str = ""
) -> Model:
    """`data` as `model`. Raises `error` for the first fault, placed by its key path, unknown keys first.

    Unknown keys come first because a misspelt key is usually also reported as a missing one.
    """
    try:
        return model.model_validate(data)
    except ValidationError as problem:
        faults = sorted(problem.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
        fault = faults[0]
        location = [str(part) for part in fault["loc"]]
        names_a_key = fault["type"] in ("extra_forbidden", "missing")
        keys = _without_union_tags(location, data, keep_last=names_a_key)
        path = ".".join([place, *keys] if place else keys)
        mend = None
        if fault["type"] == "extra_forbidden":
            message = f"unknown key '{location[-1]}'"
            known = _known_keys(model, location[:-1])
            close = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
            inside = [key for key in known if location[-1] in _known_keys(model, [*location[:-1], key])]
            if inside:
                mend = f"it belongs in [{'.'.join([*path.split('.')[:-1], inside[0]])}]"
            else:
                mend = f"did you mean '{close[0]}'?" if close else f"known keys: {', '.join(sorted(known))}"
        elif fault["type"] == "missing":
            message = f"'{location[-1]}' is missing"
        elif fault["type"] == "too_short":
            message = f"needs at least {fault['ctx']['min_length']}"
        else:
            message = f"{fault['msg'].removeprefix('Value error, ')} (given: {_short(fault['input'])})"
        # A fault of the baseline is inherited by every what-if: told once.
        others = {(each["type"], each["loc"][-1]) for each in faults} - {(fault["type"], fault["loc"][-1])}
        if others:
            mend = "; ".join(part for part in (mend, f"{len(others)} more after this one") if part)
        raise error(message, file=file, place=path or None, mend=mend) from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _without_union_tags(location: list[str], data: Any, *, keep_last: bool) -> list[str]:
    """Drop the parts of a pydantic location that name a union's variant, not a key of the document.

    `keep_last`: the last part names a key that the document lacks or shouldn't have, and stays.
    """
    path: list[str] = []
    for index, part in enumerate(location):
        if isinstance(data, dict) and part in data:
            path.append(part)
            data = data[part]
        elif isinstance(data, list | tuple) and part.isdigit() and int(part) < len(data):
            path.append(part)
            data = data[int(part)]
        elif keep_last and index == len(location) - 1:
            path.append(part)
    return path


def _known_keys(model: Any, path: list[str]) -> list[str]:
    """The keys that may stand at `path` inside `model`, over all variants of unions on the way."""
    candidates = _models_in(model)
    in_mapping = False  # the next part is a key of the user's own, such as a what-if's name
    for part in path:
        if in_mapping:
            in_mapping = False
            continue
        following: list[type[BaseModel]] = []
        for candidate in candidates:
            field = candidate.model_fields.get(part)
            if field is not None:
                in_mapping = in_mapping or get_origin(field.annotation) is dict
                following += _models_in(field.annotation)
            elif _tag_of(candidate) == part:
                following.append(candidate)
        candidates = following or candidates
    return sorted({field.alias or name for each in candidates for name, field in each.model_fields.items()})


def _tag_of(model: type[BaseModel]) -> str | None:
    field = model.model_fields.get("method")
    values = get_args(field.annotation) if field is not None else ()
    return values[0] if values else None


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, dict, tuple, list) or get_args(annotation):
        return [model for part in get_args(annotation) for model in _models_in(part)]
    return []

"""The study file's reference page, made from the models themselves: ``python -m schemas.study_reference > docs/study-file.md``."""

from __future__ import annotations

import json
import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from schemas.study import (
    DraftModel,
    Eagle,
    Engine,
    Fleet,
    NoSpeculation,
    PrefixCache,
    Served,
    Slo,
    Study,
    Workload,
)

_HEAD = """# The study file

One TOML document: a baseline, what-ifs compared with it, service levels, seeds. A what-if (`[whatif.NAME...]`) holds only what it
changes; everything else is the baseline's. A `speculation` table with another `method` replaces the baseline's whole. Unknown keys
are errors that name the closest known one. `preplay run` checks every scenario before it runs any.

This page is made from the program's own definitions (`python -m schemas.study_reference`).
"""

_TABLES: tuple[tuple[str, type[BaseModel], frozenset[str]], ...] = (
    ("top level", Study, frozenset({"slo", "baseline", "whatif"})),
    ("[slo]", Slo, frozenset()),
    ("[baseline.fleet], [whatif.NAME.fleet]", Fleet, frozenset()),
    ("[baseline.model]", Served, frozenset()),
    ("[baseline.engine]", Engine, frozenset()),
    ("[baseline.prefix_cache]", PrefixCache, frozenset()),
    ("[baseline.workload]", Workload, frozenset()),
    ('[baseline.speculation], method = "none"', NoSpeculation, frozenset()),
    ('[baseline.speculation], method = "eagle"', Eagle, frozenset()),
    ('[baseline.speculation], method = "draft_model"', DraftModel, frozenset()),
)


def reference_markdown() -> str:
    """The page as text."""
    return "\n".join([_HEAD, *(_table(title, model, left_out) for title, model, left_out in _TABLES)])


def _table(title: str, model: type[BaseModel], left_out: frozenset[str]) -> str:
    first = " ".join((model.__doc__ or "").split("\n\n")[0].split())
    lines = [f"## {title}", "", first, "", "| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        if name not in left_out:
            default = _default_words(field.default)
            lines.append(f"| {name} | {_type_words(field.annotation)} | {default} | {field.description or ''} |")
    return "\n".join([*lines, ""])


def _default_words(default: Any) -> str:
    if default is PydanticUndefined:
        return "required"
    return "not set" if default is None else f"`{json.dumps(default)}`"


def _type_words(annotation: Any) -> str:
    """A type in the words of TOML."""
    origin = get_origin(annotation)
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join(_type_words(part) for part in get_args(annotation) if part is not type(None))
    if origin is tuple:
        return f"list of {_type_words(get_args(annotation)[0])}s"
    if hasattr(annotation, "__metadata__"):
        return _type_words(get_args(annotation)[0])
    return {int: "integer", float: "number", str: "string", bool: "true or false"}.get(annotation, str(annotation))


if __name__ == "__main__":
    print(reference_markdown(), end="")

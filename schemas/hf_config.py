"""A model from its Hugging Face `config.json`: read strictly, or refused by the name of the field that stands in the way.

Every field of the file is one of five: read; refused, because it changes compute or memory in a way that `Model` can't
represent; known to change neither; unknown with a name that sounds like architecture, refused too; or anything else, listed
in the model's `notes`. The types and fields known are in `schemas/hf_families.py`; docs/models.md has the page for users.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from schemas.errors import CatalogError
from schemas.hardware import Mla, Model, Moe
from schemas.hf_families import FAMILIES, HARMLESS, NOTED, REFUSED, SUSPICIOUS, UNSUPPORTED, WRAPPERS, Family
from schemas.validation import validated

MOST = 10**9
"""No count or width of a model is larger."""


def model_from_config(file: Path) -> Model:
    """The model that a Hugging Face `config.json` (or the one in that folder) describes.

    `notes` of the model say which defaults were taken and what was left out. Reads one file, changes nothing. Raises
    CatalogError, one line that names file and field, for a file that can't be read, lacks a field, or describes an
    architecture that `Model` can't represent.
    """
    if os.path.isdir(file):  # noqa: PTH112, never raises
        file = file / "config.json"
    fields, outer = _open(file)
    _refuse(fields)
    values = _values(fields)
    _refuse_unread(fields)
    name = _name(file)
    values |= {
        "name": name,
        "title": name,
        "source": f"{file.name} (model_type {fields.model_type})",
        "notes": (*fields.notes, *_weights_notes({**fields.data, **outer})),
    }
    return validated(Model, values, error=CatalogError, file=file)


@dataclass
class _Fields:
    """One JSON object being read: typed access, errors that name file and field, which fields were read, what to note."""

    data: dict[str, Any]
    file: Path
    family: Family
    model_type: str = ""
    prefix: str = ""
    read: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def fail(self, name: str, problem: str, mend: str | None = None) -> NoReturn:
        raise CatalogError(problem, file=self.file, place=self.prefix + name, mend=mend)

    def find(self, *names: str) -> tuple[str, Any, bool]:
        """(name, value, whether it is there) of the first alias that the file has. Marks all aliases as read."""
        self.read.update(names)
        for name in names:
            if name in self.data:
                return name, self.data[name], True
        return names[0], None, False

    def count(self, *names: str, least: int = 1) -> int:
        """A required whole number; the family's default where publishers leave it out."""
        name, value, there = self.find(*names)
        if not there:
            if name not in self.family.defaults:
                self.fail(name, f"'{name}' is missing", "add it, as the model's publisher states it")
            value = self.family.defaults[name]
            self.notes.append(f"{name} is not in the file: transformers' default, {value}")
        return self.whole(name, value, least)

    def optional(self, *names: str) -> int | None:
        """A positive whole number, or None where it is missing or null."""
        name, value, there = self.find(*names)
        if not there and name in self.family.defaults:
            return self.count(*names)
        return None if value is None else self.whole(name, value, 1)

    def whole(self, name: str, value: Any, least: int) -> int:
        if isinstance(value, list | dict):
            self.fail(name, f"differs by layer ({_shown(value)}), which is not modelled")
        if type(value) is not int or not least <= value <= MOST:
            self.fail(name, f"is {_shown(value)}, not a whole number from {least} to {MOST:,}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        _, value, _ = self.find(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(name, f"is {_shown(value)}, neither true nor false")
        return value

    def table(self, name: str) -> dict[str, Any]:
        """An object, empty where it is missing or null."""
        _, value, _ = self.find(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.fail(name, f"is {_shown(value)}, not an object")
        return value

    def only_one(self, name: str) -> None:
        """A period that may be missing or 1: every layer has experts."""
        _, value, _ = self.find(name)
        if value is not None and (type(value) is not int or value != 1):
            self.fail(name, f"is {_shown(value)}: experts in some layers only are not modelled")


def _open(file: Path) -> tuple[_Fields, dict[str, Any]]:
    """The object that describes the language model, and the one around it, if any."""
    data = _read(file)
    model_type = data.get("model_type")
    if model_type is None:
        raise CatalogError("'model_type' is missing", file=file, place="model_type", mend=_known_types())
    if isinstance(model_type, str) and model_type in WRAPPERS:
        outer = _Fields(data, file, Family(), model_type)
        text = outer.table("text_config")
        if not text:
            outer.fail("text_config", "'text_config' is missing", "the language model is described there")
        _refuse(outer)
        inherited = {name: data[name] for name in ("tie_word_embeddings", "architectures") if name in data}
        inner: dict[str, Any] = {"model_type": WRAPPERS[model_type]} | text | inherited
        return _Fields(inner, file, *_family(inner["model_type"], file, "text_config."), "text_config."), data
    return _Fields(data, file, *_family(model_type, file, "")), {}


def _family(model_type: Any, file: Path, prefix: str) -> tuple[Family, str]:
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type], model_type
    why = next((why for why, types in UNSUPPORTED.items() if model_type in types.split()), "")
    problem = f"model_type {_shown(model_type)} can't be represented{why and ': '}{why}"
    mend = None if why else _known_types()
    raise CatalogError(problem, file=file, place=f"{prefix}model_type", mend=mend)


def _known_types() -> str:
    return f"known: {', '.join(sorted([*FAMILIES, *WRAPPERS]))}"


def _values(fields: _Fields) -> dict[str, Any]:
    """The fields of `Model` that the file describes."""
    family = fields.family
    layers = fields.count(*family.layers)
    hidden = fields.count(*family.hidden)
    heads = fields.count(*family.heads)
    context = _context(fields)
    intermediate = fields.optional(*family.intermediate) if family.wide else fields.count(*family.intermediate)
    mla = _mla(fields) if family.mla else None
    window, window_layers = _window(fields, layers, context)
    if fields.model_type == "opt" and fields.optional("word_embed_proj_dim") not in (None, hidden):
        fields.fail("word_embed_proj_dim", "embeddings narrower than hidden_size are not modelled")
    if family.positions:
        fields.notes.append("the table of learned positions is not counted among the parameters")
    if "tie_word_embeddings" not in fields.data:
        fields.notes.append(
            f"tie_word_embeddings is not in the file: transformers' default, {str(family.tied).lower()}"
        )
    return {
        "layers": layers,
        "hidden": hidden,
        "intermediate": 4 * hidden if intermediate is None else intermediate,
        "q_heads": heads,
        "kv_heads": heads if mla else _kv_heads(fields, heads),
        "head_dim": mla.v_head_dim if mla else _head_dim(fields, hidden, heads),
        "vocab": fields.count("vocab_size"),
        "max_context": context,
        "tied_embeddings": fields.flag("tie_word_embeddings", family.tied),
        "gated_mlp": family.gated,
        "window": window,
        "window_layers": window_layers,
        "moe": _moe(fields, layers),
        "mla": mla,
    }


def _head_dim(fields: _Fields, hidden: int, heads: int) -> int:
    if fields.family.head_dim == "given" and "head_dim" not in fields.data:
        return fields.count("head_dim")
    given = fields.optional("head_dim")
    if given is None and hidden % heads:
        fields.fail("head_dim", f"is missing, and {hidden} hidden can't be divided among {heads} heads", "add head_dim")
    return hidden // heads if given is None else given


def _kv_heads(fields: _Fields, heads: int) -> int:
    kind = fields.family.kv
    name = "num_key_value_heads"
    if kind == "mha":
        return heads
    if kind == "bigcode":
        return 1 if fields.flag("multi_query", True) else heads
    if kind == "falcon":
        new = fields.flag("new_decoder_architecture", False)
        shared = fields.flag("multi_query", True)
        name, _, _ = fields.find("num_kv_heads", "n_head_kv")  # transformers heeds it in the new architecture only
        if not new:
            return 1 if shared else heads
    elif kind == "given" and name not in fields.data:
        return fields.count(name)
    given = fields.optional(name)
    if given is not None and heads % given:
        fields.fail(name, f"{heads} query heads can't be divided among {given} KV heads")
    return heads if given is None else given


def _mla(fields: _Fields) -> Mla:
    fields.read.update(("head_dim", "num_key_value_heads"))
    name, _, there = fields.find("q_lora_rank")
    if not there:
        fields.fail(name, f"'{name}' is missing", "add it; null = queries are not compressed")
    widths = {each: fields.count(each) for each in Mla.model_fields if each != name}
    return Mla(q_lora_rank=fields.optional(name) or 0, **widths)


def _moe(fields: _Fields, layers: int) -> Moe | None:
    """The mixture of experts, None for a dense model."""
    kind = fields.family.moe
    experts, width, shared, dense = "num_local_experts", "intermediate_size", 0, 0
    if kind == "none":
        return None
    if kind == "olmoe":
        experts = "num_experts"
    elif kind in ("qwen2", "qwen3"):
        experts, width = "num_experts", "moe_intermediate_size"
        fields.only_one("decoder_sparse_step")
        dense = _leading(fields, "mlp_only_layers", layers)
        if kind == "qwen2":
            shared, left = divmod(fields.count("shared_expert_intermediate_size", least=0), fields.count(width))
            if left:
                fields.fail("shared_expert_intermediate_size", f"is not a multiple of {width}, {fields.data[width]}")
    elif kind == "deepseek":
        experts, width = "n_routed_experts", "moe_intermediate_size"
        if fields.data.get(experts, 0) is None:
            fields.read.update(
                ("num_experts_per_tok", "n_shared_experts", "first_k_dense_replace", "moe_layer_freq", width)
            )
            return None
        fields.only_one("moe_layer_freq")
        none_shared = fields.data.get("n_shared_experts", 0) is None
        shared = fields.optional("n_shared_experts") or 0 if none_shared else fields.count("n_shared_experts", least=0)
        dense = min(layers, fields.count("first_k_dense_replace", least=0))
    routed = fields.count(experts)
    visited = fields.count("num_experts_per_tok", "experts_per_token")
    if visited > routed:
        fields.fail("num_experts_per_tok", f"is {visited}, more than {experts}, {routed}")
    return Moe(
        experts=routed,
        experts_per_token=visited,
        expert_intermediate=fields.count(width),
        shared_experts=shared,
        dense_layers=dense,
    )


def _leading(fields: _Fields, name: str, layers: int) -> int:
    """How many leading layers a list of layer numbers names. Fails for any other list."""
    _, numbers, _ = fields.find(name)
    if numbers is None:
        return 0
    if not isinstance(numbers, list) or numbers != list(range(len(numbers))) or len(numbers) > layers:
        fields.fail(name, f"is {_shown(numbers)}: only leading layers without experts are modelled")
    return len(numbers)


def _window(fields: _Fields, layers: int, context: int) -> tuple[int | None, int]:
    """(tokens, layers) of the sliding window. `layer_types` of the file outrank the family's rule."""
    family = fields.family
    sliding = _sliding_layers(fields, layers)
    if family.window == "none":
        if sliding:
            fields.fail("layer_types", f"sliding_attention is not known for model_type {fields.model_type}")
        return None, 0
    name, given, there = fields.find("sliding_window")
    if family.window in ("qwen", "never") and not fields.flag("use_sliding_window", False):
        return None, 0
    if family.window == "never":
        fields.fail("use_sliding_window", f"a sliding window is not modelled for model_type {fields.model_type}")
    if not there and family.window_default is not None:
        given = family.window_default
        fields.notes.append(f"{name} is not in the file: transformers' default, {given}")
    every = (
        fields.optional("sliding_window_pattern", "_sliding_window_pattern") if isinstance(family.window, int) else None
    )
    if sliding is None:
        sliding = layers
        if family.window == "qwen":
            sliding = max(0, layers - fields.count("max_window_layers", least=0))
        elif isinstance(family.window, int):
            sliding = sum((layer + 1) % (every or family.window) != 0 for layer in range(layers))
    elif sliding and given is None:
        fields.fail(name, "is missing or null, and layer_types has sliding_attention", "add it")
    if given is None or not sliding:
        return None, 0
    window = fields.whole(name, given, 1)
    if window >= context:
        fields.notes.append(f"the sliding window of {window} tokens is no shorter than the longest sequence: no effect")
        return None, 0
    return window, sliding


def _sliding_layers(fields: _Fields, layers: int) -> int | None:
    """Layers of `layer_types` with a window, None where the file has no such list."""
    name, kinds, _ = fields.find("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers:
        fields.fail(name, f"is {_shown(kinds)}, not a list of one entry for each of {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            fields.fail(name, f"{_shown(kind)} layers are not modelled", "known: full_attention, sliding_attention")
    return kinds.count("sliding_attention")


def _context(fields: _Fields) -> int:
    """The longest sequence. RoPE scaling stretches it as in vLLM (`_get_and_verify_max_len`)."""
    longest = fields.count(*fields.family.context)
    where = "rope_scaling" if fields.data.get("rope_scaling") is not None else "rope_parameters"
    scaling = fields.table(where)
    if isinstance(scaling.get("full_attention"), dict):  # by kind of layer
        scaling = scaling["full_attention"]
    if fields.model_type.startswith("gemma3"):
        return longest
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", "su", "longrope", "llama3", "mrope"):
        return longest
    if kind not in ("linear", "dynamic", "yarn", "deepseek_yarn"):
        fields.notes.append(f"{where} of type {_shown(kind)} is not known: taken not to change the longest sequence")
        return longest
    inner = _Fields(scaling, fields.file, Family(), prefix=f"{fields.prefix}{where}.")
    factor = scaling.get("factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= MOST:
        inner.fail("factor", f"is {_shown(factor)}, not a positive number")
    base = inner.count("original_max_position_embeddings") if "yarn" in kind else longest
    stretched = inner.whole("factor", int(base * factor), 1)
    if stretched != longest:
        fields.notes.append(f"{where} makes the longest sequence {stretched:,} tokens, not {longest:,}")
    return stretched


def _refuse(fields: _Fields) -> None:
    """Raises for the first field that is set and that no `Model` can represent."""
    mend = "to replay text only, put text_config into a file of its own" if "text_config" in fields.data else None
    for name, value in fields.data.items():
        if not _is_on(value) or (
            name == "attn_type_list" and isinstance(value, list) and set(map(repr, value)) == {"1"}
        ):
            continue
        if name == "attn_type_list" or not HARMLESS.fullmatch(name):
            for pattern, why in REFUSED:
                if re.fullmatch(pattern, name):
                    fields.fail(name, why, mend)
    kinds = fields.data.get("architectures")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(each, str) for each in kinds)):
        fields.fail("architectures", f"is {_shown(kinds)}, not a list of names")
    for kind in kinds or ():
        if not kind.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
            fields.fail("architectures", f"{_shown(kind)} is not a model that generates text")


def _refuse_unread(fields: _Fields) -> None:
    """Raises for a field that nobody knows and that sounds like architecture; notes the others."""
    unknown = []
    for name, value in sorted(fields.data.items()):
        if name in fields.read or not _is_on(value) or HARMLESS.fullmatch(name):
            continue
        if NOTED.fullmatch(name):
            fields.notes.append(f"{name}: layers that predict further tokens are left out")
        elif SUSPICIOUS.search(name):
            problem = f"is not known for model_type {fields.model_type}, and may change compute or memory"
            fields.fail(name, problem, "if it does not, remove it from a copy of the file")
        else:
            unknown.append(_shown(name))
    if unknown:
        more = f" and {len(unknown) - 12} more" if len(unknown) > 12 else ""
        fields.notes.append(f"fields not known, taken as harmless: {', '.join(unknown[:12])}{more}")


def _weights_notes(data: dict[str, Any]) -> list[str]:
    """What the file says of its weights' precision; the study's weight_dtype is what is replayed."""
    notes = []
    dtype = data.get("torch_dtype", data.get("dtype"))
    if isinstance(dtype, str):
        notes.append(f"the published weights are {_shown(dtype)}; the study's weight_dtype counts")
    quantized = data.get("quantization_config")
    if isinstance(quantized, dict):
        method = _shown(quantized.get("quant_method", "no method named"))
        bits = f", {quantized['bits']} bits" if type(quantized.get("bits")) is int else ""
        notes.append(f"the published weights are quantized ({method}{bits}); the study's weight_dtype counts")
    return notes


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        mend = "give the path of a config.json or of the folder that holds it; nothing is downloaded"
        raise CatalogError("no such file", file=file, mend=mend) from None
    except json.JSONDecodeError as problem:
        raise CatalogError(f"not valid JSON: {problem}", file=file) from None
    except (OSError, ValueError, RecursionError) as problem:  # ValueError: not UTF-8, a NUL in the path, endless digits
        raise CatalogError(f"can't be read ({problem})", file=file) from None
    if not isinstance(data, dict):
        raise CatalogError(f"is {_shown(data)}, not an object with a model's fields", file=file)
    return data


def _name(file: Path) -> str:
    """A name for people: the folder's of a config.json (the model's in Hugging Face's cache), else the file's."""
    parts = file.absolute().parts
    if len(parts) > 3 and parts[-3] == "snapshots" and parts[-4].startswith("models--"):
        return parts[-4].rsplit("--", 1)[-1]
    return (file.absolute().parent.name if file.name == "config.json" else "") or file.stem


def _is_on(value: Any) -> bool:
    return value not in (None, False, 0, "", [], {})


def _shown(value: Any) -> str:
    """A value from the file, short enough for one line."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= 60 else text[:57] + "..."

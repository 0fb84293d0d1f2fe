"""Writes configuration for people: the resolved file of a run, and the answer to `--explain`."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING
from datetime import date, time
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

from offbeat_core._config.paths import escape
from offbeat_core._config.schema import (
    Key,
    Section,
    bound_words,
    keys_of,
    named_class,
    nearest_key,
    nearest_section,
    nested_class,
    number_text,
    sections_of,
    type_words,
)
from offbeat_core._config.secrets import refuse_literal_secrets
from offbeat_core._config.values import NONE
from offbeat_core._errors import ConfigError

_WIDTH = 100
_HELP_WIDTH = 119  # that of the usage of the applications
_SENTENCE_END = r"\.$|\. "


def dump_config(config: Any) -> str:
    """Write a configuration as TOML, each key under a comment with its doc and unit; it loads back equal.

    Raises:
        ConfigError: it holds a secret as it is, instead of a reference to a variable of the environment.
    """
    blocks: list[str] = []
    for section in sections_of(type(config)).values():
        held = getattr(config, section.field_name)
        if held is not None:
            blocks += _table_blocks((section.name,), section.doc, held)
    return "\n".join(blocks)


def _table_blocks(path: tuple[str, ...], doc: str, held: Any) -> list[str]:
    """Return the table of a section, and after it those within it."""
    lines = [*_comment(doc), f"[{'.'.join(map(toml_key, path))}]"]
    inner: list[str] = []
    for key in keys_of(type(held)).values():
        value = getattr(held, key.field_name)
        if named_class(key.annotation):
            for name, item in value.items():
                inner += _table_blocks((*path, key.name, name), key.setting.doc, item)
        elif nested_class(key.annotation):
            inner += _table_blocks((*path, key.name), key.setting.doc, value) if value is not None else []
        else:
            refuse_literal_secrets(".".join((*path, key.name)), value)
            lines += _comment(_note(key))
            lines.append(f"{toml_key(key.name)} = {toml_value(escape(value))}")
    return ["\n".join(lines) + "\n", *inner]


def toml_value(value: Any) -> str:
    """Write one value as TOML, on one line: None as "none", a path as its text.

    Raises:
        TypeError: TOML has no such value.
    """
    if value is None or isinstance(value, Path):
        value = NONE if value is None else str(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_key(name)} = {toml_value(item)}" for name, item in value.items()) + "}"
    raise TypeError(f"TOML cannot hold {value!r}")


def toml_key(name: str) -> str:
    """Write a key: bare where TOML allows it, else in quotes."""
    bare = name and all(char.isascii() and (char.isalnum() or char in "-_") for char in name)
    return name if bare else json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f")


def _note(key: Key) -> str:
    bounds = bound_words(key.setting)
    facts = ", ".join(fact for fact in (key.setting.unit, bounds.strip("()")) if fact)
    return f"{key.setting.doc} ({facts})" if facts else key.setting.doc


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in wrap(text, _WIDTH)]


def explain(root_type: type, key: str) -> str:
    """Say what `section.key` is for, what it takes, and how to write it.

    The name of a section lists its keys, "all" those of every section, and no name lists the sections.

    Raises:
        ConfigError: no such key or section, with the nearest name.
    """
    sections = sections_of(root_type)
    if not key:
        return _list_sections(sections)
    if key == "all":
        return "\n\n".join(_explain_all(sections))
    name, _, rest = key.strip().lstrip("-").partition(".")
    if name in sections and not rest:
        return _explain_section(sections[name])
    if name in sections and rest in sections[name].keys:
        return _explain_key(name, sections[name].keys[rest])
    if name in sections and (within := _explain_within(name, sections[name].keys, rest.split("."))):
        return within
    bare = [item for item in sections.values() if not rest and name in item.keys]
    if bare:
        return "\n\n".join(_explain_key(item.name, item.keys[name]) for item in bare)
    near = nearest_key(sections, name, rest or name) if name in sections or not rest else None
    near = near or nearest_section(sections, name) or nearest_key(sections, name, rest)
    hint = f"did you mean {near}?" if near else "sections: " + ", ".join(sections)
    raise ConfigError(f"--explain {key}: no such key; {hint}")


def _explain_within(path: str, keys: Mapping[str, Key], rest: list[str]) -> str:
    """Return a key of the tables under names of the user's, such as eval.sets.aime.temperature.

    Empty where there is none.
    """
    key = keys.get(rest[0])
    if key is None or len(rest) == 1:
        return _explain_key(path, key) if key else ""
    path, rest = f"{path}.{rest[0]}", rest[1:]
    inner = nested_class(key.annotation)
    if named := named_class(key.annotation):
        known = keys_of(named)
        if rest[0] not in known or len(rest) > 1:  # what is not a key there is a name
            rest = rest[1:]
        return _explain_within(f"{path}.NAME", known, rest) if rest else _explain_keys(f"[{path}.NAME]", known)
    return _explain_within(path, keys_of(inner), rest) if inner else ""


def _list_sections(sections: Mapping[str, Section]) -> str:
    width = max(map(len, sections))
    docs = {name: section.doc.removeprefix(f"Section `{name}`: ") for name, section in sections.items()}
    lines = [f"  {name:<{width}}  {doc[:1].upper()}{doc[1:]}".rstrip() for name, doc in docs.items()]
    head = "Sections; --explain SECTION lists the keys of one, --explain all those of every section:"
    return "\n".join([head, *lines])


def list_settings(root_type: type, keys: Sequence[str]) -> str:
    """List some settings as `--help` does: each with a short form of its doc, its unit and its default.

    Args:
        root_type: root of the configuration.
        keys: such as "model.path", in the order in which they are listed.
    """
    sections, width = sections_of(root_type), max(map(len, keys))
    lines = []
    for path in keys:
        section, _, name = path.partition(".")
        key = sections[section].keys[name]
        head = f"  --{path:<{width}}  "
        text = f"{_short_doc(key)} ({'; '.join(_help_facts(key))})"
        lines.append(fill(text, _HELP_WIDTH, initial_indent=head, subsequent_indent=" " * len(head)))
    return "\n".join(lines)


def _short_doc(key: Key) -> str:
    """Return the first clause of the doc of a setting, and that which says what the default means."""
    sentence = re.split(_SENTENCE_END, key.setting.doc)[0]
    first, *others = sentence.split("; ")
    default = str(key.default)
    return "; ".join([first, *(clause for clause in others if clause.startswith((f"{default}:", f"{default} ")))])


def _help_facts(key: Key) -> Iterator[str]:
    if key.setting.choices:
        yield "one of " + ", ".join(key.setting.choices)
    if key.setting.unit:
        yield f"in {key.setting.unit}"
    if key.default is MISSING:
        yield "required"
    else:
        yield "default: " + (toml_value(key.default) if key.default not in (None, "", (), []) else "none")


def _explain_all(sections: Mapping[str, Section]) -> Iterator[str]:
    """Yield every section with its keys, each with type, unit and default; then the tables that stand within it."""
    known = {section.cls for section in sections.values()}
    for section in sections.values():
        left = [(section.name, f" {section.doc}".rstrip(), section.keys)]
        while left:
            path, doc, keys = left.pop(0)
            yield _explain_keys(f"[{path}]{doc}", keys, has_types=True)
            for key in keys.values():
                named = named_class(key.annotation)
                inner = named or nested_class(key.annotation)
                if inner and inner not in known:  # a nested section has its keys where it stands by itself
                    left.append((f"{path}.{key.name}{'.NAME' * bool(named)}", "", keys_of(inner)))


def _explain_section(section: Section) -> str:
    return _explain_keys(f"[{section.name}] {section.doc}".rstrip(), section.keys)


def _explain_keys(head: str, keys: Mapping[str, Key], *, has_types: bool = False) -> str:
    width = max((len(name) for name in keys), default=0)
    lines = []
    for key in keys.values():
        kind = f" Type: {key.required}." if has_types else ""
        lines.append(f"  {key.name:<{width}}  {key.setting.doc}{kind} Default: {_default_text(key)}.")
    return "\n".join([head, *lines])


def _explain_key(section: str, key: Key) -> str:
    path, named, nested = f"{section}.{key.name}", named_class(key.annotation), nested_class(key.annotation)
    facts = {
        "type": type_words(key.annotation),
        "unit": key.setting.unit,
        "range": bound_words(key.setting),
        "default": _default_text(key),
        "example": _example_words(path, key),
    }
    lines = [path, *(f"  {line}" for line in wrap(key.setting.doc, _WIDTH))]
    lines += [f"  {name + ':':<9}{text}" for name, text in facts.items() if text]
    if named or nested:
        lines.append(_explain_keys(f"[{path}{'.NAME' * bool(named)}]", keys_of(named or nested)))
    return "\n".join(lines)


def _example_words(path: str, key: Key) -> str:
    """Return an override to copy; of tables, one for their first key."""
    if inner := named_class(key.annotation) or nested_class(key.annotation):
        first = next(iter(keys_of(inner).values()))
        return _example_words(f"{path}{'.NAME' * bool(named_class(key.annotation))}.{first.name}", first)
    return f"--{path} {_example(key)}"


def _default_text(key: Key) -> str:
    return "none, required" if key.default is MISSING else toml_value(key.default)


def _example(key: Key) -> str:
    """Return a value to copy: the default, or the first choice, or one that suits the type."""
    if key.default not in (MISSING, None, "", (), [], {}):
        return _shell_word(toml_value(key.default))
    if key.setting.choices:
        return str(key.setting.choices[0])
    lowest = key.setting.ge if key.setting.ge is not None else 1
    words = type_words(key.annotation)
    for start, example in (("an integer", number_text(lowest)), ("a number", number_text(lowest)), ("true", "true")):
        if words.startswith(start):
            return example
    if words.startswith("a table"):
        return "'{name = 1}'"
    return "NAME" if words.startswith("a string") else "VALUE"


def _shell_word(text: str) -> str:
    inner = text[1:-1]
    if text.startswith('"') and inner and not set(inner) & set(" \"'\\$`*?|&;<>(){}[]#~!"):
        return inner
    return text if text.replace(".", "").replace("-", "").isalnum() else f"'{text}'"

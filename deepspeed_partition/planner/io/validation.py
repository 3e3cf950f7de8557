"""Validation of JSON by the project's own schemas, fast enough for the largest files that are read.

It knows the part of JSON Schema (draft 2020-12) that ``schemas/`` uses; ``tests/planner/test_fuzz.py`` compares
it with the ``jsonschema`` package, which takes ten times as long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias


class Violation(NamedTuple):
    """First error in a value: where it is, what was found, and what the schema asks for."""

    path: tuple[str | int, ...]
    keyword: str
    """Keyword of the schema that the value breaks."""
    wanted: Any
    """Value of this keyword in the schema."""
    found: Any


Check: TypeAlias = Callable[[Any], Violation | None]
_CHECKS_NOTHING = ("$schema", "title", "$comment", "$defs")
_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: (
        (isinstance(value, int) and not isinstance(value, bool))
        or (isinstance(value, float) and value.is_integer())
    ),
}


def compiled(schema: Mapping[str, Any]) -> Check:
    """Return a function that finds the first error in a value, in the schema's order; None without one."""
    definitions: dict[str, Check] = {}

    def check_of(part: Mapping[str, Any]) -> Check:
        checks = [_KEYWORDS[key](part, check_of) for key in part if key not in (*_CHECKS_NOTHING, "$ref")]
        if "$ref" in part:
            name = part["$ref"].removeprefix("#/$defs/")
            if name not in definitions:
                definitions[name] = check_of(schema["$defs"][name])
            checks.append(definitions[name])
        if len(checks) == 1:
            return checks[0]

        def all_of(value: Any) -> Violation | None:
            for check in checks:
                violation = check(value)
                if violation is not None:
                    return violation
            return None

        return all_of

    return check_of(schema)


def _below(key: str | int, violation: Violation) -> Violation:
    return violation._replace(path=(key, *violation.path))


def _type(part: Mapping[str, Any], _: Any) -> Check:
    wanted = part["type"]
    tests = [_TYPES[name] for name in ([wanted] if isinstance(wanted, str) else wanted)]
    if len(tests) == 1:
        [test] = tests
        return lambda value: None if test(value) else Violation((), "type", wanted, value)
    return lambda value: None if any(test(value) for test in tests) else Violation((), "type", wanted, value)


def _required(part: Mapping[str, Any], _: Any) -> Check:
    wanted = part["required"]

    def check(value: Any) -> Violation | None:
        if isinstance(value, dict):
            for name in wanted:
                if name not in value:
                    return Violation((), "required", name, value)
        return None

    return check


def _properties(part: Mapping[str, Any], check_of: Callable[[Any], Check]) -> Check:
    checks = {name: check_of(below) for name, below in part["properties"].items()}

    def check(value: Any) -> Violation | None:
        if isinstance(value, dict):
            for name, below in checks.items():
                if name in value and (violation := below(value[name])) is not None:
                    return _below(name, violation)
        return None

    return check


def _additional_properties(part: Mapping[str, Any], check_of: Callable[[Any], Check]) -> Check:
    below, known = check_of(part["additionalProperties"]), part.get("properties", {})

    def check(value: Any) -> Violation | None:
        if isinstance(value, dict):
            for name, each in value.items():
                if name not in known and (violation := below(each)) is not None:
                    return _below(name, violation)
        return None

    return check


def _items(part: Mapping[str, Any], check_of: Callable[[Any], Check]) -> Check:
    below, first = check_of(part["items"]), len(part.get("prefixItems", ()))

    def check(value: Any) -> Violation | None:
        if isinstance(value, list):
            for index in range(first, len(value)):
                if (violation := below(value[index])) is not None:
                    return _below(index, violation)
        return None

    return check


def _prefix_items(part: Mapping[str, Any], check_of: Callable[[Any], Check]) -> Check:
    checks = [check_of(below) for below in part["prefixItems"]]

    def check(value: Any) -> Violation | None:
        if isinstance(value, list):
            for index, (below, item) in enumerate(zip(checks, value, strict=False)):
                if (violation := below(item)) is not None:
                    return _below(index, violation)
        return None

    return check


def _any_of(part: Mapping[str, Any], check_of: Callable[[Any], Check]) -> Check:
    checks = [check_of(below) for below in part["anyOf"]]

    def check(value: Any) -> Violation | None:
        return Violation((), "anyOf", part["anyOf"], value) if all(below(value) for below in checks) else None

    return check


def _pattern(part: Mapping[str, Any], _: Any) -> Check:
    wanted = part["pattern"]
    search = re.compile(wanted).search
    return lambda value: (
        Violation((), "pattern", wanted, value) if isinstance(value, str) and not search(value) else None
    )


def _compared(keyword: str, kind: type, is_wrong: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Check]:
    """Return the check of a keyword that compares a value of one kind with a number."""

    def make(part: Mapping[str, Any], _: Any) -> Check:
        wanted, number = part[keyword], _TYPES["number"]
        if kind is list:
            return lambda value: (
                Violation((), keyword, wanted, value)
                if isinstance(value, list) and is_wrong(len(value), wanted)
                else None
            )
        return lambda value: (
            Violation((), keyword, wanted, value) if number(value) and is_wrong(value, wanted) else None
        )

    return make


def _const(part: Mapping[str, Any], _: Any) -> Check:
    wanted = part["const"]
    return lambda value: None if value == wanted else Violation((), "const", wanted, value)


def _enum(part: Mapping[str, Any], _: Any) -> Check:
    wanted = part["enum"]

    def check(value: Any) -> Violation | None:
        is_one = any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in wanted)
        return None if is_one else Violation((), "enum", wanted, value)

    return check


_KEYWORDS: dict[str, Callable[[Any, Any], Check]] = {
    "type": _type,
    "required": _required,
    "properties": _properties,
    "additionalProperties": _additional_properties,
    "items": _items,
    "prefixItems": _prefix_items,
    "anyOf": _any_of,
    "pattern": _pattern,
    "const": _const,
    "enum": _enum,
    "minimum": _compared("minimum", float, lambda value, wanted: value < wanted),
    "maximum": _compared("maximum", float, lambda value, wanted: value > wanted),
    "exclusiveMinimum": _compared("exclusiveMinimum", float, lambda value, wanted: value <= wanted),
    "minItems": _compared("minItems", list, lambda length, wanted: length < wanted),
    "maxItems": _compared("maxItems", list, lambda length, wanted: length > wanted),
}

"""Sentences that the program prints: in words that an engineer reads whose first language is another one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNCLEAR = {
    r"\bis (\0|empty)[^:]*: it is (more than|from|at least|a whole number|a number|True or)": "it must be",
    r"\bbelongs? into\b": "belongs in",
    r"\bhangs? it\b|\bhangs a hook\b": "register",
    r"\bnobody\b": "the passive: it is not known, it is never trained",
    r"\ball the same\b": "nevertheless",
    r"\bother ones than\b": "differs from",
    r"\bone on each rank\b": "differs from rank to rank",
    r"\bmicro-batchs\b": "micro-batches",
}
"""Patterns of words that mislead or are no plain English, and what to write instead; a NUL is a value."""


def sentences(text: str) -> Iterator[str]:
    """Strings of a module that are no docstrings, with NULs in the places of values."""
    tree = ast.parse(text)
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    skipped |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(each.value) if isinstance(each, ast.Constant) else "\0" for each in node.values)


def test_sentences_have_no_unclear_words():
    """``bandwidth is 0: it is more than 0`` was read, and ``hang it on these layers``."""
    found = [
        f"{path.relative_to(ROOT)}: {sentence!r}: write {better!r}"
        for package in ("deepspeed_partition", "lightning_madpipe")
        for path in sorted((ROOT / package).rglob("*.py"))
        for sentence in sentences(path.read_text("utf-8"))
        for pattern, better in UNCLEAR.items()
        if re.search(pattern, sentence)
    ]
    assert not found, "\n".join(found)


def test_unclear_words_are_found():
    text = (
        '"""All the same."""\nraise ValueError(f"x is {x!r}: it is more than {y}")\nsay("one " "on each rank")\n'
    )
    kept = [each for each in sentences(text) if any(re.search(pattern, each) for pattern in UNCLEAR)]
    assert kept == ["x is \0: it is more than \0", "one on each rank"]

"""PipeDream's profiles (``graph.txt``): a line for each node, then a line for each edge.

::

    node2 -- Conv2d(3, 64) -- forward_compute_time=22.3, backward_compute_time=24.6, activation_size=1644.0, ...
        node1 -- node2

Times are milliseconds and sizes bytes. A node with several outputs lists their sizes, ``[6160384.0; 131072.0]``:
they travel together. Nodes named ``Input`` are what the network is given; their times (loading) are left out.
Source: the profiler of D. Narayanan et al., PipeDream, SOSP 2019.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from deepspeed_partition.planner.errors import ChainFormatError
from deepspeed_partition.planner.graphs.layer_graph import MOST_NODES, GraphError, LayerGraph, Node
from deepspeed_partition.planner.problem import LARGEST_BYTES, LONGEST_SECONDS, Chain
from deepspeed_partition.planner.units import shown

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")

MOST_LINES = 20_000
"""Largest number of lines of a file: nodes, edges and empty lines."""
LONGEST_LINE = 2**16
"""Largest number of characters of a line."""


class _Line(NamedTuple):
    number: int
    text: str
    where: str
    """File and number of the line, which begin the message of an error."""

    @property
    def parts(self) -> list[str]:
        return [part.strip() for part in self.text.split(" -- ")]

    @property
    def is_node(self) -> bool:
        return len(self.parts) > 2 or f"{_FIELDS[0]}=" in self.text


def is_graph(text: str) -> bool:
    """Return whether a text is meant to be a ``graph.txt`` rather than JSON: its first line with content says."""
    first = text.lstrip().partition("\n")[0]
    return " -- " in first and not first.lstrip("\ufeff \t").startswith(("{", "["))


def read_chain(text: str, *, name: str, where: str) -> Chain:
    """Return the chain of the graph in a ``graph.txt``.

    Raises:
        ChainFormatError: the text is no such graph, or its sizes and times are those of no chain; the message
            names the line.
    """
    graph = read_graph(text, name=name, where=where)
    try:
        return graph.to_chain()
    except ValueError as error:
        raise ChainFormatError(f"{where}: {error}") from None


def read_graph(text: str, *, name: str, where: str) -> LayerGraph:
    """Return the graph in the text of a ``graph.txt``; ``where`` (a file's name) begins the message of an error.

    Raises:
        ChainFormatError: a line is neither node nor edge, a number is none, a node is defined twice or not at
            all, or ``LayerGraph`` refuses the graph; the message names the line.
    """
    _check_sizes(text, where)
    lines = [
        _Line(number, line, f"{where}: line {number}")
        for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1)
        if line.strip()
    ]
    nodes: dict[str, tuple[_Line, Node]] = {}
    for line in lines:
        if line.is_node:
            node = _node(line)
            if node.name in nodes:
                first = nodes[node.name][0].number
                raise ChainFormatError(f"{line.where}: node {shown(node.name)} stands on line {first}, too")
            nodes[node.name] = line, node
    reads: dict[str, dict[str, None]] = {name: {} for name in nodes}  # each node once, in the order of the file
    for line in lines:
        if not line.is_node:
            source, target = _edge(line, nodes)
            reads[target][source] = None
    index = {name: position for position, name in enumerate(nodes)}
    try:
        return LayerGraph(
            [
                replace(node, reads=tuple(index[source] for source in reads[node.name]))
                for _, node in nodes.values()
            ],
            name,
        )
    except GraphError as error:
        at = where if error.node is None else list(nodes.values())[error.node][0].where
        raise ChainFormatError(f"{at}: {error}") from None


def _check_sizes(text: str, where: str) -> None:
    """Refuse a graph that is too large, before anything looks at each of its lines."""
    num_nodes, num_lines = text.count(f"{_FIELDS[0]}="), text.count("\n")
    if num_nodes > MOST_NODES:
        raise ChainFormatError(
            f"{where}: the graph has {num_nodes} nodes and at most {MOST_NODES} are read: group them"
        )
    if num_lines > MOST_LINES:
        raise ChainFormatError(f"{where}: {num_lines} lines, and at most {MOST_LINES} are read: group the nodes")
    start = 0
    for number in range(1, num_lines + 2):
        end = text.find("\n", start)
        if (len(text) if end < 0 else end) - start > LONGEST_LINE:
            raise ChainFormatError(f"{where}: line {number} has more than {LONGEST_LINE} characters: shorten it")
        start = end + 1


def _node(line: _Line) -> Node:
    name, *description, numbers = line.parts if len(line.parts) > 1 else ["", line.text]
    if description and numbers.startswith("stage_id="):  # added by PipeDream's own partitioner
        *description, numbers = description
    fields = dict(part.split("=", 1) for part in numbers.split(", ") if "=" in part)
    missing = [field for field in _FIELDS if field not in fields]
    if not name or not description or missing:
        raise ChainFormatError(
            f"{line.where}: not a node: write it like node1 -- Linear -- "
            f"{', '.join(f'{field}=0.0' for field in _FIELDS)}"
        )
    forward, backward = (_number(line, field, fields[field], LONGEST_SECONDS * 1e3) for field in _FIELDS[:2])
    sizes = fields["activation_size"].strip()
    if sizes.startswith("[") and sizes.endswith("]"):
        output = sum(_size(line, "activation_size", size) for size in sizes[1:-1].split(";"))
    else:
        output = _size(line, "activation_size", sizes)
    what = " -- ".join(description)
    return Node(
        name=name,
        type=re.split(r"[(\s]", what, maxsplit=1)[0] or what,
        forward_milliseconds=forward,
        backward_milliseconds=backward,
        weight_bytes=_size(line, "parameter_size", fields["parameter_size"]),
        output_bytes=output,
        is_input=re.fullmatch(r"Input[0-9]*", what) is not None,
    )


def _edge(line: _Line, nodes: dict[str, tuple[_Line, Node]]) -> tuple[str, str]:
    if len(line.parts) != 2:
        raise ChainFormatError(f"{line.where}: {shown(line.text.strip())} is neither a node nor an edge")
    source, target = line.parts
    for name in (source, target):
        if name not in nodes:
            raise ChainFormatError(f"{line.where}: there is no node {shown(name)}")
    if nodes[target][1].is_input:
        raise ChainFormatError(f"{line.where}: {shown(target)} is an input and reads nothing")
    return source, target


def _number(line: _Line, field: str, text: str, largest: float) -> float:
    value = float(text) if _NUMBER.fullmatch(text.strip()) else None
    if value is None or not 0 <= value <= largest:
        raise ChainFormatError(f"{line.where}: {field} is {shown(text)}, not a number from 0 to {largest:g}")
    return value


def _size(line: _Line, field: str, text: str) -> int:
    value = _number(line, field, text, LARGEST_BYTES)
    if value != int(value):
        raise ChainFormatError(f"{line.where}: {field} is {shown(text)}, not a whole number of bytes")
    return int(value)

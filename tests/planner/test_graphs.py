"""Graphs of layers become chains: compared with every order, and with the definition of what crosses a cut."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_partition import Chain, ChainFormatError, Platform, make_plan
from deepspeed_partition.planner.graphs.layer_graph import FEW_TENSORS, LONGEST_SHARE, LayerGraph, Node
from deepspeed_partition.planner.graphs.pipedream_profile import read_graph
from tests.exhaustive import some


def node(name: str, reads=(), *, ms: float = 1.0, weight: int = 0, size: int = 1, is_input: bool = False) -> Node:
    return Node(
        name=name, type="Layer", forward_milliseconds=ms, backward_milliseconds=2 * ms, weight_bytes=weight,
        output_bytes=size, reads=tuple(reads), is_input=is_input,
    )  # fmt: skip


@st.composite
def graphs(draw: st.DrawFn, most: int = 12) -> LayerGraph:
    """Connected: an input, then nodes that read some of those before them, in a shuffled order."""
    count = draw(st.integers(1, most))
    given_nodes = draw(st.integers(1, 2))
    made = [node(f"in{i}", size=draw(st.integers(0, 9)), is_input=True) for i in range(given_nodes)]
    for index in range(count):
        last = len(made) - 1
        first = given_nodes if index else 0  # what connects it is no input, but for the first
        reads = {draw(st.integers(first, last)), *draw(st.lists(st.integers(0, last), max_size=2))}
        made.append(
            node(
                f"n{index}",
                reads,
                ms=draw(st.sampled_from([0, 0, 0.1, 1.3, 7])),
                weight=draw(st.sampled_from([0, 0, 5])),
                size=draw(st.integers(0, 9)),
            )
        )
    places = draw(st.permutations(range(len(made))))
    shuffled = [made[old] for old in places]
    moved = {old: new for new, old in enumerate(places)}
    return LayerGraph(
        [
            Node(**{key: getattr(each, key) for key in Node.__slots__ if key != "reads"},
                 reads=tuple(moved[old] for old in each.reads))
            for each in shuffled
        ]
    )  # fmt: skip


def crossing_bytes(graph: LayerGraph, order: list[int], cut: int) -> int:
    """By the definition: made before the cut, and read after it or at the end."""
    before, after = set(order[:cut]), set(order[cut:])
    total = 0
    for index, each in enumerate(graph.nodes):
        there = each.is_input or index in before
        wanted = any(index in graph.nodes[reader].reads for reader in after)
        total += each.output_bytes * (there and (wanted or (index in graph.results and index in before)))
    return total


@settings(max_examples=some(300), deadline=None)
@given(graphs())
def test_a_chain_conserves_its_graph(graph):
    order = graph.order()
    assert sorted(order) == [index for index, each in enumerate(graph.nodes) if not each.is_input]
    for place, index in enumerate(order):
        assert all(graph.nodes[read].is_input or read in order[:place] for read in graph.nodes[index].reads)
    cuts, chain = graph.boundaries(order), graph.to_chain()
    assert (cuts[0], cuts[-1]) == (0, len(order))
    assert chain.num_layers == len(cuts) - 1
    assert chain.input_bytes == sum(each.output_bytes for each in graph.nodes if each.is_input)
    for layer, (start, stop) in zip(chain.layers, pairwise(cuts), strict=True):
        inside = [graph.nodes[index] for index in order[start:stop]]
        forward = sum(Fraction(str(each.forward_milliseconds)) for each in inside)
        assert layer.forward_seconds == float(forward / 1000)
        assert layer.backward_seconds == float(2 * forward / 1000)
        assert layer.weight_bytes == sum(each.weight_bytes for each in inside)
        assert layer.output_bytes == crossing_bytes(graph, order, stop)
        assert layer.stash_bytes == sum(
            graph.nodes[i].output_bytes for i in {i for each in inside for i in each.reads}
        )
        if any(not each.costs_nothing for each in map(graph.nodes.__getitem__, order)):
            assert any(not each.costs_nothing for each in inside), "no layer that is only a view"


@settings(max_examples=60, deadline=None)
@given(graphs(most=6))
def test_no_order_has_less_crossing(graph):
    def cost(order):
        return sum(crossing_bytes(graph, order, cut) for cut in range(1, len(order) + 1))

    def follows_edges(order):
        return all(
            graph.nodes[read].is_input or read in order[:place]
            for place, index in enumerate(order)
            for read in graph.nodes[index].reads
        )

    assert cost(graph.order()) == min(
        cost(list(order)) for order in permutations(graph.layers) if follows_edges(order)
    )


@settings(max_examples=some(200), deadline=None)
@given(graphs())
def test_every_cut_that_few_tensors_cross_is_there_and_long_layers_are_cut_further(graph):
    order = graph.order()
    cuts, crossing = graph.boundaries(order), graph.crossing(order)
    total = sum(graph.nodes[index].milliseconds for index in order)
    for start, stop in pairwise(cuts):
        inside = [graph.nodes[index] for index in order[start:stop]]
        working = [place for place, each in enumerate(inside, start) if not each.costs_nothing]
        long = sum(each.milliseconds for each in inside) >= LONGEST_SHARE * total
        for left, right in pairwise(working):  # all positions between two that cost something
            fewest = min(crossing[cut].num_tensors for cut in range(left + 1, right + 1))
            assert fewest > FEW_TENSORS
            assert not long


def layered(edges: dict[str, str], **changes) -> LayerGraph:
    """``{"b": "a x"}``: b reads a and x; what is read and reads nothing itself is an input."""
    names = list(dict.fromkeys([*(name for reads in edges.values() for name in reads.split()), *edges]))
    place = {name: index for index, name in enumerate(names)}
    return LayerGraph(
        [
            node(name, [place[read] for read in edges.get(name, "").split()], is_input=name not in edges,
                 **changes.get(name, {}))
            for name in names
        ]
    )  # fmt: skip


def test_a_residual_block_carries_its_input_past():
    chain = layered({"a": "x", "b": "a", "c": "b", "add": "c a", "d": "add"}, a={"size": 10}).to_chain()
    assert [layer.name for layer in chain.layers] == ["a", "b", "c", "add", "d"]
    assert [layer.output_bytes for layer in chain.layers] == [10, 11, 11, 1, 1]
    assert [layer.stash_bytes for layer in chain.layers] == [1, 10, 1, 11, 1]


def test_a_tensor_is_stashed_once_by_each_layer_that_reads_it():
    """a is read by both views and by b; the views cost nothing and share a layer with b."""
    free = {"ms": 0}
    graph = layered({"a": "x", "v": "a", "w": "a", "b": "v w a"}, a={"size": 10}, v=free, w=free)
    chain = graph.to_chain()
    assert [layer.name for layer in chain.layers] == ["a", "v..b"]
    assert chain.layers[1].stash_bytes == 10 + 1 + 1


def test_what_the_network_leaves_aside_crosses_nothing_and_an_early_result_crosses_all():
    free = {"ms": 0}
    graph = layered(
        {"lstm": "x", "item": "lstm", "state": "lstm", "aux": "item", "b": "item", "c": "b"},
        lstm={"size": 7}, item=free | {"size": 6}, state=free | {"size": 100}, aux={"size": 3},
    )  # fmt: skip
    assert {graph.nodes[index].name for index in graph.results} == {"aux", "c"}
    chain = graph.to_chain()
    assert chain.layers[-1].output_bytes == 3 + 1
    assert max(layer.output_bytes for layer in chain.layers) < 100


def nasnet(cells: int, per_cell: int = 5) -> LayerGraph:
    """Each cell reads the two before it; five branches of a cell are joined."""
    edges, before, last = {"stem": "image"}, "stem", "stem"
    for cell in range(cells):
        for branch in range(per_cell):
            edges[f"c{cell}b{branch}"] = f"{last if branch % 2 else before}"
            edges[f"c{cell}b{branch}x"] = f"c{cell}b{branch}"
        edges[f"c{cell}"] = " ".join(f"c{cell}b{branch}x" for branch in range(per_cell))
        before, last = last, f"c{cell}"
    return layered(edges)


def encoder_decoder(depth: int) -> LayerGraph:
    """Every layer of the decoder attends to the encoder's result."""
    edges = {"e0": "source", "d0": "target"}
    for layer in range(1, depth):
        edges[f"e{layer}"] = f"e{layer - 1}"
    for layer in range(1, depth):
        edges[f"d{layer}"] = f"d{layer - 1} e{depth - 1}"
    return layered(edges)


@pytest.mark.parametrize(
    "graph",
    [nasnet(6), nasnet(2), nasnet(1), encoder_decoder(8)],
    ids=["six cells", "two cells", "one cell", "encoder and decoder"],
)
def test_networks_with_several_roads_stay_plannable(graph):
    chain = graph.to_chain()
    assert max(layer.compute_seconds for layer in chain.layers) < chain.compute_seconds / 4
    platform = Platform(num_devices=4, memory_bytes=10**9, bandwidth=1e9)
    assert make_plan(chain, platform, "contiguous").period_seconds < 1.5 * chain.compute_seconds / 4


def test_wide_and_long_graphs_end():
    wide = layered({"a": "x"} | {f"b{i}": "a" for i in range(400)} | {"c": " ".join(f"b{i}" for i in range(400))})
    assert wide.to_chain().compute_seconds == pytest.approx(402 * 0.003)
    assert layered({"l0": "x"} | {f"l{i}": f"l{i - 1}" for i in range(1, 2000)}).to_chain().num_layers == 2000


GRAPH = """\
node1 -- Input -- forward_compute_time=9.5, backward_compute_time=0.0, activation_size=64.0, parameter_size=0.0
node2 -- Conv2d(3, 8) -- forward_compute_time=1.37, backward_compute_time=2.0, activation_size=128.0, parameter_size=32.0

node3 -- LSTM(8, 8) -- forward_compute_time=3, backward_compute_time=4, activation_size=[16.0; 2.0], parameter_size=8.0
node4 -- Linear( (in): Linear(8)) -- forward_compute_time=1, backward_compute_time=1, activation_size=4.0, parameter_size=16.0 -- stage_id=3
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4
\tnode3 -- node4
"""  # noqa: E501, the format's own lines


@pytest.mark.parametrize("text", [GRAPH, "\ufeff" + GRAPH, GRAPH.replace("\n", "\r\n"), "\n" + GRAPH])
def test_a_graph_file_is_read_where_a_chain_is(tmp_path, text):
    path = tmp_path / "small.graph.txt"
    path.write_bytes(text.encode())
    chain = Chain.load(path)
    assert (chain.name, chain.input_bytes) == ("small", 64)
    assert [(layer.name, layer.type) for layer in chain.layers] == [
        ("node2", "Conv2d"), ("node3", "LSTM"), ("node4", "Linear"),
    ]  # fmt: skip
    assert [layer.forward_seconds for layer in chain.layers] == [0.00137, 0.003, 0.001], "times are milliseconds"
    assert [layer.output_bytes for layer in chain.layers] == [128, 18, 4]
    assert [layer.stash_bytes for layer in chain.layers] == [64, 128, 18]
    assert [layer.weight_bytes for layer in chain.layers] == [32, 8, 16]
    chain.save(tmp_path / "chain.json")
    assert Chain.load(tmp_path / "chain.json") == chain
    (tmp_path / "graph.txt").write_bytes(text.encode())
    assert Chain.load(tmp_path / "graph.txt").name == tmp_path.name, "the folder names it"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("\tnode2 -- node3", "\tnode2 -- node9", "line 7: there is no node 'node9'"),
        ("\tnode2 -- node3", "\tnode2 node3", "line 7: 'node2 node3' is neither a node nor an edge"),
        ("\tnode3 -- node4\n\tnode3", "\tnode3 -- node4\n\tnode4", "line 5: node 'node4' waits for itself"),
        ("\tnode2 -- node3\n", "\tnode2 -- node3\n\tnode4 -- node2\n", "line [245]: .* the graph has a circle"),
        ("\tnode2 -- node3\n", "", "line 4: node 'node3' is not connected with 'node2': the graph has parts"),
        ("\tnode2 -- node3", "\tnode2 -- node1", "line 7: 'node1' is an input and reads nothing"),
        ("node4 -- L", "node2 -- L", "line 5: node 'node2' stands on line 2, too"),
        ("=1.37,", "=NaN,", "line 2: forward_compute_time is 'NaN', not a number from 0"),
        ("=1.37,", "=-1,", "line 2: forward_compute_time is '-1', not a number from 0"),
        ("=1.37,", "=1e999,", "line 2: forward_compute_time is '1e999', not a number from 0"),
        ("=128.0", "=128.5", "line 2: activation_size is '128.5', not a whole number of bytes"),
        ("[16.0; 2.0]", "[16.0, 2.0]", "line 4: activation_size is '.16.0', not a number"),
        ("[16.0; 2.0]", "[]", "line 4: activation_size is '', not a number"),
        ("parameter_size=8.0", "parameters=8.0", "line 4: not a node: write it like node1 -- Linear"),
        ("LSTM(8, 8) -- ", "", "line 4: not a node"),
        ("node3 -- LSTM(8, 8) -- ", "-- ", "line 4: not a node"),  # once a ValueError, found by the fuzzer
    ],
)
def test_errors_in_a_graph_are_named_with_their_line(tmp_path, old, new, message):
    path = tmp_path / "bad.graph.txt"
    assert old in GRAPH
    path.write_text(GRAPH.replace(old, new, 1))
    with pytest.raises(ChainFormatError, match=message) as raised:
        Chain.load(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


def test_graphs_without_layers_or_with_too_many_are_refused():
    inputs = GRAPH.splitlines()[0]
    with pytest.raises(ChainFormatError, match="x: the graph has no nodes besides inputs"):
        read_graph(inputs, name="x", where="x")
    with pytest.raises(ValueError, match="5001 nodes and at most 4096 are read"):
        layered({"l0": "x"} | {f"l{i}": f"l{i - 1}" for i in range(1, 5000)})

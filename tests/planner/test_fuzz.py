"""Ten thousand inputs of all kinds: each is read, or refused in one printable sentence of the documented error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import jsonschema
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deepspeed_partition import Chain, ChainFormatError, MadPipeError, Plan, PlanFormatError, cli, make_plan
from deepspeed_partition.options import Options
from deepspeed_partition.planner import units
from deepspeed_partition.planner.errors import FormatError
from deepspeed_partition.planner.io import files
from tests.exhaustive import some
from tests.planner.test_files import CHAIN, PLATFORM
from tests.planner.test_graphs import GRAPH

many = settings(deadline=None, suppress_health_check=list(HealthCheck))

PLAN = make_plan(Chain.from_dict(CHAIN), PLATFORM, num_micro_batches=3).to_dict()


def assert_one_sentence(error: Exception) -> None:
    assert str(error)
    assert str(error).isprintable(), repr(str(error))


# Files, byte by byte

TOKENS = [
    b"", b"NaN", b"-Infinity", b"1e999", b"-0.0", b"9" * 400, b"9" * 5000, b"1e-400", b"0.5", b"true",
    b"null", b'"\\ud800"', b'"\\u001b[31m"',
    b'"' + b"n" * 5000 + b'"', b"[" * 3000, b'{"a":' * 3000, b"]", b"}", b",", b'"',
    b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x00", b"\r\n", b"\n", b" -- ", b"\tnode2 -- node2\n",
    b"\tnode4 -- node2\n", b"=", b";", b"node2", b"Input", b'"layers":', b'"format":"madpipe-chain/1",',
]  # fmt: skip

FILES = {
    "chain": (json.dumps(CHAIN).encode(), Chain, ChainFormatError),
    "plan": (json.dumps(PLAN).encode(), Plan, PlanFormatError),
    "graph": (GRAPH.encode(), Chain, ChainFormatError),
}


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """A few tokens written over slices of the content; sometimes it ends early, or is something else."""
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(content)))
        length = draw(st.sampled_from([0, 0, 1, 2, 10, 100]))
        token = draw(st.sampled_from(TOKENS) | st.binary(max_size=6))
        content = content[:start] + token + content[start + length :]
    return content[: draw(st.integers(0, len(content)))] if draw(st.integers(0, 9)) == 0 else content


@pytest.mark.parametrize("kind", FILES)
def test_any_bytes_are_read_or_refused(tmp_path_factory, kind):
    content, reader, error = FILES[kind]
    path = tmp_path_factory.mktemp("fuzz") / "file"
    accepted = 0

    @settings(many, max_examples=some(1500))
    @given(damaged(content))
    def read(data: bytes) -> None:
        nonlocal accepted
        path.write_bytes(data)
        try:
            value = reader.load(path)
        except error as refusal:
            assert_one_sentence(refusal)
            return
        accepted += 1
        again = reader.from_dict(json.loads(json.dumps(value.to_dict(), allow_nan=False)))
        assert again == value
        if isinstance(value, Chain):
            assert again.digest() == value.digest()

    read()
    assert accepted > some(20), "otherwise only refusals are tested"


# Documents, value by value: the reader agrees with the schema and the documented checks

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 5) | st.floats()
    | st.sampled_from([2**53, 2**60, 10**18, 10**299, -(10**30)])
    | st.text(max_size=4) | st.sampled_from(["F0", "SF0", "B9", "madpipe-chain/2", "\ud800", "\x1b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "device", "x"]), inner),
    max_leaves=4,
)  # fmt: skip


@st.composite
def changed_somewhere(draw: st.DrawFn, document: dict) -> dict:
    """The document with one or two values replaced, removed or doubled."""
    document = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 2))):
        holder, key = draw(st.sampled_from(list(_places(document))))
        match draw(st.sampled_from(["replace", "replace", "remove", "double", "near"])):
            case "replace":
                holder[key] = draw(json_values)
            case "remove":
                del holder[key]
            case "double" if isinstance(holder, list):
                holder.append(holder[key])
            case "near" if isinstance(holder[key], int):
                holder[key] += draw(st.sampled_from([-1, 1, 0.0]))
        if not list(_places(document)):
            break
    return document


def _places(value) -> Iterator[tuple]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield value, key
        yield from _places(inner)


def chain_has_no_other_error(data: dict) -> bool:
    total, before = data["input_bytes"], data["input_bytes"]
    for layer in data["layers"]:
        stash = layer.get("stash_bytes", before)
        total += layer["weight_bytes"] + layer["output_bytes"] + stash + layer.get("transient_bytes", 0)
        before = layer["output_bytes"]
    return total <= 2**58


def plan_has_no_other_error(data: dict) -> bool:
    """The checks that the schema's comment lists."""
    devices, end = data["platform"]["num_devices"], 0
    for stage in data["stages"]:
        start, stop = stage["layers"]
        if start != end or stop <= start or stage["device"] >= devices:
            return False
        end = start
        blocks = stage.get("rematerialize", False)
        for first, last in blocks if isinstance(blocks, list) else []:
            if not end <= first < last <= stop:
                return False
            end = last
        end = stop
    for operation in data["operations"]:
        places = operation.get("link") if operation["operation"][0] == "S" else [operation.get("device", devices)]
        if places is None or max(places) >= devices:
            return False
    lists = [data["peak_memory_bytes"], data["memory"]]
    if "num_micro_batches" in data:
        if "step_seconds" not in data or "order" not in data:
            return False
        lists.append(data["order"])
    return end == data["chain"]["num_layers"] and all(len(each) == devices for each in lists)


def all_finite(value) -> bool:
    if isinstance(value, float):
        return abs(value) < float("inf")
    return all(all_finite(holder[key]) for holder, key in _places(value) if isinstance(holder[key], float))


@pytest.mark.parametrize(
    ("kind", "document", "reader", "no_other_error"),
    [("chain", CHAIN, Chain, chain_has_no_other_error), ("plan", PLAN, Plan, plan_has_no_other_error)],
    ids=["chain", "plan"],
)
def test_the_reader_accepts_what_the_schema_and_the_documented_checks_accept(
    kind: str, document: dict, reader, no_other_error: Callable[[dict], bool]
):
    schema = json.loads((files.SCHEMAS / f"{kind}.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    seen = {True: 0, False: 0}

    @settings(many, max_examples=some(1200))
    @given(changed_somewhere(document))
    def compare(data: dict) -> None:
        good = all_finite(data) and validator.is_valid(data) and no_other_error(data)
        seen[good] += 1
        try:
            value = reader.from_dict(data)
        except FormatError as refusal:
            assert not good, refusal
            assert_one_sentence(refusal)
        else:
            assert good
            assert reader.from_dict(value.to_dict()) == value
            validator.validate(value.to_dict())

    compare()
    assert min(seen.values()) > some(50), seen


# Options and the command line

odd_text = st.text(max_size=12) | st.text("0123456789.eE-+ ,GMkiBs/unµ:*()[]{}\\", max_size=12)
numbers = st.floats() | st.integers() | st.sampled_from([10**400, -(10**400), True, None])


@settings(many, max_examples=some(1500))
@given(
    st.dictionaries(
        st.sampled_from([*Options.__dataclass_fields__, "memroy", "a\nb", "\ud800"]),
        odd_text | numbers | st.lists(numbers, max_size=3) | st.just({}),
        max_size=3,
    )
    | st.lists(numbers, max_size=2)
    | odd_text
)
def test_any_options_are_read_or_refused(mapping):
    try:
        options = Options.from_mapping(mapping)
    except ValueError as refusal:
        assert_one_sentence(refusal)
        return
    known = {key: getattr(options, key) for key in Options.__dataclass_fields__}
    assert Options.from_mapping(known) == options


@settings(many, max_examples=some(1500))
@given(odd_text | numbers | st.lists(numbers, max_size=2))
def test_any_quantity_is_read_or_refused(value):
    for parse in (units.parse_size, units.parse_bandwidth, units.parse_seconds):
        try:
            parsed = parse(value)
        except ValueError as refusal:
            assert_one_sentence(refusal)
        else:
            assert parsed >= 0
            assert parse(parsed) == parsed
            assert parse(repr(parsed)) == parsed


def test_any_option_of_the_command_line_is_read_or_refused(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "chain.json"
    path.write_text(json.dumps(CHAIN))
    good = {"--devices": "2", "--memory": "500MB", "--bandwidth": "12GB/s"}
    names = [*good, "--latency", "--weight-copies", "--micro-batches", "--algorithm", "--time-limit"]
    known = [
        "nan", "inf", "-1", "0", "1e300", "9" * 5000, "1MB", "450MB", "type:(", "type:a{99999999999}",
        "type:" + "(" * 500, "0,1,2", "0,2", "0,1,,2", "pipedream", "mcap",
    ]  # fmt: skip
    words = odd_text | st.sampled_from(known)
    statuses = set()

    @settings(many, max_examples=some(1000))
    @example({"--latency": "0"})
    @example({"--devices": "nan"})
    @example({"--memory": "1MB"})
    @given(st.dictionaries(st.sampled_from(names), words, min_size=1, max_size=2))
    def run(options: dict[str, str]) -> None:
        if options.get("--micro-batches", "").strip().isdigit():
            options["--micro-batches"] = options["--micro-batches"][:2]  # long steps are tested elsewhere
        arguments = [f"{name}={value}" for name, value in (good | options).items()]
        errors: list[str] = []
        status = run_quietly(["plan", str(path), "--json", *arguments], errors)
        statuses.add(status)
        assert status in (0, 2, 3)
        assert len(errors) <= 2, "a usage line and a sentence"
        assert all(line.isprintable() for line in errors)
        assert bool(errors) == (status != 0)

    def run_quietly(arguments: list[str], errors: list[str]) -> int:
        with pytest.MonkeyPatch.context() as patch:
            echo = lambda text="", err=False, nl=True: errors.append(text) if err else None  # noqa: E731
            patch.setattr(cli.click, "echo", echo)
            return cli.run(arguments)

    run()
    assert statuses == {0, 2, 3}


def test_deep_values_in_known_fields_are_refused():
    deep: object = []
    for _ in range(100_000):
        deep = [deep]
    for reader, document in ((Chain, CHAIN), (Plan, PLAN)):
        with pytest.raises(FormatError, match="nested too deeply"):
            reader.from_dict(document | {"extra": deep})
        with pytest.raises((FormatError, MadPipeError)):
            reader.from_dict(document | {"name": deep, "algorithm": deep})

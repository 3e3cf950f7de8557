"""What a terminal of 80 columns shows: every figure, no broken cell, colours only where they are wanted."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from deepspeed_partition import Chain, LayerProfile, Plan, Platform, cli, make_plan
from deepspeed_partition.planner.report import draw, draw_timelines
from deepspeed_partition.planner.report.comparison import COMPARED, compare
from deepspeed_partition.planner.report.frontier import Frontier
from deepspeed_partition.planner.report.page import plan_page
from deepspeed_partition.planner.report.pictures import frontier_svg
from deepspeed_partition.planner.report.planned_run import busy, planned_run, repeats_pattern
from deepspeed_partition.planner.units import counted, format_seconds
from tests.planner.test_micro_batches import two_per_period
from tests.planner.test_timeline import as_simulated, planned, timeline_of
from tests.terminal import output_in_a_terminal

ANSI = re.compile(r"\x1b\[[0-9;]*m")
NUM_DEVICES = 16
COMMANDS = [
    ["plan", "CHAIN", "--devices", "16", "--memory", "40GB", "--bandwidth", "100GB/s", "--algorithm", "uniform",
     "--micro-batches", "8", "-o", "PLAN"],
    ["show", "PLAN"],
    ["compare", "CHAIN", "--devices", "16", "--memory", "40GB", "--bandwidth", "100GB/s", "--time-limit", "0.5"],
    ["compare", "CHAIN", "--devices", "4", "--memory", "8GB", "--bandwidth", "100GB/s", "--time-limit", "0.5",
     "--micro-batches", "4"],
    ["frontier", "CHAIN", "--devices", "16", "--bandwidth", "100GB/s", "--algorithm", "uniform"],
    ["convert", "CHAIN"],
    ["--help"],
]  # fmt: skip
RUN = """
from deepspeed_partition import cli
for command in {commands!r}:
    print("$", command[0], flush=True)
    print("->", cli.run(command), flush=True)
"""


def long_chain() -> Chain:
    layers = (
        LayerProfile(
            name=f"model.layers.{index}.post_attention_layernorm",
            type="TransformerBlock",
            forward_seconds=0.01234 + index % 3 / 1000,
            backward_seconds=0.02345,
            weight_bytes=123_400_000,
            output_bytes=33_600_000,
            stash_bytes=432_100_000,
        )
        for index in range(40)
    )
    return Chain(name="long", input_bytes=33_600_000, layers=tuple(layers))


def shown(folder: os.PathLike[str], commands: list[list[str]], **environment: str) -> dict[int, str]:
    """What a terminal of 80 columns gets from each command, all run by one process."""
    files = {"CHAIN": f"{folder}/chain.json", "PLAN": f"{folder}/plan.json"}
    long_chain().save(files["CHAIN"])
    commands = [[files.get(word, word) for word in command] for command in commands]
    variables = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | environment
    command = [sys.executable, "-c", RUN.format(commands=commands)]
    text = output_in_a_terminal(command, variables, only_output=True)
    parts = text.replace("\r\n", "\n").split("$ ")[1:]
    return dict(enumerate(parts))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return shown(tmp_path_factory.mktemp("plain"), COMMANDS, NO_COLOR="1", TERM="xterm")


def test_nothing_is_wider_than_the_terminal_and_nothing_is_cut(plain):
    assert len(plain) == len(COMMANDS)
    for text in plain.values():
        assert text.rstrip().endswith(("-> 0", "-> 3"))
        assert max(map(len, text.splitlines())) <= 80
        assert "…" not in text and "\x1b" not in text
    said = [line for line in plain[len(COMMANDS) - 1].splitlines() if line.startswith("  ")]
    assert len(said) > 10 and not any(line.rstrip().endswith("...") for line in said), "no sentence is cut off"


def test_the_table_of_stages_has_every_column_and_every_layer(plain):
    text = plain[1]
    chain = long_chain()
    rows = [line.split() for line in text.splitlines() if re.match(r" +\d+ +\d+ +[\d.]+ ms", line)]
    assert [int(row[0]) for row in rows] == list(range(NUM_DEVICES))
    ranges = [next(word for word in row if ".." in word and word != "..") for row in rows]
    bounds = [tuple(map(int, each.split(".."))) for each in ranges]
    assert bounds[0][0] == 0 and bounds[-1][1] == chain.num_layers
    assert all(first[1] == second[0] for first, second in pairwise(bounds))
    names = [layer.name for layer in chain.layers]
    assert all(names[layer] in text for start, stop in bounds for layer in (start, stop - 1)), "no name is broken"
    for word in ("stage", "device", "forward", "backward", "in flight", "layers", "= weights", "+ stash",
                 "+ buffers", "+ transient", "busy", "lower bound", "gap", "Bottleneck: ", "Memory: ",
                 "one period of", "one step, "):  # fmt: skip
        assert word in text, word
    assert all(f"\ndevice {device} " in text for device in range(NUM_DEVICES))
    drawn = [line for line in text.splitlines() if re.match(r"(device|link) .*\|", line)]
    assert len(drawn) > 2 * NUM_DEVICES and all(re.search(r"\| +\d+%$", line) for line in drawn), drawn


def test_a_timeline_says_for_how_long_each_row_is_busy():
    """Of links that were busy for 3 % of a step every character was drawn: each transfer is one at least."""
    made = long_chain()
    plan = make_plan(
        made, Platform(num_devices=2, memory_bytes=10**12, bandwidth=1e12), [0, 20, 40], num_micro_batches=32
    )
    run = planned_run(plan, made)
    rows = draw_timelines.planned_timeline(run, plan.platform, 40).splitlines()
    shares = {each.place: each.share for each in busy(plan)}
    for row in (row for row in rows if "|" in row):
        place, drawn, share = row.split("|")
        if place.startswith("device"):
            assert share.strip() == f"{shares[place.strip()]:.0%}"
        else:
            assert drawn.count("-") > 30 and share.strip() == "0%"


def test_a_pattern_that_a_step_does_not_repeat_is_not_drawn(tmp_path, capsys):
    """Two stages on each of 16 devices: a period of 1.2 s was drawn above a step of 32 micro-batches in 3 s."""
    plan, _ = planned(1)
    assert plan.step is not None and repeats_pattern(plan)
    longer = plan.step.step_seconds / plan.step.num_micro_batches * 1.5
    plan = replace(plan, period_seconds=longer, lower_bound_seconds=plan.lower_bound_seconds)
    plan.save(tmp_path / "plan.json")
    assert cli.run(["show", str(tmp_path / "plan.json")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "one step, " in told and "one period of" not in told and " period " not in told


def test_a_step_in_an_order_of_its_own_is_shown_without_a_period(tmp_path, capsys):
    """An interleaved step said "gap 1715.8%", of a period that it does not run; the step was near its bound."""
    layers = tuple(LayerProfile(name=str(index), forward_seconds=0.01, backward_seconds=0.02, weight_bytes=0,
                                output_bytes=4000, stash_bytes=40_000_000) for index in range(8))  # fmt: skip
    made, files = Chain(name="eight", input_bytes=4000, layers=layers), (tmp_path / "chain", tmp_path / "plan")
    made.save(files[0])
    devices = ["--devices", "4", "--memory", "400MB", "--bandwidth", "12GB/s", "--micro-batches", "8"]
    assert cli.run(["plan", str(files[0]), *devices, "-o", str(files[1])]) == 0
    capsys.readouterr()
    plan = Plan.load(files[1])
    assert plan.step is not None and not plan.is_contiguous and not repeats_pattern(plan)
    assert plan.step.step_seconds > 8 * plan.period_seconds, "as long as a step of the pattern would be"
    for command in (["show", str(files[1])], ["check", str(files[1]), str(files[0])]):
        assert cli.run(command) == 0
        told = capsys.readouterr().out
        assert "step" in told and "period" not in told, told
    bound = plan.step.lower_bound_seconds
    assert bound is not None and plan.step.gap is not None
    shown = f"lower bound {format_seconds(bound)} (gap {plan.step.gap:.1%}, "
    assert shown in " ".join(draw.promises(plan)) and plan.step.num_micro_batches == 8
    assert "step of 8 micro-batches: " in next(draw.promises(plan))
    page = plan_page(plan, measured=timeline_of(plan, as_simulated(plan, made)))
    assert "Planned and measured" in page and ">step</t" in page and ">period</t" not in page
    assert "One step of" in plan._repr_html_() and "period" not in plan._repr_html_()
    found = compare(made, plan.platform, ("contiguous",), num_micro_batches=8, planned=plan)
    rows = [line.split() for line in draw.comparison_text(found, 80).splitlines()]
    mine, contiguous = (next(row for row in rows if row[:1] == [name]) for name in ("madpipe", "contiguous"))
    # algorithm, step, its unit, its gap, the ratio, proved, period
    assert mine[3] == f"{plan.step.gap:.1%}" and mine[6] == "-" and contiguous[6:8] == ["60", "ms"]
    # The same stages in the order of their pattern: the period is that of the step's middle.
    pattern = planned_run(replace(plan, step=None), num_micro_batches=8)
    orders: list[list[tuple[str, int]]] = [[] for _ in range(4)]
    for each in pattern.operations:
        if each.device is not None:
            orders[each.device].append((each.operation, each.micro_batch))
    step = replace(plan.step, order=tuple(map(tuple, orders)), step_seconds=pattern.seconds)
    assert repeats_pattern(replace(plan, step=step))
    assert "period 60 ms per micro-batch" in " ".join(draw.promises(replace(plan, step=step)))


def test_a_row_of_a_comparison_is_one_line(plain):
    for number in (2, 3):
        figures, _, cuts = plain[number].partition("\n\nmadpipe ")
        names = [line.split()[0] for line in figures.splitlines() if line and line[0].isalpha()]
        assert names[-8:] == [
            *COMPARED, "replicated*",
        ], figures  # fmt: skip
        assert all(f"\n{name} " in f"\nmadpipe {cuts}" for name in names[-8:])


def test_colours_add_nothing_but_colours(plain, tmp_path):
    coloured = shown(tmp_path, COMMANDS[:2], TERM="xterm")

    def words(text: str) -> list[str]:
        return ANSI.sub("", text).partition("saved ")[0].split()

    assert "\x1b[34m" in coloured[1]
    for number in (0, 1):
        assert "\x1b[" in coloured[number]
        assert words(coloured[number]) == words(plain[number])


@pytest.mark.parametrize("seed", range(12))
def test_the_run_of_a_plan_alone_is_that_with_its_chain(seed):
    """Also with several stages on a device; the plan's own numbers are enough for its step."""
    plan, chain = planned(seed)
    alone, exact = planned_run(plan), planned_run(plan, chain)
    assert alone.is_step and alone.is_exact and exact.is_exact
    assert exact.seconds == pytest.approx(plan.step_seconds)

    def starts(run):
        return {(each.operation, each.micro_batch): each.start_seconds for each in run.operations}

    assert starts(alone) == pytest.approx(starts(exact), abs=1e-6 * plan.step_seconds)
    fill, drain = exact.phases
    assert 0 <= fill <= drain <= exact.seconds
    for each in busy(plan):
        if each.place.startswith("device"):
            mine = [one for one in exact.operations if f"device {one.device}" == each.place]
            assert each.seconds == pytest.approx(sum(one.duration_seconds for one in mine))


def test_a_pattern_is_unrolled_for_every_micro_batch():
    chain, plan = two_per_period()
    run = planned_run(plan, chain, 6)
    assert not run.is_step
    counts = Counter(each.operation for each in run.operations)
    number = {each.operation: 0 for each in plan.operations}
    for each in plan.operations:
        number[each.operation] += 3
    assert counts == number, "three periods of two micro-batches"
    drawn = draw_timelines.planned_timeline(run, plan.platform, 60)
    assert drawn.startswith("6 micro-batches, ")


def test_the_bottleneck_is_the_busiest_device_or_link():
    layers = tuple(
        LayerProfile(name=str(index), forward_seconds=1, backward_seconds=2, weight_bytes=0, output_bytes=size)
        for index, size in enumerate((10, 0))
    )
    chain = Chain(name="two", input_bytes=0, layers=layers)
    slow = make_plan(chain, Platform(num_devices=2, memory_bytes=10**6, bandwidth=4.0), [0, 1, 2])
    assert "Bottleneck: the link 0-1 is busy for 5 s of the 5 s of a period (100.0%)." in draw.summary(slow)
    fast = make_plan(chain, Platform(num_devices=2, memory_bytes=10**6, bandwidth=1e6), [0, 1, 2])
    assert "Bottleneck: device 0 and device 1 are busy for 3 s of the 3 s of a period" in draw.summary(fast)


@pytest.mark.parametrize("command", ["compare", "frontier"])
def test_pictures_have_what_the_tables_have(command, tmp_path, capsys):
    from xml.etree import ElementTree

    long_chain().save(tmp_path / "chain.json")
    picture = tmp_path / "picture.svg"
    options = ["--devices", "4", "--bandwidth", "100GB/s", "--time-limit", "0.5", "--plot", str(picture), "--json"]
    options += ["--memory", "6GB"] if command == "compare" else ["--algorithm", "uniform"]
    assert cli.run([command, str(tmp_path / "chain.json"), *options]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("{") and captured.err == f"saved {picture}\n"
    text = "".join(ElementTree.fromstring(picture.read_text()).itertext())
    if command == "compare":
        assert all(name in text for name in ("madpipe", "parameters", "lower bound"))
    else:
        assert "memory per device" in text
    assert (
        cli.run([command, str(tmp_path / "chain.json"), *options[:4], "--memory", "6GB", "--plot", "a.png"]) == 2
    )
    assert "give a name that ends in .svg" in capsys.readouterr().err


def test_one_slow_plan_does_not_hide_the_others_of_a_frontier():
    """Sixteen devices, 19 plans: the last one was 15 times as slow, and all others lay on one line."""
    _, plan = two_per_period()
    given = ((10.2e9, 0.0681, True), (7.83e9, 0.0723, False), (4.6e9, 0.08, False), (3.35e9, 1.087, False))
    plans = tuple(
        replace(plan, period_seconds=seconds, peak_memory_bytes=(int(most),), proved=proved)
        for most, seconds, proved in given
    )
    drawn = frontier_svg(Frontier(plans, complete=False))
    dots = [tuple(map(float, each)) for each in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', drawn)]
    assert len(dots) == len(given)
    assert dots[0][1] - dots[2][1] > 10, "17 % more time is seen"
    assert dots[3][1] < dots[2][1] - 100 and dots[0][0] - dots[3][0] > 400
    words = re.findall(r">([^<>]+)</text>", drawn)
    assert "times are drawn by their logarithm" in words[1]
    assert {"50 ms", "100 ms", "1 s", "4 GB", "10 GB"} <= set(words), words
    linear = frontier_svg(Frontier(plans[:3], complete=True))
    words = re.findall(r">([^<>]+)</text>", linear)
    assert "logarithm" not in linear and {"0 s", "20 ms", "80 ms", "4 GB", "11 GB"} <= set(words), words
    alone = frontier_svg(Frontier(plans[:1], complete=True))
    assert alone.count("<circle") == 1


def test_plans_in_a_row_with_one_cut_name_it_once():
    """36 plans of one cut, with more and more recomputed, wrote it 36 times below their table."""
    long = "model.layers.0.post_attention_layernorm"
    _, plan = two_per_period()
    plans = tuple(
        replace(plan, period_seconds=seconds, peak_memory_bytes=(most,), chain=replace(plan.chain, name=long))
        for seconds, most in ((1.0, 10**9), (1.5, 8 * 10**8), (2.5, 6 * 10**8))
    )
    told = draw.frontier_text(Frontier(plans, complete=True), 50)
    assert told.count("0,1") == 1 and "1 GB to 600 MB  0,1" in told


def test_counts_are_of_plurals():
    """Lines of a run said "2 micro-batchs"."""
    assert [counted(number, "micro-batch") for number in (1, 2)] == ["1 micro-batch", "2 micro-batches"]
    assert counted(2, "forward") == "2 forwards" and counted(0, "update") == "0 updates"

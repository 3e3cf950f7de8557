"""The command line as a new user meets it: compare, convert, --json, Ctrl-C, completion, and odd files."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
import sys
import termios
from dataclasses import replace

import pytest
from click.shell_completion import BashComplete

from deepspeed_partition import Chain, Plan, Platform, cli, make_plan, replay
from deepspeed_partition.planner.report import comparison, draw
from tests.planner.instances import chain as chain_of
from tests.planner.test_files import CHAIN, changed
from tests.planner.test_graphs import GRAPH

PLATFORM = ["--devices", "2", "--memory", "500MB", "--bandwidth", "12GB/s"]


@pytest.fixture
def graph(tmp_path):
    path = tmp_path / "small.graph.txt"
    path.write_text(GRAPH)
    return str(path)


def run_json(capsys, *arguments: str, status: int = 0):
    """What the command prints, which is JSON and nothing else."""
    assert cli.run(list(arguments)) == status
    captured = capsys.readouterr()
    assert status or not captured.err
    return json.loads(captured.out)


# compare


def test_compare_shows_what_plan_would_make_of_each(chain, capsys):
    shown = run_json(capsys, "compare", chain, *PLATFORM, "--algorithm", "0,2", "--json")
    assert [row["algorithm"] for row in shown["algorithms"]] == [*comparison.COMPARED, "0,2"]
    layers, platform = Chain.load(chain), Platform(num_devices=2, memory_bytes=500e6, bandwidth=12e9)
    best = min(row["period_seconds"] for row in shown["algorithms"] if row["fits"])
    for row in shown["algorithms"]:
        if row["algorithm"] == "0,2":
            assert (row["fits"], row["smallest_memory_bytes"]) == (False, 3 * 2 * 10**8 + 7 + 48 * 10**6 + 3)
            continue
        plan = make_plan(layers, platform, row["algorithm"])
        assert (row["boundaries"], row["period_seconds"]) == (plan.boundaries, plan.period_seconds)
        assert row["peak_memory_bytes"] == list(plan.peak_memory_bytes)
        assert row["ratio_to_best"] == plan.period_seconds / best
        assert shown["lower_bound_seconds"] == plan.lower_bound_seconds
        assert row["proved"] == plan.proved


def test_compare_ranks_by_the_step_where_one_is_asked_for(tmp_path, capsys):
    """The even cut has slow transfers, which its order cannot hide."""
    path = tmp_path / "chain.json"
    chain_of([1, 1, 1, 1], [2, 2, 2, 2], outputs=[10, 900, 10, 0]).save(path)
    platform = ["--devices", "2", "--memory", "1GB", "--bandwidth", "500", "--micro-batches", "4"]
    shown = run_json(capsys, "compare", str(path), *platform, "--json")
    rows = {row["algorithm"]: row for row in shown["algorithms"]}
    assert rows["uniform"]["boundaries"] == [0, 2, 4]
    best = min(row["step_seconds"] for row in rows.values())
    assert rows["madpipe"]["step_seconds"] == best < rows["uniform"]["step_seconds"]
    assert rows["uniform"]["step_seconds"] < rows["uniform"]["blocking_step_seconds"]
    for row in rows.values():
        assert row["ratio_to_best"] == row["step_seconds"] / best
        assert row["num_micro_batches"] == 4
    assert cli.run(["compare", str(path), *platform]) == 0
    assert f"{best:.4g} s" in capsys.readouterr().out


def test_a_rejected_row_does_not_break_the_table(chain, capsys):
    more = ["--algorithm", "type:Conv", "--algorithm", "0,9", "--algorithm", "0,2", "--algorithm", "0,2"]
    assert cli.run(["compare", chain, *PLATFORM, *more]) == 0
    captured = capsys.readouterr()
    figures, _, reasons = captured.out.partition("\n\ntype:Conv ")
    lines = {line.split()[0]: line for line in figures.splitlines() if line.strip()}
    assert "refused" in lines["type:Conv"] and "matches none" in reasons
    assert "refused" in lines["0,9"]
    assert "does not fit" in lines["0,2"] and "needs 648 MB" in lines["0,2"]
    assert "0,1,2" in lines["madpipe"]
    assert captured.out.count("lower bound") == 1
    named = [line for line in figures.splitlines() if line.split()[:1] == ["0,2"]]
    assert len(named) == 1, "named twice, compared once"


def test_compare_where_nothing_fits(chain, capsys):
    tight = ["--devices", "2", "--memory", "1MB", "--bandwidth", "12GB/s"]
    shown = run_json(capsys, "compare", chain, *tight, "--json", status=3)
    assert not any(row["fits"] for row in shown["algorithms"])
    assert cli.run(["compare", chain, *tight]) == 3
    smallest = min(row["smallest_memory_bytes"] for row in shown["algorithms"])
    sentence = capsys.readouterr().err
    assert f"the smallest memory that would do is {smallest} bytes" in sentence
    assert sentence.count("\n") == 1
    enough = ["--devices", "2", "--memory", str(smallest), "--bandwidth", "12GB/s"]
    assert any(row["fits"] for row in run_json(capsys, "compare", chain, *enough, "--json")["algorithms"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data-parallel", "3"], "data_parallel is 3: the pipelines share 2 devices evenly"),
        (["--recompute", "micro-batch", "--weight-versions", "stashing"], "is not planned for one"),
        (["--split-backward", "--weight-versions", "2bw"], "halves of a backward"),
    ],
)
def test_compare_refuses_what_no_algorithm_takes(chain, capsys, options, message):
    assert cli.run(["plan", chain, *PLATFORM, *options]) == 2
    assert message in capsys.readouterr().err
    assert cli.run(["compare", chain, *PLATFORM, *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--algorithm", "best"], "unknown algorithm 'best'"),
        (["--micro-batches", "100000"], "from 1 to 10000"),
        (["--time-limit", "0"], "time_limit_seconds is 0.0: it must be more than 0"),
    ],
)
def test_an_error_in_the_problem_is_no_row(chain, capsys, options, message):
    assert cli.run(["compare", chain, *PLATFORM, *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_cut_is_written_as_algorithm_takes_it_or_with_its_devices():
    plan = make_plan(Chain.from_dict(CHAIN), Platform(num_devices=2, memory_bytes=500e6, bandwidth=12e9))
    assert draw.allocation_text(plan) == "0,1,2"
    crossed = tuple(replace(stage, device=1 - stage.device) for stage in plan.stages)
    assert draw.allocation_text(replace(plan, stages=crossed)) == "0..1@1 1..2@0"


# convert, and graphs wherever chains are read


def test_convert_writes_the_chain_that_plan_reads_from_the_graph(tmp_path, graph, capsys):
    out = str(tmp_path / "chain.json")
    assert cli.run(["convert", graph, "-o", out]) == 0
    assert "Conv2d" in capsys.readouterr().out
    assert Chain.load(out) == Chain.load(graph)
    assert Chain.from_dict(run_json(capsys, "convert", graph, "--json")) == Chain.load(out)
    assert Chain.from_dict(run_json(capsys, "convert", graph, "-o", "-")) == Chain.load(out)
    small = ["--devices", "2", "--memory", "1MB", "--bandwidth", "1MB/s"]
    plan = str(tmp_path / "plan.json")
    for source in (graph, out):
        assert cli.run(["plan", source, *small, "-o", plan]) == 0
        assert cli.run(["check", plan, graph]) == 0
        assert cli.run(["compare", source, *small]) == 0


def test_json_of_every_command(tmp_path, chain, capsys):
    plan = str(tmp_path / "plan.json")
    printed = run_json(capsys, "plan", chain, *PLATFORM, "-o", plan, "--json")
    assert printed == json.loads((tmp_path / "plan.json").read_text())
    assert run_json(capsys, "show", plan, "--json") == printed
    found = run_json(capsys, "check", plan, chain, "--json")
    assert (found["ok"], found["violations"]) == (True, [])
    replayed = replay(Plan.load(plan), Chain.load(chain))
    assert found["in_flight"] == list(replayed.in_flight)
    assert found["peak_memory_bytes"] == printed["peak_memory_bytes"]
    assert found["memory"] == printed["memory"]
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(changed("peak_memory_bytes.0", 5, printed)))
    found = run_json(capsys, "check", str(broken), chain, "--json", status=1)
    assert not found["ok"]
    assert "and the plan says 5" in found["violations"][0]


# Ctrl-C

INTERRUPTED = """
import os, signal, sys
from deepspeed_partition import cli
from deepspeed_partition.planner.deadline import Deadline

asked, passed = 0, Deadline.passed

def interrupted(self):
    global asked
    asked += 1
    if asked in {times!r}:
        os.kill(os.getpid(), signal.SIGINT)
    return passed(self)

Deadline.passed = interrupted
status = cli.run({arguments!r})
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "as it was before"
sys.exit(status)
"""


def interrupted(tmp_path, times: list[int], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, with a real Ctrl-C whenever the search looks at its deadline for one of those times."""
    path = tmp_path / "long.json"
    chain_of([1 + i % 7 for i in range(24)], [2] * 24, outputs=[i % 5 for i in range(24)]).save(path)
    code = INTERRUPTED.format(times=times, arguments=[arguments[0], str(path), *arguments[1:]])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


LONG = [
    "--devices",
    "8",
    "--memory",
    "1MB",
    "--bandwidth",
    "1",
    "--micro-batches",
    "60",
    "--time-limit",
    "1000000",
]


def test_the_first_interrupt_gives_the_best_so_far(tmp_path):
    done = interrupted(tmp_path, [3], "plan", *LONG, "--algorithm", "contiguous", "--json")
    assert (done.returncode, done.stderr) == (0, "madpipe: interrupted: this is the best found so far\n")
    plan = Plan.from_dict(json.loads(done.stdout))
    layers = Chain.load(tmp_path / "long.json")
    assert replay(plan, layers).violations == ()
    finished = make_plan(layers, plan.platform, "contiguous", num_micro_batches=12)
    assert plan.blocking_step_seconds > finished.blocking_step_seconds, "the search was cut short"


def test_the_second_interrupt_ends_it(tmp_path):
    done = interrupted(tmp_path, [3, 4], "plan", *LONG, "--algorithm", "contiguous")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.split() == ["madpipe:", "interrupted"]


def test_an_interrupted_comparison_is_whole(tmp_path):
    done = interrupted(tmp_path, [3], "compare", *LONG, "--json")
    assert done.returncode == 0
    assert "best found so far" in done.stderr
    assert len(json.loads(done.stdout)["algorithms"]) == len(comparison.COMPARED)


def test_a_terminal_shows_how_far_the_search_is_and_standard_output_the_plan(tmp_path):
    path = tmp_path / "chain.json"
    chain_of([3, 1, 3, 1], [3, 1, 3, 1], weights=[1] * 4, outputs=[1] * 4).save(path)
    code = f"import sys; from deepspeed_partition import cli; sys.exit(cli.run({['plan', str(path), *SHARED]!r}))"
    terminal, its_end = os.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    os.set_blocking(terminal, False)
    try:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=its_end, timeout=120)
        shown = os.read(terminal, 100_000).decode()
    finally:
        os.close(its_end)
        os.close(terminal)
    assert done.returncode == 0, shown
    assert not Plan.from_dict(json.loads(done.stdout)).is_contiguous
    assert "planning: period" in shown and "allocations scheduled" in shown


SHARED = ["--devices", "3", "--memory", "1MB", "--bandwidth", "1000", "--json"]
"""Layers of 6, 2, 6 and 2: the fastest plan has both short ones on one device."""


def test_a_plan_is_started_from(tmp_path, capsys):
    path, before = str(tmp_path / "chain.json"), str(tmp_path / "before.json")
    chain_of([3, 1, 3, 1], [3, 1, 3, 1], weights=[1] * 4, outputs=[1] * 4).save(path)
    slower = [*SHARED[:-2], "10"]
    assert cli.run(["plan", path, *slower, "-o", before]) == 0
    capsys.readouterr()
    made = run_json(capsys, "plan", path, *SHARED, "--start", before)
    assert made["period_seconds"] <= Plan.load(before).period_seconds
    for wrong in (["--algorithm", "contiguous"], ["--period", "20"], ["--algorithm", "pipedream-replicated"]):
        assert cli.run(["plan", path, *SHARED, "--start", before, *wrong]) == 2
        assert "--start" in capsys.readouterr().err
    chain_of([1] * 3, [1] * 3).save(path)
    assert cli.run(["plan", path, *SHARED, "--start", before]) == 2
    assert "is for the layers of 'test', which are not those of 'test'" in capsys.readouterr().err


def test_an_interrupt_before_there_is_anything(chain, capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Chain, "load", interrupt)
    assert cli.run(["plan", chain, *PLATFORM]) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err.split()) == ("", ["madpipe:", "interrupted"])


# a new user


def test_madpipe_alone_says_what_there_is(capsys):
    assert cli.run([]) == 0
    text = capsys.readouterr().out
    for name in cli.cli.commands:
        assert f"\n  {name}" in text


@pytest.mark.parametrize("command", sorted(cli.cli.commands))
def test_help_explains_every_option(command, capsys):
    assert cli.run([command, "--help"]) == 0
    text = capsys.readouterr().out
    for param in cli.cli.commands[command].params:
        if param.param_type_name == "option":
            assert param.help, f"{command} {param.opts}"
            assert param.opts[-1] in text


def test_a_mistyped_command_is_recognized(capsys):
    assert cli.run(["flan"]) == 2
    assert "No such command 'flan': did you mean plan?" in capsys.readouterr().err


def completions(*words: str) -> list[str]:
    completer = BashComplete(cli.cli, {}, "madpipe", "_MADPIPE_COMPLETE")
    return [f"{item.type}:{item.value}" for item in completer.get_completions(list(words[:-1]), words[-1])]


def test_the_shell_completes_commands_options_algorithms_and_files():
    assert completions("co") == ["plain:compare", "plain:convert"]
    assert "plain:--micro-batches" in completions("plan", "--mi")
    assert completions("plan", "--algorithm", "pipe") == [
        "plain:pipedream", "plain:pipedream-blind", "plain:pipedream-replicated",
    ]  # fmt: skip
    assert completions("compare", "--algorithm", "ty") == ["plain:type:"]
    assert completions("plan", "cha") == ["file:cha"]
    assert completions("plan", "-o", "x") == ["file:x"]


def test_completion_through_the_environment_as_a_shell_asks():
    environment = os.environ | {
        "_MADPIPE_COMPLETE": "bash_complete",
        "COMP_WORDS": "madpipe sh",
        "COMP_CWORD": "1",
    }
    code = "from deepspeed_partition.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.stdout == "plain,show\n"


def test_standard_input_and_output():
    command = [sys.executable, "-m", "deepspeed_partition", "plan", "-", *PLATFORM, "-o", "-"]
    done = subprocess.run(command, input=json.dumps(CHAIN), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert Plan.from_dict(json.loads(done.stdout)).boundaries == [0, 1, 2]


@pytest.mark.parametrize("command", ["plan", "convert"])
def test_what_is_read_is_not_overwritten(tmp_path, chain, capsys, command):
    link = tmp_path / "link.json"
    link.symlink_to(chain)
    before = (tmp_path / "chain.json").read_text()
    options = PLATFORM if command == "plan" else []
    for target in (chain, str(link)):
        assert cli.run([command, chain, *options, "-o", target]) == 2
        assert "is what is read: write to another file" in capsys.readouterr().err
    assert (tmp_path / "chain.json").read_text() == before


def test_the_code_that_is_profiled_is_not_overwritten(tmp_path, capsys):
    model = tmp_path / "model.py"
    model.write_text("layers = 1\n")
    assert cli.run(["profile", f"{model}:layers", "--micro-batch", "2", "-o", str(model)]) == 2
    assert "is what is read" in capsys.readouterr().err
    assert model.read_text() == "layers = 1\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"import torch\n", "not JSON"),
        (b"PK\x03\x04\xff", "not text"),
        (b"", "not JSON"),
        (b"{}", "format is missing"),
        (b"a -- b\n", "line 1: there is no node 'a'"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path, capsys, content, message):
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    assert cli.run(["plan", str(path), *PLATFORM]) == 2
    sentence = capsys.readouterr().err
    assert f"{path}: {message}" in sentence
    assert sentence.count("\n") == 1


def test_odd_names_are_shown_in_printable_characters(tmp_path, capsys):
    """A surrogate in a name once ended in a bare codec message; escapes and brackets are no colors."""
    name = "a\ud800\x1b[31m\nb[bold]"
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(changed("name", name, changed("layers.0.name", name))))
    plan = str(tmp_path / "plan.json")
    assert cli.run(["plan", str(path), *PLATFORM, "-o", plan]) == 0
    assert Plan.load(plan).stages[0].layer_names == (name,)
    assert cli.run(["show", plan]) == 0
    assert cli.run(["compare", str(path), *PLATFORM, "--algorithm", "type:\ud800"]) == 0
    assert cli.run(["plan", str(path), *PLATFORM, "--algorithm", f"type:{name}"]) == 2
    captured = capsys.readouterr()
    text = captured.out + captured.err
    text.encode()  # no half of a pair is left
    assert "\x1b" not in text
    assert r"a\ud800\x1b[31m b[bold]" in text


@pytest.mark.parametrize(
    "environment", [{"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}, {"PYTHONIOENCODING": "ascii"}], ids=str
)
def test_text_stays_text_in_any_terminal(chain, environment):
    command = [sys.executable, "-m", "deepspeed_partition", "plan", chain, *PLATFORM]
    done = subprocess.run(command, capture_output=True, timeout=60, env=os.environ | environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\x1b" not in done.stdout
    assert b"period 60 ms" in done.stdout


@pytest.mark.parametrize("columns", [1, 40, 80, 200])
def test_tables_fit_into_the_terminal(chain, capsys, monkeypatch, columns):
    """A terminal that is too narrow breaks the lines; no figure is cropped."""
    monkeypatch.setattr(cli.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(cli.os, "get_terminal_size", lambda *_: os.terminal_size((columns, 20)))
    assert cli._width() == min(160, max(40, columns))
    assert cli.run(["plan", chain, *PLATFORM]) == 0
    table = capsys.readouterr().out
    assert columns < 80 or max(map(len, table.splitlines())) <= columns
    assert all(figure in table for figure in ("396 MB", "300 MB", "96 MB", "in flight", "0..1 a", "stage")), table
    assert "…" not in table
    assert cli.run(["compare", chain, *PLATFORM]) == 0
    table = capsys.readouterr().out
    assert "…" not in table and (columns < 80 or max(map(len, table.splitlines())) <= columns)
    assert all(name in table for name in (*comparison.COMPARED, "proved", "60 ms", "0,1,2"))


def test_profile_with_the_statistics_of_mcap(tmp_path, capsys, monkeypatch):
    """The runs themselves are tested in test_incremental.py."""
    incremental = pytest.importorskip("deepspeed_partition.engine.incremental")
    from deepspeed_partition.planner.mcap_profile import McapProfile

    asked = []

    def profiled(factory, **how):
        how.pop("on_run")(1, 2)
        asked.append((factory, how))
        numbers = (100, 200, 300)
        return McapProfile(
            isolated_bytes=numbers, isolated_bytes_per_more=numbers, added_bytes=numbers,
            added_bytes_per_more=numbers, num_runs=2,
        )  # fmt: skip

    monkeypatch.setattr(incremental, "profile_incrementally", profiled)
    model, config, chain = tmp_path / "three_layers.py", tmp_path / "ds.json", tmp_path / "out.json"
    lines = ("import torch", "def layers(size):", "    three = [torch.nn.Linear(2, 2) for _ in range(3)]")
    model.write_text("\n".join([*lines, "    return three, torch.ones(size, 2)"]))
    config.write_text('{"bf16": {"enabled": true}}')
    arguments = ["profile", f"{model}:layers", "--micro-batch", "4", "--repeats", "1", "-o", str(chain)]
    assert cli.run([*arguments, "--mcap", "--config", str(config)]) == 0
    assert asked == [(f"{model}:layers", {"micro_batch_size": 4, "config": {"bf16": {"enabled": True}}})]
    platform = ["--devices", "2", "--memory", "1GB", "--bandwidth", "1GB/s"]
    options = [*platform, "--algorithm", "mcap", "-o", str(tmp_path / "plan.json")]
    assert cli.run(["plan", str(chain), *options]) == 0
    assert Plan.load(tmp_path / "plan.json").boundaries == [0, 1, 3], "200 and 500; not 600 and 300"
    capsys.readouterr()
    assert cli.run([*arguments, "--config", str(config)]) == 2
    assert "--config has an effect only with --mcap" in capsys.readouterr().err
    config.write_text("[1]")
    assert cli.run([*arguments, "--mcap", "--config", str(config)]) == 2
    assert "is not a JSON object" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "compare", "schemes", "frontier"])
def test_weight_copies_are_refused_where_a_run_has_said_what_it_kept(tmp_path, capsys, command):
    """8 copies in the place of 3 changed nothing, and nobody said so."""
    path = tmp_path / "chain.json"
    layers = Chain.from_dict(CHAIN).layers
    measured = [replace(layer, training_bytes=150_000_000) for layer in layers]
    asked = [command, str(path), *PLATFORM, "--time-limit", "1"]
    Chain(name="run", input_bytes=1, layers=tuple(measured)).save(path)
    assert cli.run(asked) == 0
    capsys.readouterr()
    assert cli.run([*asked, "--weight-copies", "3"]) == 2
    assert (
        "--weight-copies has no effect on chain 'run': its 2 layers with weights have training_bytes, what a run "
        "kept for each; leave --weight-copies out, or drop training_bytes"
    ) in capsys.readouterr().err
    Chain(name="run", input_bytes=1, layers=(measured[0], layers[1])).save(path)
    assert cli.run([*asked, "--weight-copies", "3"]) == 0
    told = capsys.readouterr().err
    assert told == (
        "madpipe: --weight-copies has no effect on 1 of 2 layers with weights, which have training_bytes\n"
    )

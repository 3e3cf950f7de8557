"""``pipedream-replicated`` on the command line: a plan where it is one, else a table, and what is refused."""

from __future__ import annotations

import json

import pytest

from deepspeed_partition import InfeasibleError, Plan, Platform, cli, make_plan, replay
from deepspeed_partition.planner.replication import Replicated, plan_replicated
from deepspeed_partition.planner.solvers.contiguous.replicated import Level, pipedream_replicated
from tests.planner.instances import chain as chain_of

UNEVEN = chain_of([3, 3, 2], [6, 6, 4], weights=[1, 1, 10_000], outputs=[5, 5, 5], input_bytes=5)
"""Small weights on three devices, large ones on one."""
EVEN = chain_of([1, 1], [2, 2], weights=[300, 300], outputs=[1, 1], input_bytes=1)
"""All-reduces over four devices would be too slow, those over two are not."""
ARGUMENTS = ["--devices", "4", "--memory", "1MB", "--bandwidth", "100", "--algorithm", "pipedream-replicated"]
MACHINES = ["--machine-devices", "2", "--machine-bandwidth", "1"]


@pytest.fixture
def uneven(tmp_path):
    UNEVEN.save(tmp_path / "uneven.json")
    return str(tmp_path / "uneven.json")


@pytest.fixture
def even(tmp_path):
    EVEN.save(tmp_path / "even.json")
    return str(tmp_path / "even.json")


def platform(**changes):
    return Platform(**{"num_devices": 4, "memory_bytes": 10**6, "bandwidth": 100.0, **changes})


def test_as_many_replicas_everywhere_is_a_plan():
    plan = plan_replicated(EVEN, platform())
    assert isinstance(plan, Plan) and plan.algorithm == "pipedream-replicated"
    assert (plan.boundaries, plan.data_parallel, plan.platform.num_devices) == ([0, 1, 2], 2, 2)
    assert plan.allreduce_seconds == (3.0, 3.0), "2 (D - 1) / D times 300 bytes at 100 per second"
    assert replay(plan, EVEN).violations == ()
    found = pipedream_replicated(EVEN, [Level(num_workers=4, bandwidth=100.0)])
    assert found.period_seconds == max(plan.period_seconds, *plan.allreduce_seconds) / 2


def test_a_plan_is_saved_and_shown(even, tmp_path, capsys):
    saved = tmp_path / "plan.json"
    assert cli.run(["plan", even, *ARGUMENTS, "-o", str(saved)]) == 0
    assert "data parallel: 2 such pipelines" in capsys.readouterr().out
    assert Plan.load(saved).data_parallel == 2
    assert cli.run(["check", str(saved), even]) == 0


def test_different_numbers_of_replicas_are_a_table(uneven, capsys):
    assert cli.run(["plan", uneven, *ARGUMENTS, "--bandwidth", "10"]) == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines() if line.strip()]
    assert [[*row[:2], row[5]] for row in rows if row[0] in "01"] == [["0", "0..2", "3"], ["1", "2..3", "1"]]
    assert "period 6 s per micro-batch, 2 in flight" in shown


def test_json_says_the_same(uneven, capsys):
    assert cli.run(["plan", uneven, *ARGUMENTS, "--bandwidth", "10", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["stages"] == [{"layers": [0, 2], "replicas": 3}, {"layers": [2, 3], "replicas": 1}]
    assert (shown["period_seconds"], shown["num_in_flight"]) == (6.0, 2)
    assert shown["bytes_sent"] == pytest.approx(2 * 5 + 4 / 3 * 2)
    assert shown["fewest_memory_bytes"] == [3 * 2 + 2 * 5 + 2 * 5, 3 * 10_000 + 5 + 2 * 5]


def test_machines_are_a_level_of_their_own(uneven, capsys):
    assert cli.run(["plan", uneven, *ARGUMENTS, *MACHINES, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    levels = [Level(num_workers=2, bandwidth=100.0), Level(num_workers=2, bandwidth=1.0)]
    found = pipedream_replicated(UNEVEN, levels)
    assert shown["levels"] == [{"num_workers": 2, "bandwidth": 100.0}, {"num_workers": 2, "bandwidth": 1.0}]
    assert shown["period_seconds"] == found.period_seconds
    assert [stage["layers"] for stage in shown["stages"]] == [list(stage.layers) for stage in found.stages]
    devices = sum(
        stage["replicas"] * sum(each["replicas"] for each in stage["inside"]) for stage in shown["stages"]
    )
    assert devices == 4
    assert cli.run(["plan", uneven, *ARGUMENTS, *MACHINES]) == 0
    assert "2 in a machine at 100 B/s, 2 machines at 1 B/s" in " ".join(capsys.readouterr().out.split())


def test_a_table_is_not_saved(uneven, tmp_path, capsys):
    assert cli.run(["plan", uneven, *ARGUMENTS, "-o", str(tmp_path / "plan.json")]) == 2
    captured = capsys.readouterr()
    assert "leave out --output" in captured.err and not captured.out
    assert not (tmp_path / "plan.json").exists()


def test_without_room_for_one_micro_batch_nothing_fits(uneven, capsys):
    with pytest.raises(InfeasibleError) as refusal:
        plan_replicated(UNEVEN, platform(memory_bytes=30_014))
    smallest = refusal.value.smallest_memory_bytes
    assert (smallest, refusal.value.short_bytes, refusal.value.stage) == (30_015, 1, 1)
    assert isinstance(plan_replicated(UNEVEN, platform(memory_bytes=smallest)), Replicated)
    assert cli.run(["plan", uneven, *ARGUMENTS, "--memory", "30014"]) == 3
    assert "1 byte more than there are" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--micro-batches", "4"], "--micro-batches has no effect"),
        (["--data-parallel", "2"], "--data-parallel has no effect"),
        (["--period", "9s"], "--period has no effect"),
        (["--machine-devices", "2"], "--machine-devices and --machine-bandwidth go together"),
        (["--machine-bandwidth", "1"], "--machine-devices and --machine-bandwidth go together"),
        ([*MACHINES, "--machine-devices", "3"], "it must divide the 4 devices into several equal machines"),
        ([*MACHINES, "--machine-devices", "4"], "it must divide the 4 devices into several equal machines"),
        (
            [*MACHINES, "--algorithm", "pipedream"],
            "--machine-devices has an effect only with --algorithm pipedream-repl",
        ),
        (["--latency", "1s"], "latency_seconds is 1, and pipedream-replicated counts bytes alone"),
        ([*MACHINES, "--latency", "1s"], "leave it out, or use another algorithm"),
        (["--devices", "65"], "asked for 64 devices at most, not 65"),
    ],
)
def test_what_is_refused(uneven, capsys, more, sentence):
    assert cli.run(["plan", uneven, *ARGUMENTS, *more]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and not captured.out


def test_a_plan_of_equal_replicas_counts_the_latency(even):
    plans = [plan_replicated(EVEN, platform(latency_seconds=seconds)) for seconds in (0, 1)]
    assert all(isinstance(plan, Plan) for plan in plans)
    assert plans[0].allreduce_seconds < plans[1].allreduce_seconds


def test_it_is_no_algorithm_of_a_plan():
    with pytest.raises(ValueError, match="which is no plan: `madpipe plan`"):
        make_plan(UNEVEN, platform(), "pipedream-replicated")


def test_compare_has_a_row_beside_the_plans(uneven, capsys):
    arguments = ["compare", uneven, *ARGUMENTS[:4], "--bandwidth", "10"]
    assert cli.run(arguments) == 0
    shown = capsys.readouterr().out
    row = next(row for line in shown.splitlines() if (row := line.split())[:1] == ["replicated*"])
    best = make_plan(UNEVEN, platform(bandwidth=10.0)).period_seconds
    assert row[1:5] == ["6", "s", "-", f"{6 / best:.3f}"]
    assert row[-2:] == ["0..2x3", "2..3x1"]
    assert "* pipedream-replicated: no plan" in shown
    assert cli.run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pipedream_replicated"]["period_seconds"] == 6.0


def test_compare_does_not_show_its_period_without_the_latency(uneven, capsys):
    """It was called faster than all others: its own count has no latency."""
    arguments = ["compare", uneven, *ARGUMENTS[:4], "--bandwidth", "10", "--latency", "10s", "--time-limit", "0.1"]
    assert cli.run(arguments) == 0
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if "replicated* " in line)
    assert "refused" in row and "counts bytes alone, and the links have a latency" in " ".join(shown.split())
    assert cli.run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pipedream_replicated"] is None


def test_compare_asks_it_for_few_devices(uneven, capsys):
    assert cli.run(["compare", uneven, *ARGUMENTS[:4], "--bandwidth", "10", "--devices", "65"]) == 0
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if "replicated* " in line)
    assert "refused" in row and "takes 64" in " ".join(shown.split())

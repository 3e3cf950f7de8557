"""The limit of a search: seconds of the processor, kept by every solver; nothing that it cut short is proved."""

from __future__ import annotations

import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from deepspeed_partition import InfeasibleError, Platform, make_plan, replay
from deepspeed_partition.__main__ import main
from deepspeed_partition.planner import deadline as module
from deepspeed_partition.planner.data_parallel import splits_of
from deepspeed_partition.planner.deadline import PATIENCE_FACTOR, PATIENCE_SECONDS, Deadline
from deepspeed_partition.planner.memory import StageTable
from deepspeed_partition.planner.planning import solving
from deepspeed_partition.planner.planning.make_plan import _plans_of
from deepspeed_partition.planner.planning.solving import _deadline_of_search
from deepspeed_partition.planner.replication import plan_replicated
from deepspeed_partition.planner.report import comparison
from deepspeed_partition.planner.report.comparison import COMPARED, compare
from deepspeed_partition.planner.report.frontier import frontier
from deepspeed_partition.planner.report.page import plan_page
from deepspeed_partition.planner.solvers.constraint_program import minimized
from deepspeed_partition.planner.solvers.non_contiguous.many_special_devices import SeveralSearch
from tests.planner.instances import chain, problem_of
from tests.planner.test_deadline import tight
from tests.planner.test_timeline import MADE, PLAN


def long_chain(num_layers: int = 120, num_devices: int = 24, share: float = 0.15):
    """Of layers that differ, on many devices in tight memory: every search would go on for minutes."""
    return tight(num_layers, num_devices, share)


def spent(call, *arguments, **options):
    """Seconds of the processor, and what was found."""
    begin = time.process_time()
    found = call(*arguments, **options)
    return time.process_time() - begin, found


def test_other_work_does_not_count():
    """Waiting, and what other threads compute, once ended searches on busy machines."""
    deadline = Deadline(0.2)
    time.sleep(0.3)
    assert not deadline.passed()
    while not deadline.passed():
        sum(range(1000))
    assert not deadline.starved


def test_a_constraint_program_ends_when_its_thread_has_worked_so_long(monkeypatch):
    """Its limit once was one of the wall's clock: on a busy machine it found less in the same limit."""
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    stopped = threading.Event()
    seen = []

    class Solver(cp_model.CpSolver):
        def stop_search(self):
            stopped.set()

        def solve(self, model):
            time.sleep(0.3)  # as if others had the processor
            seen.append((stopped.is_set(), self.parameters.max_time_in_seconds))
            begun = time.thread_time()
            while not stopped.is_set() and time.thread_time() < begun + 20:
                sum(range(1000))
            seen.append(stopped.is_set())
            return super().solve(model)

    monkeypatch.setattr(cp_model, "CpSolver", Solver)
    model = cp_model.CpModel()
    number = model.new_int_var(3, 9, "number")
    model.minimize(number)
    outcome = minimized(model, number, 9, 0.2)
    assert (outcome.bound, outcome.is_optimal) == (3, True)
    assert seen == [(False, 0.2 * PATIENCE_FACTOR + PATIENCE_SECONDS), True]


def test_a_machine_that_runs_nothing_any_more_ends_it_and_that_is_known(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    whole = Deadline()
    part = Deadline(10, within=whole)
    now[0] = 10 * PATIENCE_FACTOR + PATIENCE_SECONDS - 1
    assert not part.passed()
    now[0] += 2
    assert part.passed()
    assert (part.starved, whole.starved, whole.stopped) == (True, True, False)


@pytest.mark.parametrize("num_looks", [1, 10, 50, 100, 200])
def test_nothing_is_proved_where_the_machine_ran_nothing_any_more(monkeypatch, num_looks):
    """On a busy machine a plan that was worse than another one was said to be proved."""
    made, platform = tight(8, 3, 0.6)
    best = make_plan(made, platform, recompute="never", deadline=Deadline(1000))
    assert best.proved
    looks = itertools.count(1)
    monkeypatch.setattr(module.time, "monotonic", lambda: 0.0 if next(looks) <= num_looks else math.inf)
    deadline = Deadline(1000)
    plan = make_plan(made, platform, recompute="never", deadline=deadline)
    assert deadline.starved
    assert (plan.proved, plan.proved_class) == (False, None)
    assert plan.period_seconds >= best.period_seconds and replay(plan, made).violations == ()


def test_a_little_more_time_ends_with_the_whole_when_that_is_stopped():
    whole = Deadline(1e-9)
    while not whole.passed():
        pass
    more = whole.at_least(100)
    assert not more.passed()
    whole.stop()
    assert (more.passed(), more.stopped) == (True, True)


@pytest.mark.parametrize("num_micro_batches", [None, 48])
def test_a_search_keeps_its_limit(num_micro_batches):
    """It once took six times as long, where nobody looked at the clock for the neighbours of an allocation."""
    made, platform = long_chain()
    how = {"num_micro_batches": num_micro_batches, "time_limit_seconds": 0.7, "recompute": "never"}
    seconds, plan = spent(make_plan, made, platform, **how)
    assert seconds < 2
    again = spent(make_plan, made, platform, **how | {"recompute": "auto"})[0]
    assert again < 3
    assert (plan.proved, plan.proved_class) == (False, None)
    assert replay(plan, made).violations == ()


def test_a_large_search_keeps_its_limit():
    """With a limit of 10 s it took 61 s of the processor."""
    made, platform = long_chain(500, 32)
    how = {"num_micro_batches": 64, "time_limit_seconds": 3, "recompute": "auto"}
    seconds, plan = spent(make_plan, made, platform, **how)
    assert seconds < 2 * how["time_limit_seconds"]
    assert (plan.proved, plan.proved_class) == (False, None)
    assert replay(plan, made).violations == ()


@pytest.mark.parametrize(("m", "least", "most"), [(None, 60, 60), (4, 60, 60), (30_000, 45, 46), (10**6, 30, 30)])
def test_a_search_leaves_time_for_the_replay(m, least, most):
    """A step of 524,288 forwards and backwards ended 27 s after a limit of 60 s: most of that was the replay.

    Here 6 layers are at most 6 stages.
    """
    platform = Platform(num_devices=2, memory_bytes=10**6, bandwidth=1e9)
    made = replace(problem_of(chain([1] * 6, [1] * 6), platform), deadline=Deadline(60), num_micro_batches=m)
    assert least - 0.5 < _deadline_of_search(made).remaining_seconds() <= most


@pytest.mark.parametrize(("estimate", "is_found", "left"), [(1, False, 60), (10, True, 35), (40, False, 30)])
def test_the_bound_of_a_long_chain_is_found_before_the_search(monkeypatch, estimate, is_found, left):
    """On a slow machine it took 5 s where 2 were left for it. It comes last where it may take most of the time."""
    worked, found = [0.0], []

    def bound(*_, contiguous):
        found.append(contiguous)
        worked[0] += 25

    monkeypatch.setattr(module.time, "thread_time", lambda: worked[0])
    monkeypatch.setattr(solving, "most_bound_seconds", lambda _: estimate)
    monkeypatch.setattr(solving, "step_lower_bound", bound)
    platform = Platform(num_devices=2, memory_bytes=10**6, bandwidth=1e9)
    made = replace(problem_of(chain([1] * 6, [1] * 6), platform), deadline=Deadline(60), num_micro_batches=4)
    assert solving._deadline_of_search(made).remaining_seconds() == pytest.approx(left, abs=0.1)
    assert found == [False] * is_found


def test_all_algorithms_of_a_comparison_share_its_limit(monkeypatch):
    """Each takes all that it is given here: real calls took 0.9 to 1.1 s of a limit of 1 beside other tests."""
    made, platform = long_chain()
    worked, limits = [0.0], []

    def take(seconds):
        limits.append(seconds)
        worked[0] += seconds

    def search(*_, time_limit_seconds, **__):
        take(time_limit_seconds)
        raise InfeasibleError("no plan was found")

    monkeypatch.setattr(module.time, "thread_time", lambda: worked[0])
    monkeypatch.setattr(comparison, "make_plan", search)
    monkeypatch.setattr(comparison, "_replicated", lambda *arguments: take(arguments[-1].remaining_seconds()))
    found = compare(made, platform, num_micro_batches=48, time_limit_seconds=1)
    assert [contender.algorithm for contender in found.contenders] == list(COMPARED)
    assert len(limits) == len(COMPARED) + 1
    assert 0.99 < sum(limits) < 1.01, "each has a limit of its own"


def test_a_page_keeps_its_limit_with_all_replays(monkeypatch):
    """It once took 25 s of a limit of 10: each search kept its part, and the replay of each plan came besides."""
    worked, ran = [0.0], []

    def search(chain, platform, name, *, time_limit_seconds, **_):
        ran.append(name)
        worked[0] += time_limit_seconds + 3  # what is beside the search
        return replace(PLAN, algorithm=name)

    monkeypatch.setattr(module.time, "thread_time", lambda: worked[0])
    monkeypatch.setattr(comparison, "make_plan", search)
    monkeypatch.setattr(comparison, "_replicated", lambda *_: None)
    how = {"num_micro_batches": 5, "time_limit_seconds": 10, "planned": PLAN}
    found = compare(MADE, PLAN.platform, **how, may_leave_out=True)
    assert worked[0] <= 10 and ran == ["uniform", "parameters"]
    assert [each.plan is PLAN for each in found.contenders] == [name == PLAN.algorithm for name in COMPARED]
    left_out = {each.algorithm: each.reason for each in found.contenders if each.is_left_out}
    assert left_out.keys() == set(COMPARED) - {*ran, PLAN.algorithm}
    assert "2.332 s of the time limit was left" in left_out["contiguous"]
    page = plan_page(PLAN, MADE, comparison=found)
    names = ", ".join(left_out)
    assert f"without {names}." in page and f"{PLAN.algorithm} (this plan)" in page
    assert page.count("left out: too little time") == 2 * len(left_out)
    ran.clear()
    assert len(compare(MADE, PLAN.platform, **how).fitting) == len(ran) + 1 == len(COMPARED)


def test_others_keep_it_too():
    made, platform = long_chain()
    assert spent(frontier, made, platform, time_limit_seconds=0.5)[0] < 2
    roomy = replace(platform, memory_bytes=10 * platform.memory_bytes)
    period = make_plan(made, platform, "contiguous").period_seconds
    seconds, plan = spent(make_plan, made, roomy, period_seconds=period, time_limit_seconds=0.5)
    assert seconds < 2
    assert not plan.proved


def test_all_degrees_of_data_parallelism_share_its_limit(monkeypatch):
    """Each takes all that it is given here."""
    worked, limits = [0.0], []

    def search(split, seconds, is_one_of_many):
        limits.append(seconds)
        worked[0] += seconds
        raise InfeasibleError("no plan was found")

    monkeypatch.setattr(module.time, "thread_time", lambda: worked[0])
    with pytest.raises(InfeasibleError):
        _plans_of(splits_of(long_chain()[1], 48, "auto"), search, Deadline(1))
    assert len(limits) > 4
    assert limits == pytest.approx([1 / len(limits)] * len(limits)), "each degree has a limit of its own"


@pytest.mark.parametrize("algorithm", ["contiguous", "madpipe"])
def test_a_long_chain_has_a_plan_however_short_the_time(algorithm):
    made, platform = tight(1400, 64, 0.1)
    seconds, plan = spent(make_plan, made, platform, algorithm, time_limit_seconds=1e-3)
    assert seconds < 8  # of a processor: about 3 where nothing else runs, 4 where both cores are shared
    assert not plan.proved
    assert replay(plan, made).violations == ()


def test_what_has_no_answer_in_time_says_so():
    made, platform = long_chain()
    with pytest.raises(InfeasibleError, match="pipedream-replicated had no plan when its time was up: give it"):
        plan_replicated(made, platform, 2, 1.0, time_limit_seconds=0.05)
    with pytest.raises(InfeasibleError, match="madpipe-paper had no allocation when its time was up"):
        make_plan(made, platform, "madpipe-paper", time_limit_seconds=0.05)


@pytest.mark.parametrize("command", ["plan", "step", "period", "compare", "frontier", "paper"])
def test_an_interrupt_is_answered_at_once(tmp_path, command):
    """A real SIGINT, while the command searches; the answer costs a second of the processor at the most.

    On a busy machine it costs more, as what was measured to start a command does.
    """
    made, platform = long_chain(200, 24)
    path = tmp_path / "chain.json"
    made.save(path)
    memory, bandwidth = str(platform.memory_bytes), str(platform.bandwidth)
    arguments = [str(path), "--devices", "24", "--bandwidth", bandwidth, "--memory", memory, "--time-limit", "600"]
    arguments += ["--recompute", "never"]  # with it, a plan is proved in a moment
    more = {
        "plan": ["plan"],
        "step": ["plan", "--micro-batches", "48"],
        "period": ["plan", "--period", str(made.compute_seconds / 4)],
        "compare": ["compare"],
        "frontier": ["frontier"],
        "paper": ["plan", "--algorithm", "madpipe-paper"],
    }[command]
    run = [sys.executable, "-m", "deepspeed_partition", more[0], *arguments, *more[1:]]
    start = _seconds_to_start()
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        _wait_until(lambda: _cpu_seconds(process.pid) > 0.5 + 1.5 * start)
        before = _cpu_seconds(process.pid)
        process.send_signal(signal.SIGINT)
        _wait_until(lambda: process.poll() is not None or _cpu_seconds(process.pid) > before + 1 + start)
        assert process.poll() is not None, "it goes on"
        _, error = process.communicate()
    assert "Traceback" not in error
    assert "interrupted" in error
    assert process.returncode == (0 if "best found so far" in error else 130)


def test_an_interrupt_while_the_command_is_imported_is_a_line(monkeypatch, capsys):
    class Interrupted:
        def find_spec(self, name, *_):
            if name == "deepspeed_partition.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "deepspeed_partition.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "madpipe: interrupted\n")


@cache
def _seconds_to_start() -> float:
    """Of the processor, until a command begins: imports, which take twice as long on a busy machine."""
    before = os.times()
    subprocess.run([sys.executable, "-m", "deepspeed_partition", "--version"], check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def _cpu_seconds(pid: int) -> float:
    """Of a process that runs, or has ended and is not yet reaped."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait_until(true) -> None:
    for _ in range(6000):
        if true():
            return
        time.sleep(0.02)


def test_choosing_before_making_changes_nothing(monkeypatch):
    """Where a beam goes on with few allocations, the others are dropped before they are made.

    Which of two that promise the same comes first may depend on it.
    """
    made, platform = tight(14, 5, 0.5)
    problem = problem_of(made, platform)
    period = problem.times.clock.ticks(made.compute_seconds * 0.5)
    found = SeveralSearch(problem).some(period, 40)
    extended = SeveralSearch._extended
    monkeypatch.setattr(SeveralSearch, "_extended", lambda search, *some: extended(search, *some[:-1], None))
    assert set(found) == set(SeveralSearch(problem).some(period, 40))
    assert len(found) > 10


@pytest.mark.parametrize("weights", [[3, 0, 7], [2**52, 2**53, 1], [2**53] * 3])
@pytest.mark.parametrize("copies", [0, 1, 2.5, 3, 1 / 3, 1e6])
def test_a_table_is_exact_however_large_its_numbers(weights, copies):
    layers = chain([1, 2, 3], [1, 2, 3], weights=weights, stash=[5, 0, 9], outputs=[1, 2, 3])
    platform = Platform(num_devices=2, memory_bytes=2**59, bandwidth=1, weight_copies=copies)
    table = StageTable(layers, platform)
    for start, stop in combinations(range(4), 2):
        buffers = sum(2 * layers.boundary_bytes(cut) for cut in (start, stop) if 0 < cut < 3)
        exact = platform.weights_bytes(sum(weights[start:stop])) + buffers
        most = 2**60 + 1  # what the largest device has, and a byte: nothing that is cut off fits
        assert table.fixed[start, stop] == (exact if exact <= 2**60 else most + buffers)
    other = StageTable(layers, replace(platform, memory_bytes=40))
    assert (table.with_memory(40).max_in_flight == other.max_in_flight).all()

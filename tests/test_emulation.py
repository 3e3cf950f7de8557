"""What the benchmarks of the engine stand on: layers and links that sleep, hosts with links of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from types import ModuleType

import pytest

from deepspeed_partition import InfeasibleError, make_plan

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "benchmarks"))

from simulated import rhythm, simulated_step

from tests.planner.instances import random_instance
from tests.ranks import run_ranks

BENCHMARKS = Path(__file__).parents[1] / "examples" / "benchmarks"


def loaded(path: str) -> ModuleType:
    """A script as a module of a name of its own."""
    name = path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_messages_take_turns_and_their_time(tmp_path):
    """Lower bounds alone, which hold however busy the machine is."""
    output = tmp_path / "naps.json"
    script = Path(__file__).parent / "emulation_multiproc.py"
    log = tmp_path / "output.txt"
    status = run_ranks(script, [str(output)], 2, log, timeout_seconds=240)
    assert status == 0, log.read_text()[-6000:]
    from tests.emulation_multiproc import LAYER_SECONDS, LINK_SECONDS, NUM_MICRO_BATCHES

    naps = json.loads(output.read_text())
    road = [naps[0]["F"], naps[1]["F"], naps[2]["F"], naps[2]["B"], naps[1]["B"], naps[0]["B"]]
    assert [len(each) for each in road] == [NUM_MICRO_BATCHES] * 6
    assert all(end - begin >= LAYER_SECONDS for each in road for begin, end in each)
    crossings = [0, 1, 3, 4]  # between the last forward and the first backward nothing travels
    for before in crossings:
        for (_, ready), (needed, _) in zip(road[before], road[before + 1], strict=True):
            assert needed - ready >= LINK_SECONDS
    # All of them travel over one link, one at a time.
    whole = road[-1][-1][0] - road[0][0][1]
    assert whole >= len(crossings) * NUM_MICRO_BATCHES * LINK_SECONDS


def test_the_simulated_step_is_the_one_that_was_planned():
    compared = 0
    for seed in range(30):
        chain, platform = random_instance(seed)
        try:
            plan = make_plan(chain, platform, num_micro_batches=6)
        except InfeasibleError:
            continue  # nothing fits
        assert simulated_step(plan, chain, 6).step_seconds == pytest.approx(plan.step_seconds, rel=1e-9)
        compared += 1
    assert compared > 10


def test_micro_batches_leave_a_simulated_pattern_once_per_period():
    compared = 0
    for seed in range(30):
        chain, platform = random_instance(seed)
        try:
            plan = make_plan(chain, platform)
        except InfeasibleError:
            continue
        # Run as early as its order allows, a pattern may be faster, where its period is longer than it must be.
        assert rhythm(simulated_step(plan, chain, 64).left_seconds) <= plan.period_seconds * (1 + 1e-9)
        compared += 1
    assert compared > 10


def test_rhythm_is_that_of_the_middle():
    assert rhythm([0, 5, 9, 10, 11, 12, 13, 30]) == pytest.approx((13 - 9) / 4)


@pytest.mark.parametrize(
    ("script", "defaults"),
    [
        ("plan_vs_engine/main.py", {"rounds": 3}),
        ("real_links/main.py", {"megabits": [1000.0, 100.0], "rounds": 2}),
    ],
)
def test_arguments(script, defaults):
    parse = loaded(script).parse_arguments
    assert vars(parse([])).items() >= defaults.items()
    assert not parse([]).save and parse(["--save"]).save
    with pytest.raises(SystemExit):
        parse(["--rounds", "many"])


def test_saving_keeps_what_was_measured_of_other_networks(tmp_path):
    save, path = loaded("plan_vs_engine/main.py").save, tmp_path / "results" / "rows.json"
    save(path, [{"network": "one", "step": 1}, {"network": "other", "step": 2}])
    save(path, [{"network": "one", "step": 3}])
    assert json.loads(path.read_text())["rows"] == [{"network": "other", "step": 2}, {"network": "one", "step": 3}]


def test_who_cannot_make_hosts_is_told_in_a_sentence(monkeypatch):
    hosts = loaded("real_links/hosts.py")
    monkeypatch.setattr(hosts.shutil, "which", lambda name: None if name == "tc" else f"/usr/sbin/{name}")
    assert hosts.why_not().startswith("tc is not installed")
    monkeypatch.setattr(hosts.shutil, "which", lambda name: f"/usr/sbin/{name}")
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    assert hosts.why_not().startswith("only root can make hosts")


def has_hosts() -> bool:
    """Whether this user may make network namespaces, a bridge and a shaped link."""
    if sys.platform != "linux" or os.geteuid() != 0 or any(map(_missing, ("setpriv", "unshare", "ip", "tc"))):
        return False
    shaped = "tc qdisc add dev lo root tbf rate 1mbit burst 15000 latency 50ms"
    tried = f"ip link add name tried type bridge && {shaped}"
    return subprocess.run(["unshare", "--net", "sh", "-c", tried], capture_output=True).returncode == 0


def _missing(name: str) -> bool:
    return shutil.which(name) is None


@pytest.mark.skipif(not has_hosts(), reason="only root can make network namespaces")
def test_hosts_vanish_with_the_one_who_started_them(tmp_path):
    """Killed in the middle of a job, it leaves no process, and nothing was ever in the machine's own network."""
    script = tmp_path / "waits.py"
    said = "b'host ' + os.environ['RANK'].encode() + b'\\n'"  # at once, for both write to one pipe
    script.write_text(f"import os, time\nos.write(1, {said})\ntime.sleep(600)\n")
    before = _network()
    command = [sys.executable, str(BENCHMARKS / "real_links" / "hosts.py"), "--hosts", "2", "--", str(script)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert job.stdout is not None
        assert {job.stdout.readline(), job.stdout.readline()} == {"host 0\n", "host 1\n"}
        assert _network() == before
    finally:
        job.kill()
    # All processes of the job write there: it ends with the last of them.
    job.communicate(timeout=60)
    assert _network() == before


def _network() -> list[str]:
    lists = (["ip", "-brief", "link"], ["ip", "netns", "list"])
    return [subprocess.run(each, capture_output=True, text=True, check=True).stdout for each in lists]


def test_the_ideal_of_an_order_of_torch():
    """1F1B fills and drains as it must; halves of backwards fill its bubbles; links delay; circles are refused.

    Red where a link costs nothing, where a stage does not wait for another, or where the first stage, which leaves
    both halves of its backward to the second one, is charged for one and a half.
    """
    links = loaded("sleeping_schedules/torch_links.py")
    ranks, number = 3, 6

    def one_f_one_b(rank):
        order = [("F", rank, micro_batch) for micro_batch in range(ranks - rank)]
        for micro_batch in range(number):
            order.append(("B", rank, micro_batch))
            if micro_batch + ranks - rank < number:
                order.append(("F", rank, micro_batch + ranks - rank))
        return order

    orders = [one_f_one_b(rank) for rank in range(ranks)]
    assert links.least_seconds(orders, 1.0, 0.0) == 3.0 * (number + ranks - 1)
    assert links.least_seconds(orders, 1.0, 0.25) > 3.0 * (number + ranks - 1) + 2 * (ranks - 1) * 0.25 - 1e-9
    assert links.least_seconds(orders, 1.0, 0.0, 0.5) == 4.0 * (number + ranks - 1)
    halves = [
        [half for kind, stage, at in order for half in ([(kind, stage, at)] if kind == "F" else
                                                         [("I", stage, at), ("W", stage, at)])]
        for order in orders
    ]  # fmt: skip
    assert 3.0 * number < links.least_seconds(halves, 1.0, 0.0) < links.least_seconds(orders, 1.0, 0.0)
    assert links.least_seconds([[("F", 0, 0), ("I", 0, 0), ("W", 0, 0)]], 1.0, 0.0) == 3.0
    with pytest.raises(ValueError, match="standstill"):
        links.least_seconds([[("B", 0, 0), ("F", 0, 0)], [("F", 1, 0), ("B", 1, 0)]], 1.0, 0.0)


def test_a_layer_runs_on_within_its_pass_alone(monkeypatch):
    """A stage of one layer that ran two backwards, idle in between, once slept less in the second one."""
    import torch

    layers = loaded("sleeping_schedules/split_layers.py")
    now, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    clock = types.SimpleNamespace(perf_counter=lambda: now[0], thread_time=lambda: 0.0, sleep=sleep)
    monkeypatch.setattr(layers, "time", clock)
    layer = layers.SplitLayer(1, 1.0, 4.0, 4)
    outputs = [layer(torch.zeros(1, 4, requires_grad=True)).sum() for _ in range(2)]
    for output in outputs:
        output.backward()
        now[0] += 0.5
    assert slept == [1.0, 1.0, 2.0, 2.0, 2.0, 2.0]


def test_work_between_layers_that_do_not_run_on_is_the_engines():
    """Work within layers, and from a layer to the next one of its pass, is part of the time that they sleep."""
    layers = loaded("sleeping_schedules/split_layers.py")
    at = [layers.Instant(0.0, worked, 2 * worked) for worked in (1.0, 1.0, 1.5, 1.75, 2.0, 4.0, 5.0)]
    work = layers.Work(at[0])
    work.add(at[1], at[2], runs_on=False)
    work.add(at[3], at[4], runs_on=True)
    work.add(at[5], at[6], runs_on=False)
    assert (work.begin, work.end, work.worked_seconds, work.queued_seconds) == (at[0], at[6], 2.0, 4.0)


def test_layers_sleep_both_halves_of_a_backward():
    """A pass through a stage sleeps each of its parts once. Red where the first layer has no gradient to give."""
    import torch

    layers = loaded("sleeping_schedules/split_layers.py")
    slept, passes = [], []

    class Noted(layers.SplitLayer):
        def sleep(self, kind, begin, in_pass):
            slept.append((self.number, kind))
            passes.append(in_pass)

    stage = torch.nn.Sequential(*(Noted(number, 0.0, 0.0, 4) for number in range(2)))
    stage(torch.zeros(1, 4)).sum().backward()
    assert slept[:2] == [(0, "F"), (1, "F")]
    assert passes[0] == passes[1] != passes[2] and len(set(passes[2:])) == 1
    assert sorted(slept[2:]) == [(0, "I"), (0, "W"), (1, "I"), (1, "W")]
    assert all(weight.grad is not None for weight in stage.parameters())

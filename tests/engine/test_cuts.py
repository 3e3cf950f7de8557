"""Boundaries before any process is started: what is accepted, and what the sentences say."""

import inspect
import itertools
import logging
import random
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import deepspeed  # noqa: E402
import deepspeed.pipe  # noqa: E402

from deepspeed_partition import Chain, LayerProfile, Platform, Replay, engine, make_plan  # noqa: E402
from deepspeed_partition.engine.checkpoint import saved_cut  # noqa: E402
from deepspeed_partition.engine.pipeline.module import (  # noqa: E402
    KEPT_TO_TRAIN,
    asks_for_plan,
    check_boundaries,
    check_every_rank_trains,
    check_method_name,
    check_plan,
    trial_boundaries,
)
from deepspeed_partition.engine.repartition import parameter_groups  # noqa: E402
from deepspeed_partition.engine.runtime import environment  # noqa: E402
from deepspeed_partition.engine.runtime.collectives import portable  # noqa: E402
from deepspeed_partition.engine.warmup import run_plan  # noqa: E402
from deepspeed_partition.engine.warmup.run_plan import on_ranks_with_data  # noqa: E402
from deepspeed_partition.options import Options  # noqa: E402
from deepspeed_partition.planner.allocation import Allocation  # noqa: E402
from deepspeed_partition.planner.errors import (  # noqa: E402
    InfeasibleError,
    PlanFormatError,
    PlanMismatchError,
)
from deepspeed_partition.profiling import Link  # noqa: E402
from tests.engine import plans  # noqa: E402
from tests.planner.instances import chain  # noqa: E402


def plan_for(num_layers, num_devices, algorithm="contiguous"):
    layers = tuple(
        LayerProfile(name=str(index), forward_seconds=1.0, backward_seconds=2.0, weight_bytes=4, output_bytes=4)
        for index in range(num_layers)
    )
    platform = Platform(num_devices=num_devices, memory_bytes=10**9, bandwidth=1e9)
    return make_plan(Chain(input_bytes=4, layers=layers), platform, algorithm=algorithm)


@pytest.mark.parametrize("method", ["madpipe", "MadPipe", " MADPIPE ", "profile", "Profile"])
def test_planning_is_asked_for_in_any_case(method):
    assert asks_for_plan(method)


@pytest.mark.parametrize("method", ["uniform", "parameters", "type:madpipe", None, [0, 3], 7])
def test_other_methods_do_not_plan(method):
    assert not asks_for_plan(method)


def test_boundaries_become_python_integers():
    import numpy

    cuts = check_boundaries((numpy.int64(0), 3, 8), num_layers=8, num_stages=2)
    assert cuts == [0, 3, 8] and all(type(cut) is int for cut in cuts)


@pytest.mark.parametrize(
    ("boundaries", "words"),
    [
        ([0, 8], ["make 1 stages", "has 2", "give 3 boundaries"]),
        ([0, 3, 5, 8], ["make 3 stages"]),
        ([], ["make -1 stages"]),
        ([1, 3, 8], ["rise from 0 to 8"]),
        ([0, 3, 9], ["rise from 0 to 8"]),
        ([0, 0, 8], ["at least one layer"]),
        ([0, 9, 8], ["rise from 0 to 8"]),
        ([0, 3.0, 8], ["integers"]),
        ([0, True, 8], ["integers"]),
        (["0", "3", "8"], ["integers"]),
    ],
)
def test_wrong_boundaries(boundaries, words):
    with pytest.raises(ValueError) as caught:
        check_boundaries(boundaries, num_layers=8, num_stages=2)
    assert all(word in str(caught.value) for word in words), caught.value


def test_plans_for_others():
    plan = plan_for(8, 2)
    for reason in (None, "somebody says so"):
        check_plan(plan, num_layers=8, num_ranks=2, one_stage_each=reason)
        with pytest.raises(PlanMismatchError, match="8 layers and this model has 9"):
            check_plan(plan, num_layers=9, num_ranks=2, one_stage_each=reason)
        with pytest.raises(PlanMismatchError, match="for 2 devices and this pipeline has 4 ranks"):
            check_plan(plan, num_layers=8, num_ranks=4, one_stage_each=reason)
        with pytest.raises(PlanMismatchError, match="uses 2 of its 3 devices"):
            check_plan(plan_for(8, 3, algorithm=[0, 4, 8]), num_layers=8, num_ranks=3, one_stage_each=reason)
        recomputing = replace(plan, stages=(plan.stages[0], replace(plan.stages[1], rematerialize=True)))
        if reason is None:
            check_plan(recomputing, num_layers=8, num_ranks=2)
        else:
            with pytest.raises(
                PlanMismatchError, match="recomputes layers of stage 1, and DeepSpeed's own schedule"
            ):
                check_plan(recomputing, num_layers=8, num_ranks=2, one_stage_each=reason)


@pytest.mark.parametrize(("devices", "cuts"), [((1, 0), [0, 4, 8]), ((0, 1, 0), [0, 3, 6, 8])])
def test_a_plan_with_several_stages_on_a_device_or_out_of_order(devices, cuts):
    plan = plans.plan_of(plans.chain_of(8), plans.platform_of(2), cuts, devices)
    check_plan(plan, num_layers=8, num_ranks=2)
    with pytest.raises(PlanMismatchError, match="DeepSpeed's own schedule runs here, because layers are sliced"):
        check_plan(plan, num_layers=8, num_ranks=2, one_stage_each="layers are sliced")


@pytest.mark.parametrize(
    ("devices", "renumbered"),
    [
        ((0, 1, 2), (0, 1, 2)),
        ((2, 0, 1), (0, 1, 2)),
        ((1, 0, 1, 2, 1), (0, 1, 0, 2, 0)),
        ((1, 2, 0, 1, 0), (0, 1, 2, 0, 2)),
        ((1, 0, 2, 0), (0, 2, 1, 2)),
    ],
)
def test_plans_of_a_run_read_data_where_scripts_give_it(devices, renumbered):
    """The first stage on the first rank, the last one there or on the last rank."""
    cuts = range(len(devices) + 1)
    plan = plans.plan_of(plans.chain_of(len(devices)), plans.platform_of(3), cuts, devices)
    found = on_ranks_with_data(plan)
    assert tuple(stage.device for stage in found.stages) == renumbered


def test_hosts_of_renumbered_devices_are_others(monkeypatch):
    """A plan that does not run with the ports that its devices then share is made without ports."""
    chain, asked, said = plans.chain_of(3), [], []

    def plan_on(platform):
        asked.append(platform)
        return plans.plan_of(chain, platform, range(4), (2, 0, 1))

    monkeypatch.setattr(run_plan, "announce", said.append)
    ports = replace(plans.platform_of(4), port_bandwidth=1e9, devices_per_port=2)
    broken = Replay(("the port out of host 0 runs SF0 until 2 s and SB0 from 1 s",), (), ())
    found = run_plan.on_hosts(plan_on, replace(ports, devices_per_port=1), chain)
    assert ([stage.device for stage in found.stages], len(asked), said) == ([0, 1, 2], 1, [])
    monkeypatch.setattr(run_plan, "replay", lambda plan, chain: broken)
    found = run_plan.on_hosts(plan_on, ports, chain)
    assert (found.platform, asked[-1]) == (plans.platform_of(4), plans.platform_of(4))
    assert len(said) == 1
    assert "does not count that links of one host share its port" in said[0]


def test_options_go_before_what_was_measured_of_links():
    link = Link(bandwidth=1e9, latency_seconds=0.0, duplex="full", port_bandwidth=2e8, devices_per_port=2)
    reports = [
        SimpleNamespace(training_bytes=4, weight_bytes=1, memory_bytes=100, workspace_bytes=0, needs=None)
    ] * 4

    def shared(link, **options):
        made = run_plan._platform(Options(**options), reports, (), link)
        return made.duplex, made.port_bandwidth, made.devices_per_port

    assert shared(link) == ("full", 2e8, 2)
    assert shared(link, duplex="half", port_bandwidth="1GB/s", devices_per_port=4) == ("half", 1e9, 4)
    assert shared(None) == ("half", None, 1)
    assert shared(None, duplex="full", port_bandwidth=5) == ("full", 5.0, 1)
    for key, value in (("duplex", "both"), ("port_bandwidth", 0), ("devices_per_port", 0), ("recompute", None)):
        with pytest.raises(ValueError, match=key):
            Options(**{key: value})


def test_every_rank_has_something_to_train():
    looped = plans.plan_of(plans.chain_of(8), plans.platform_of(2), [0, 2, 4, 8], [0, 1, 0]).allocation
    check_every_rank_trains(looped, [0, 0, 0, 1, 0, 0, 0, 1])
    with pytest.raises(ValueError, match="leaves rank 1, layers 2 to 4, without trainable"):
        check_every_rank_trains(looped, [1, 1, 0, 0, 1, 1, 1, 1])
    with pytest.raises(ValueError, match="leaves rank 0, layers 0 to 2, 4 to 8, without trainable"):
        check_every_rank_trains(looped, [0, 0, 1, 1, 0, 0, 0, 0])
    with pytest.raises(ValueError, match="leaves stage 0, layers 0 to 4, without trainable"):
        check_every_rank_trains(Allocation.contiguous([0, 4, 8]), [0] * 4 + [1] * 4)


def test_a_plan_that_does_not_fit_at_the_depth_of_deepspeed():
    layers = chain([1, 1], [2, 2], stash=[10, 10])
    small, large = (Platform(num_devices=2, memory_bytes=memory, bandwidth=1.0) for memory in (10, 20))
    tight = make_plan(layers, small, [0, 1, 2], num_micro_batches=4, recompute="never")
    check_plan(tight, num_layers=2, num_ranks=2)
    with pytest.raises(PlanMismatchError, match="fits into 10 B per device with fewer micro-batches in flight"):
        check_plan(tight, num_layers=2, num_ranks=2, one_stage_each="layers are sliced")
    roomy = make_plan(layers, large, [0, 1, 2], num_micro_batches=4)
    check_plan(roomy, num_layers=2, num_ranks=2, one_stage_each="layers are sliced")


@pytest.mark.parametrize("name", ["madpipe", None, "uniform", "Parameters", "type:Block"])
def test_names_that_a_configuration_may_have(name):
    check_method_name(name)


@pytest.mark.parametrize("name", ["madpip", "", 7, {"a": 1}])
def test_names_that_a_configuration_may_not_have(name):
    with pytest.raises(ValueError, match="'madpipe', a list of boundaries"):
        check_method_name(name)


def test_every_stage_of_the_trial_cut_trains():
    """DeepSpeed's balance is no exact one: heavy layers among light and empty ones are where it could fail."""
    numbers = random.Random(1)
    for _ in range(500):
        counts = [numbers.choice([0, 0, 1, 5, 1000]) for _ in range(numbers.randint(1, 12))]
        trainable = sum(1 for count in counts if count)
        for num_stages in range(1, trainable + 1):
            cuts = trial_boundaries(counts, num_stages)
            assert cuts[0] == 0 and cuts[-1] == len(counts) and len(cuts) == num_stages + 1
            assert all(type(cut) is int for cut in cuts)
            assert all(sum(counts[start:stop]) for start, stop in itertools.pairwise(cuts)), (counts, cuts)
        # A frozen model was told to use at most 0 stages.
        told = (
            f"use at most {trainable} stages, PipelineModule.num_stages={trainable}."
            if trainable
            else "give the boundaries as a list"
        )
        with pytest.raises(ValueError, match=told):
            trial_boundaries(counts, trainable + 1)


def test_the_trial_cut_counts_frozen_parameters():
    """A frozen model with a head to train was on one rank, all of it: DeepSpeed counts what is trained."""
    numbers = random.Random(2)
    for _ in range(300):
        trainable = [numbers.choice([0, 0, 1, 5, 1000]) for _ in range(numbers.randint(1, 8))]
        frozen = [numbers.choice([0, 1, 700, 5000]) for _ in trainable]
        kept = [KEPT_TO_TRAIN * some + others for some, others in zip(trainable, frozen, strict=True)]
        for num_stages in range(1, sum(map(bool, trainable)) + 1):
            cuts = trial_boundaries(trainable, num_stages, frozen)
            assert cuts[0] == 0 and cuts[-1] == len(kept) and all(type(cut) is int for cut in cuts)
            assert all(sum(trainable[start:stop]) for start, stop in itertools.pairwise(cuts))
            every = (
                [0, *inner, len(kept)] for inner in itertools.combinations(range(1, len(kept)), num_stages - 1)
            )
            trains = (each for each in every if all(sum(trainable[a:b]) for a, b in itertools.pairwise(each)))
            fullest = min(max(sum(kept[a:b]) for a, b in itertools.pairwise(each)) for each in trains)
            if any(frozen):
                assert max(sum(kept[a:b]) for a, b in itertools.pairwise(cuts)) == fullest
            else:
                assert cuts == trial_boundaries(trainable, num_stages)


def test_signatures_are_deepspeeds():
    ours = inspect.signature(engine.PipelineModule.__init__).parameters
    theirs = inspect.signature(deepspeed.pipe.PipelineModule.__init__).parameters
    assert [*theirs, "plan"] == list(ours)
    assert all(
        ours[name].default == parameter.default for name, parameter in theirs.items() if name != "partition_method"
    )
    assert ours["partition_method"].default == "madpipe"
    assert inspect.signature(engine.initialize) == inspect.signature(deepspeed.initialize)


def test_a_cpu_needs_no_extension(monkeypatch):
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", True)
    monkeypatch.setattr(environment, "get_accelerator", lambda: Named("cuda"))
    environment.prepare_cpu()
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is True
    monkeypatch.setattr(environment, "get_accelerator", lambda: Named("cpu"))
    environment.prepare_cpu()
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False


class Named:
    def __init__(self, name):
        self.name = name

    def device_name(self):
        return self.name


@pytest.mark.parametrize(("value", "off"), [("0", True), (" 0 ", True), ("1", False), ("", False), (None, False)])
def test_planning_is_turned_off_by_zero(monkeypatch, value, off):
    monkeypatch.delenv("MADPIPE", raising=False)
    if value is not None:
        monkeypatch.setenv("MADPIPE", value)
    assert environment.planning_is_off() is off


def test_the_log_goes_where_logging_is_configured(caplog):
    with caplog.at_level(logging.INFO):
        environment.announce("cut at [0, 3, 8]")
    assert caplog.messages == ["cut at [0, 3, 8]"]


def test_the_log_is_seen_without_configuration():
    program = "from deepspeed_partition.engine.runtime.environment import announce; announce('cut at [0, 3, 8]')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stderr.count("[madpipe] cut at [0, 3, 8]") == 1


def test_errors_that_travel():
    error = portable(InfeasibleError("too small", stage=1, short_bytes=5))
    assert isinstance(error, InfeasibleError) and error.short_bytes == 5

    class Local(Exception):
        """Not known to other processes."""

    assert str(portable(Local("went wrong"))) == "Local: went wrong"
    assert "data iterator ended" in str(portable(StopIteration()))


def test_cuts_of_checkpoints(tmp_path):
    assert saved_cut.read_cut(tmp_path) is None
    saved_cut.save_cut(tmp_path / "new", [0, 3, 8], None)
    assert saved_cut.read_cut(tmp_path / "new") == saved_cut.SavedCut([0, 3, 8], None)
    plan = plan_for(8, 2)
    saved_cut.save_cut(tmp_path, plan.boundaries, plan)
    assert saved_cut.read_cut(tmp_path) == saved_cut.SavedCut(plan.boundaries, plan)
    looped = plans.plan_of(plans.chain_of(8), plans.platform_of(2), [0, 2, 4, 8], [0, 1, 0])
    saved_cut.save_cut(tmp_path, looped.boundaries, looped)
    found = saved_cut.read_cut(tmp_path)
    assert found.plan == looped and found.num_ranks == 2
    assert [stage.device for stage in found.allocation.stages] == [0, 1, 0]
    for damaged in ("", "[]", '{"format": "madpipe-boundaries/2", "boundaries": [0, 1]}'):
        (tmp_path / saved_cut.FILE_NAME).write_text(damaged)
        with pytest.raises(PlanFormatError, match=saved_cut.FILE_NAME):
            saved_cut.read_cut(tmp_path)
    assert saved_cut.folder_to_load(str(tmp_path), None, universal=False) is None
    (tmp_path / "latest").write_text("step7\n")
    assert saved_cut.folder_to_load(str(tmp_path), None, universal=False) == tmp_path / "step7"
    assert saved_cut.folder_to_load(str(tmp_path), "x", universal=False) == tmp_path / "x"


def test_groups_are_told_apart_where_ranks_have_made_other_ones():
    def infos(*keys):
        return [parameter_groups.GroupInfo((), key, {}, True) for key in keys]

    assert parameter_groups._places([infos("a", "b"), infos("a", "b")]) == [[0, 1], [0, 1]]
    assert parameter_groups._places([infos("a", "b"), infos("b", "c")]) == [[0, 1], [1, 2]]
    assert parameter_groups._places([infos("a", "b"), infos("b", "a")]) == [[0, 1], [1, 0]]
    assert parameter_groups._places([infos("b"), infos("a", "b")]) == [[1], [0, 1]]
    assert parameter_groups._places([infos("a"), infos("a", "c"), infos("b", "c")]) == [[0], [0, 2], [1, 2]]
    of_layers = [
        [parameter_groups.GroupInfo((), str(layer), {}, True, layer) for layer in layers]
        for layers in ((0, 1, 4, 5), (2, 3, 6))
    ]
    assert parameter_groups._places(of_layers) == [[0, 1, 4, 5], [2, 3, 6]]
    same = [{"params": [], "lr": 1.0}, {"params": [], "lr": 1.0}, {"params": [], "lr": 2.0}]
    assert len(set(parameter_groups._keys(same))) == 3

"""mCAP's incremental profiling: the cuts that it trains, what follows from peaks, what it does without room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from deepspeed_partition.engine.incremental import profile_incrementally, profiler
from deepspeed_partition.engine.incremental.profiler import FIRST_STEP, Setup, Trained, collected, steps_of, train
from deepspeed_partition.engine.incremental.runs import Run, ShortageError, runs_of
from deepspeed_partition.planner.mcap_profile import McapProfile
from tests.engine.incremental_models import LINEAR

MODELS = Path(__file__).with_name("incremental_models.py")
OFTEN = [(layers, devices) for devices in (4, 5, 7) for layers in range(2 * devices + 1, 40, 5)]


@pytest.mark.parametrize("num_layers, num_devices", OFTEN)
def test_as_many_runs_as_in_the_paper(num_layers, num_devices):
    runs = runs_of(num_layers, num_devices)
    assert len(runs) == num_layers - num_devices + 1
    assert runs_of(30, 4)[-1].boundaries == (0, 27, 28, 29, 30)


@pytest.mark.parametrize("num_devices", [4, 5, 6])
@pytest.mark.parametrize("num_layers", range(5, 20))
def test_runs_are_cuts_and_tell_all(num_layers, num_devices):
    if num_layers <= num_devices:
        with pytest.raises(ValueError, match="nothing to choose"):
            runs_of(num_layers, num_devices)
        return
    runs = runs_of(num_layers, num_devices)
    wanted = {stage for run in runs for stage in run.wanted}
    for run in runs:
        assert len(run.boundaries) == num_devices + 1 and {*run.boundaries} >= {0, num_layers}
        assert all(start < stop for start, stop in run.stages) and run.wanted <= {*run.stages}
    assert {(layer, layer + 1) for layer in range(num_layers)} <= wanted
    for layer in range(1, num_layers):
        assert any((first, layer) in wanted and (first, layer + 1) in wanted for first in range(layer))


class Devices:
    """Devices on which each layer adds bytes, and more for each micro-batch, with room for ``limit``."""

    def __init__(self, weights: Sequence[int], stashes: Sequence[int], limit: int = 10**9) -> None:
        self.weights, self.stashes, self.limit = weights, stashes, limit
        self.runs: list[Run] = []

    def bytes_of(self, stage: tuple[int, int], in_flight: int) -> int:
        return sum(self.weights[slice(*stage)]) + in_flight * sum(self.stashes[slice(*stage)])

    def train(self, runs: Sequence[Run], tell: object) -> Trained:
        peaks = []
        for run in runs:
            self.runs.append(run)
            of_run = []
            for device, stage in enumerate(run.stages):
                both = [self.bytes_of(stage, in_flight) for in_flight in (1, len(run.stages) - device)]
                of_run.append([0, 0, 0] if device in run.replaced else [0, *both])
                if max(of_run[-1]) > self.limit:
                    return Trained(peaks, device)
            peaks.append(of_run)
        return Trained(peaks)

    def profile(self, num_devices: int = 4) -> McapProfile:
        setup = Setup(factory="", micro_batch_size=1, num_devices=num_devices, num_micro_batches=num_devices)
        return collected(len(self.weights), setup, self.train, lambda done, total: None)


WEIGHTS, STASHES = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4]


def check_that_all_is_predicted(devices: Devices, profile: McapProfile) -> None:
    for start, stop in combinations(range(len(WEIGHTS) + 1), 2):
        for in_flight in (1,) if stop == len(WEIGHTS) else (1, 2, 3, 4):
            assert profile.peak_bytes(start, stop, in_flight) == devices.bytes_of((start, stop), in_flight)


@pytest.mark.parametrize("num_devices", [4, 5])
def test_sums_are_predicted_exactly(num_devices):
    devices = Devices(WEIGHTS, STASHES)
    profile = devices.profile(num_devices)
    check_that_all_is_predicted(devices, profile)
    assert profile.num_runs == len(devices.runs) == 11 - num_devices + 1


@pytest.mark.parametrize("limit", [150, 120, 90, 60])
def test_what_does_not_fit_is_run_in_a_smaller_way(limit):
    """The first eight layers need 179 bytes on the first device; the statistics are the same with less room."""
    devices = Devices(WEIGHTS, STASHES, limit)
    profile = devices.profile()
    check_that_all_is_predicted(devices, profile)
    assert profile.num_runs == len(devices.runs) > 8
    assert any(run.replaced for run in devices.runs)


def test_two_layers_that_do_not_fit_are_named():
    with pytest.raises(ShortageError, match="layers 4 and 5 do not fit together"):
        Devices(WEIGHTS, [0] * 11, 13).profile()
    with pytest.raises(ShortageError, match="layer 0 alone does not fit"):
        Devices([14, *WEIGHTS[1:]], [0] * 11, 13).profile()


def test_statistics_of_real_training():
    """A linear layer of 1 MiB keeps four times that: itself, its momentum, its gradient, and the next one to add.

    Without stand-ins the first run is out of memory: its last device has three of them. The ReLUs, which have no
    weights, are alone on a device, too.
    """
    setup = Setup(
        factory=f"{MODELS}:linear_and_relu", micro_batch_size=8, limit_bytes=9_500_000,
        config={"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
    )  # fmt: skip
    first, *others = runs_of(7, 4)
    told = []
    runs = [replace(first, others_stand_in=True), *others, first]
    trained = train(setup, runs, steps_of(setup), told.append)
    assert len(trained.peaks) == 4 and trained.shortage == 3 and told[-1] >= 3
    profile = collected(7, setup, lambda runs, tell: Trained(trained.peaks), lambda done, total: None)
    weights, activations = 512 * 512 * 4, 20 * 8 * 512 * 4
    for layer in range(7):
        expected = 4 * weights if layer in LINEAR else 0
        assert expected <= profile.isolated_bytes[layer] < expected + activations
        assert 0 <= profile.isolated_bytes_per_more[layer] < activations
        # Of the gradients that come to others there is one at a time.
        lower = expected - weights if layer > 4 else expected
        assert layer == 0 or lower - activations < profile.added_bytes[layer] < expected + activations


def test_stand_ins_in_half_precision():
    """The layers behind them are in bf16, and they gave the fp32 of layers that no engine has."""
    setup = Setup(factory=f"{MODELS}:words", micro_batch_size=8, config={"bf16": {"enabled": True}})
    cut = (0, 1, 2, 3, 5)
    runs = [Run(cut, frozenset({stage}), others_stand_in=True) for stage in ((1, 2), (3, 5))]
    assert len(train(setup, runs, [FIRST_STEP]).peaks) == len(runs)


def test_options_of_the_training_run_stay_with_it():
    """``weight_versions`` ended the profiling runs, and each of them wrote to the monitors of the training run."""
    monitors = ("tensorboard", "wandb", "csv_monitor", "comet")
    pipeline = {"madpipe": {"weight_versions": "2bw"}, "activation_checkpoint_interval": 1}
    config = {"pipeline": pipeline, "bf16": {"enabled": True}, **{key: {"enabled": True} for key in monitors}}
    job = Setup(factory="", micro_batch_size=1, config=config).job([], [], Path())
    assert job["config"]["pipeline"] == {"activation_checkpoint_interval": 1}
    assert job["config"]["bf16"] == {"enabled": True} and not job["config"].keys() & set(monitors)


def test_a_layer_that_does_not_fit_is_named(monkeypatch):
    """The first rank runs out, with the other layers, and with stand-ins for them: with the first layer alone."""
    monkeypatch.setattr(profiler, "train", lambda *arguments: Trained([], shortage=0))
    with pytest.raises(ValueError, match=r"linear_and_relu: layer 0 alone does not fit into 3 MB: use a smaller"):
        profile_incrementally(f"{MODELS}:linear_and_relu", micro_batch_size=8, limit_bytes=3_000_000)


def test_too_few_devices():
    with pytest.raises(ValueError, match="it takes 4 at least"):
        profile_incrementally(f"{MODELS}:linear_and_relu", micro_batch_size=8, num_devices=2)

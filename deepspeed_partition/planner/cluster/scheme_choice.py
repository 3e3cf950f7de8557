"""Every scheme for a model on machines, each with its step, memory, traffic and price; the best first.

- data parallel and ZeRO-1 to 3 (FSDP), as ``sharded_steps.py`` counts them, with and without activation
  checkpointing of each layer;
- D pipelines of P devices, for every D that divides devices and micro-batches: with as many layers in each stage
  under 1F1B, and as MadPipe plans them; the pipelines share the optimizer's states (ZeRO-1) where they may;
- looped pipelines, and fully sharded ones, with two stages per device, in the greedy order of ``scheme_simulator``
  with at most P micro-batches in flight per stage. These are estimates, and nothing here runs them.

A step has the same micro-batches in all of them. A plan is the one that ``make_plan`` makes and replays.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from deepspeed_partition.planner.cluster.sharded_steps import (
    DDP,
    NCCL,
    STAGES,
    Collectives,
    ShardedStep,
    UnknownSharesError,
    sharded_step,
)
from deepspeed_partition.planner.data_parallel import bytes_sent, seconds_of, splits_of, weight_copies_of
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.errors import InfeasibleError
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.planning.make_plan import make_plan, not_on_machines
from deepspeed_partition.planner.planning.problems import SHORTEST_TIME_LIMIT_SECONDS, problem_of, time_limit
from deepspeed_partition.planner.problem import Chain, Platform
from deepspeed_partition.planner.recomputation import PER_MICRO_BATCH
from deepspeed_partition.planner.schemes.scheme import Scheme, fslpp, lpp, oldest_first
from deepspeed_partition.planner.schemes.scheme_simulator import SchemeRun, SchemeStage, Wires, simulate
from deepspeed_partition.planner.training_bytes import TrainingBytes
from deepspeed_partition.planner.units import format_bytes, format_seconds

MOST_JOBS = 20_000
"""Most forwards and backwards of a looped scheme that is simulated."""
LOOPED_SHARE, EVEN_SHARE = 0.1, 0.15
"""Shares of the time for looped schemes, and for the pipelines with as many layers in each stage."""
SECONDS_PER_HOUR, MILLION = 3600, 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeChoice:
    """One way to train a chain on machines."""

    scheme: str
    """Name: ``"DDP"``, ``"ZeRO-3"``, ``"MadPipe 2 x 4"`` (two pipelines of four devices), and so on."""
    family: str
    """Name without numbers, for which the best one is explained."""
    num_devices: int
    step_seconds: float | None = None
    """Seconds of a step; None where nothing fits, or nothing is known."""
    memory_bytes: int | None = None
    """Largest peak of a device."""
    fits: bool = False
    reason: str = ""
    """Why it has no step, or does not fit."""
    is_refused: bool = False
    """Whether neither memory nor time is the reason."""
    bytes_sent: float | None = None
    """Bytes that all devices together send in a step."""
    busy: float | None = None
    """Part of the step in which devices compute, on average; of ZeRO, the slowest one."""
    price_per_million: float | None = None
    """Price of a million samples, or of a million micro-batches where the chain does not say how many it has."""
    plan: Plan | None = None
    sharded: ShardedStep | None = None

    @property
    def runs(self) -> bool:
        """Return whether a host runs it: a plan, or a strategy of Lightning or DeepSpeed."""
        return self.fits and (self.plan is not None or self.sharded is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data, in seconds and bytes."""
        return {
            "scheme": self.scheme, "num_devices": self.num_devices, "fits": self.fits, "runs": self.runs,
            "reason": self.reason, "step_seconds": self.step_seconds, "memory_bytes": self.memory_bytes,
            "bytes_sent": self.bytes_sent, "busy": self.busy, "price_per_million": self.price_per_million,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeRanking:
    """All ways, those that fit first, by the seconds of a step; each number of devices has its own."""

    chain: Chain
    platforms: tuple[Platform, ...]
    num_micro_batches: int
    choices: tuple[SchemeChoice, ...]

    @property
    def best(self) -> SchemeChoice | None:
        """Return the fastest that fits and that a host runs; None where nothing does."""
        return next((choice for choice in self.choices if choice.runs), None)

    @property
    def refusal(self) -> str | None:
        """Return why nothing runs, where neither memory nor time is the reason for it; else None."""
        if not self.choices or any(choice.fits or not choice.is_refused for choice in self.choices):
            return None
        first = self.choices[0]
        return f"nothing runs: {first.scheme} {first.reason}"

    def samples_per_second(self, choice: SchemeChoice) -> float | None:
        """Return samples per second, or micro-batches where the chain does not say how many samples they have."""
        if choice.step_seconds is None:
            return None
        return self.num_micro_batches * (self.chain.micro_batch_size or 1) / choice.step_seconds

    def why(self) -> str:
        """Return a sentence: what is best, and what is wrong with the best of each other family."""
        best = self.best
        if self.refusal is not None:
            return f"{self.refusal[0].upper()}{self.refusal[1:]}."
        if best is None or best.step_seconds is None:
            return "Nothing that runs fits: give more devices, more memory, or a smaller micro-batch."
        told = []
        for family in dict.fromkeys(choice.family for choice in self.choices):
            if family == best.family:
                continue
            mine = [choice for choice in self.choices if choice.family == family]
            fitting = [choice for choice in mine if choice.fits and choice.step_seconds is not None]
            if not fitting:
                nearest = min(mine, key=lambda choice: (choice.memory_bytes is None, choice.memory_bytes or 0))
                told.append(f"{family} {nearest.reason}")
                continue
            first = min(fitting, key=lambda choice: choice.step_seconds or 0.0)
            assert first.step_seconds is not None
            idle = "" if first.busy is None else f", busy {first.busy:.0%} of it"
            told.append(f"{first.scheme} takes {first.step_seconds / best.step_seconds:.2f} times as long{idle}")
        on = f" on {best.num_devices} devices" if len(self.platforms) > 1 else ""
        busy = "" if best.busy is None else f", busy {best.busy:.0%} of it"
        others = f" {'; '.join(told)}." if told else ""
        return f"{best.scheme}{on} has the shortest step, {format_seconds(best.step_seconds)}{busy}.{others}"

    def to_dict(self) -> dict[str, Any]:
        """Return the ranking as plain data, in seconds and bytes."""
        rows = []
        for choice in self.choices:
            rows.append(choice.to_dict() | {"samples_per_second": self.samples_per_second(choice)})
        return {
            "chain": {"name": self.chain.name, "num_layers": self.chain.num_layers, "digest": self.chain.digest()},
            "platforms": [platform.to_dict() for platform in self.platforms],
            "num_micro_batches": self.num_micro_batches,
            "why": self.why(),
            "schemes": rows,
        }  # fmt: skip


def rank_schemes(
    chain: Chain,
    platforms: Sequence[Platform],
    num_micro_batches: int,
    *,
    recompute: str = "auto",
    time_limit_seconds: float | None = None,
    deadline: Deadline | None = None,
    collectives: Collectives = NCCL,
) -> SchemeRanking:
    """Return every scheme on each of some platforms, the best first.

    Args:
        platforms: each with all devices, one for every number of them.
        num_micro_batches: of a whole step, which all devices share.
        recompute: what a plan may recompute, as in ``make_plan``; unless ``"never"``, layers of the others, too.
        time_limit_seconds: seconds of the processor for all of it; 60 where left out. A plan takes some beside its
            search, the more the longer its pipelines are; those for which too little is left are left out, and
            their reason says so.
        deadline: another end of the searches.
        collectives: what data parallelism and ZeRO have of their backend.

    Raises:
        ValueError: the chain cannot be planned for, or no pipelines may recompute as asked.
    """
    limit_seconds = time_limit(time_limit_seconds)
    for platform in platforms:
        problem_of(chain, platform, num_micro_batches)  # raises where the chain cannot be planned for
    choices: list[SchemeChoice] = []
    asked = [
        (platform, degree) for platform in platforms for degree in _degrees(chain, platform, num_micro_batches)
    ]
    splits = [split for platform, degree in asked for split in splits_of(platform, num_micro_batches, degree)]
    if recompute == PER_MICRO_BATCH and splits and not any(split.platform.is_alike for split in splits):
        raise not_on_machines(f"recompute={recompute!r}")
    asked.sort(key=lambda each: each[0].num_devices // each[1])  # long pipelines take longest
    overall = Deadline(limit_seconds, within=deadline)
    of_looped = overall.part(LOOPED_SHARE)
    for platform in platforms:
        choices += _sharded(chain, platform, num_micro_batches, recompute, collectives)
        choices += _looped(chain, platform, num_micro_batches, of_looped)
    for even in (True, False):
        choices += _pipelines(chain, asked, num_micro_batches, recompute, overall, even=even)
    priced = [_priced(chain, platforms, num_micro_batches, choice) for choice in choices]
    return SchemeRanking(
        chain=chain,
        platforms=tuple(platforms),
        num_micro_batches=num_micro_batches,
        choices=tuple(sorted(priced, key=_rank)),
    )


def _rank(choice: SchemeChoice) -> tuple[bool, bool, float]:
    return not choice.fits, choice.step_seconds is None, choice.step_seconds or 0.0


def _degrees(chain: Chain, platform: Platform, num_micro_batches: int) -> list[int]:
    """Return the numbers of pipelines that share devices and micro-batches, of at least two devices each."""
    size = platform.num_devices
    return [
        degree
        for degree in range(1, size // 2 + 1)
        if size % degree == 0 and num_micro_batches % degree == 0 and size // degree <= chain.num_layers
    ]


def _sharded(
    chain: Chain, platform: Platform, num_micro_batches: int, recompute: str, collectives: Collectives
) -> Iterator[SchemeChoice]:
    size = platform.num_devices
    for stage in STAGES:
        if size == 1 and stage:
            return
        name = ("DDP" if size > 1 else "one device") if stage == DDP else f"ZeRO-{stage}"
        ways = (False, True) if recompute != "never" else (False,)
        for recomputes in ways:
            row = SchemeChoice(
                scheme=name + (", recomputing" if recomputes else ""), family=name, num_devices=size
            )
            try:
                step = sharded_step(
                    chain, platform, num_micro_batches, stage, recomputes=recomputes, collectives=collectives
                )
            except ValueError as error:
                what = "known" if isinstance(error, UnknownSharesError) else "possible"
                yield replace(row, reason=f"is not {what}: {error}", is_refused=True)
                continue
            smallest = min(platform.memory_of(device) for device in range(size))
            fits = step.memory_bytes <= smallest
            yield replace(
                row,
                step_seconds=step.step_seconds,
                memory_bytes=step.memory_bytes,
                fits=fits,
                reason="" if fits else f"needs {format_bytes(step.memory_bytes)} of {format_bytes(smallest)}",
                bytes_sent=step.bytes_sent,
                busy=step.compute_seconds / step.step_seconds,
                sharded=step,
            )


def _pipelines(
    chain: Chain,
    asked: Sequence[tuple[Platform, int]],
    num_micro_batches: int,
    recompute: str,
    overall: Deadline,
    *,
    even: bool,
) -> Iterator[SchemeChoice]:
    """Yield each platform's number of pipelines as planned, short ones first, until the time is over."""
    limit = overall.part(EVEN_SHARE) if even else overall
    beside = 0.0  # seconds that the last plan took beside its search, for each device of a pipeline
    for number, (platform, degree) in enumerate(asked):
        length = platform.num_devices // degree
        if limit.remaining_seconds() < beside * length:
            row = _pipeline(chain, platform, degree, even=even)
            why = "the search was stopped" if overall.stopped else "too little of the time limit is left"
            yield replace(row, reason=f"is not planned: {why}")
            continue
        seconds = limit.remaining_seconds() / (len(asked) - number) - beside * length
        seconds = max(seconds, SHORTEST_TIME_LIMIT_SECONDS)
        began = time.thread_time()
        yield _planned(chain, platform, num_micro_batches, degree, recompute, seconds, overall, even=even)
        beside = max(time.thread_time() - began - seconds, 0.0) / length


def _pipeline(chain: Chain, platform: Platform, degree: int, *, even: bool) -> SchemeChoice:
    """Return the row of D pipelines before they are planned."""
    family = "1F1B with equal stages" if even else "MadPipe"
    sharing = ", ZeRO-1" if _shares_states(chain, platform, degree) else ""
    name = f"{family} {degree} x {platform.num_devices // degree}{sharing}"
    return SchemeChoice(scheme=name, family=family, num_devices=platform.num_devices)


def _shares_states(chain: Chain, platform: Platform, degree: int) -> bool:
    """Return whether pipelines share the optimizer's states (ZeRO-1)."""
    return degree > 1 and platform.weight_copies > 2 and all(each.training_bytes is None for each in chain.layers)


def _planned(
    chain: Chain,
    platform: Platform,
    num_micro_batches: int,
    degree: int,
    recompute: str,
    seconds: float,
    deadline: Deadline,
    *,
    even: bool,
) -> SchemeChoice:
    """Return D pipelines as MadPipe plans them, or with as many layers in each stage."""
    row, shares = _pipeline(chain, platform, degree, even=even), _shares_states(chain, platform, degree)
    least = _least_bytes_of_weights(chain, platform, degree, 1 if shares else None)
    largest = max(platform.memory_of(device) for device in range(platform.num_devices))
    if least > largest:
        reason = f"needs more than {format_bytes(least)} of {format_bytes(largest)}: weights alone"
        return replace(row, memory_bytes=least, reason=reason)
    try:
        plan = make_plan(
            chain,
            platform,
            "uniform" if even else "madpipe",
            num_micro_batches=num_micro_batches,
            data_parallel=degree,
            zero_stage=1 if shares else None,
            time_limit_seconds=seconds,
            deadline=deadline,
            recompute=recompute,
        )
    except InfeasibleError as error:
        needs = error.smallest_memory_bytes
        if needs is None or needs <= largest:  # which other partitions need
            return replace(row, reason=f"has no plan: {error}")
        return replace(row, memory_bytes=needs, reason=f"would fit into {format_bytes(needs)}")
    except ValueError as error:
        return replace(row, reason=f"has no plan: {error}", is_refused=True)
    step = seconds_of(plan)
    return replace(
        row,
        step_seconds=step,
        memory_bytes=max(plan.peak_memory_bytes),
        fits=True,
        bytes_sent=bytes_sent(plan, chain),
        busy=_busy(plan, platform, step),
        plan=plan,
    )


def _least_bytes_of_weights(chain: Chain, platform: Platform, degree: int, zero_stage: int | None) -> int:
    """Return what the fullest device of ``degree`` pipelines keeps at the least, whatever the partition.

    That is its even part of all weights, with their copies, those that layers share once; 0 where layers say what
    training keeps of each.
    """
    if any(layer.training_bytes is not None for layer in chain.layers):
        return 0
    copies = weight_copies_of(platform.weight_copies, degree, zero_stage)
    total, seen = 0, set[str]()
    for layer in chain.layers:
        shared = dict(layer.shared_weights)
        total += layer.weight_bytes - sum(size for name, size in shared.items() if name in seen)
        seen |= set(shared)
    return int(total * copies * degree / platform.num_devices) + platform.fixed_bytes


def _busy(plan: Plan, platform: Platform, step_seconds: float) -> float:
    """Return the part of a step in which devices compute, on average over all, idle ones included."""
    assert plan.step is not None
    computed = sum(each.duration_seconds for each in plan.operations if each.link is None)
    degree = plan.data_parallel or 1
    return degree * plan.step.num_micro_batches * computed / (platform.num_devices * step_seconds)


def _looped(
    chain: Chain, platform: Platform, num_micro_batches: int, deadline: Deadline
) -> Iterator[SchemeChoice]:
    """Yield looped pipelines of two stages per device, and those that shard their weights."""
    for degree in _degrees(chain, platform, num_micro_batches):
        size = platform.num_devices // degree
        num_stages = 2 * size
        if num_stages > chain.num_layers:
            continue
        cuts = [round(index * chain.num_layers / num_stages) for index in range(num_stages + 1)]
        for make, family in ((lpp, "looped pipelines"), (fslpp, "fully sharded looped pipelines")):
            if make is fslpp and degree == 1:
                continue  # each worker has the weights of its own stages
            row = SchemeChoice(
                scheme=f"{family} {degree} x {size}", family=family, num_devices=platform.num_devices
            )
            if 2 * num_stages * num_micro_batches > MOST_JOBS:
                yield replace(row, reason=f"is not simulated: more than {MOST_JOBS} forwards and backwards")
                continue
            if deadline.passed():
                yield replace(row, reason="is not simulated: too little of the time limit is left")
                continue
            scheme = replace(make(degree, size), priority=oldest_first, most_in_flight=_at_most(size))
            yield _simulated(chain, platform, num_micro_batches, row, scheme, cuts, degree)


def _at_most(count: int) -> Any:
    return lambda stage: count


def _simulated(
    chain: Chain,
    platform: Platform,
    num_micro_batches: int,
    row: SchemeChoice,
    scheme: Scheme,
    cuts: Sequence[int],
    degree: int,
) -> SchemeChoice:
    stages = []
    for start, stop in pairwise(cuts):
        layers = chain.layers[start:stop]
        stages.append(
            SchemeStage(
                forward_seconds=sum(layer.forward_seconds for layer in layers),
                backward_seconds=sum(layer.backward_seconds for layer in layers),
                weight_bytes=sum(layer.weight_bytes for layer in layers),
                output_bytes=chain.boundary_bytes(stop),
                stash_bytes=sum(layer.stash_bytes or 0 for layer in layers),
            )
        )

    def transfer(source: int, destination: int, num_bytes: int) -> float:
        return platform.transfer_seconds(num_bytes, source, destination)

    run = simulate(scheme, stages, num_micro_batches, Wires(transfer, platform.speed_of))
    size = platform.num_devices // degree
    sharded = row.family.startswith("fully")
    own = [sum(stages[stage].weight_bytes for stage in range(place, len(stages), size)) for place in range(size)]
    tails = [
        _all_reduce(platform, own[place], [place + group * size for group in range(degree)])
        for place in range(size)
    ]
    # Gradients that are sharded are reduced to where the weights are stored: half of an all-reduce.
    seconds = run.latency_seconds + max(tails) / (2 if sharded else 1)
    peaks = _peaks(run, chain, list(pairwise(cuts)), stages, platform)
    short = [
        (peak, platform.memory_of(device))
        for device, peak in enumerate(peaks)
        if peak > platform.memory_of(device)
    ]
    sent = sum(run.activation_bytes_received) + sum(run.weight_bytes_received)
    sent += (1 if sharded else 2) * (degree - 1) * sum(own)
    return replace(
        row,
        step_seconds=seconds,
        memory_bytes=max(peaks),
        fits=not short,
        reason="needs {} of {}".format(*map(format_bytes, max(short))) if short else "",
        bytes_sent=sent,
        busy=sum(run.busy_seconds) / (len(run.busy_seconds) * seconds),
    )


def _peaks(
    run: SchemeRun,
    chain: Chain,
    ranges: Sequence[tuple[int, int]],
    stages: Sequence[SchemeStage],
    platform: Platform,
) -> list[int]:
    """Return the bytes of each device at most.

    They are what training keeps for the weights that it stores, and beside it the larger of two: weights that it
    fetched, stashes, and two messages at each end; and what the end of a step needs.

    Args:
        ranges: the layers of each stage.
    """
    training = TrainingBytes(chain, platform)
    largest = max(stage.weight_bytes for stage in stages)
    message = 4 * max(stage.output_bytes for stage in stages)
    peaks = []
    for stored, fetched, stashed in zip(
        run.stages_stored, run.peak_fetched, run.peak_activation_bytes, strict=True
    ):
        own = [ranges[stage] for stage in stored]
        beside = max(fetched * largest + stashed + message, training.after_backwards(own))
        peaks.append(training.of(own) + beside + platform.fixed_bytes)
    return peaks


def _all_reduce(platform: Platform, num_bytes: int, devices: Sequence[int]) -> float:
    size = len(devices)
    if size == 1:
        return 0.0
    part = -(-num_bytes // size)
    one = platform.transfer_seconds(part) if platform.machines is None else platform.ring_seconds(part, devices)
    return 2 * (size - 1) * one


def _priced(
    chain: Chain, platforms: Sequence[Platform], num_micro_batches: int, choice: SchemeChoice
) -> SchemeChoice:
    machines = next(each for each in platforms if each.num_devices == choice.num_devices).machines
    hourly = None if machines is None else machines.price_per_hour(range(choice.num_devices))
    if hourly is None or choice.step_seconds is None:
        return choice
    samples = num_micro_batches * (chain.micro_batch_size or 1)
    return replace(choice, price_per_million=hourly * choice.step_seconds / SECONDS_PER_HOUR / samples * MILLION)


def strategy_of(choice: SchemeChoice, chain: Chain, num_micro_batches: int) -> dict[str, Any]:
    """Return a DeepSpeed configuration that runs data parallelism or ZeRO as a choice says.

    ``madpipe`` in it says what Lightning calls the same.

    Raises:
        ValueError: the choice is a plan, or nothing runs it.
    """
    if choice.sharded is None or not choice.fits:
        raise ValueError(f"{choice.scheme} is no strategy without a pipeline that fits")
    stage, size = choice.sharded.zero_stage, choice.num_devices
    lightning = {DDP: "ddp", 1: "deepspeed_stage_1", 2: "deepspeed_stage_2", 3: "fsdp"}[stage]
    return {
        "train_micro_batch_size_per_gpu": chain.micro_batch_size or 1,
        "gradient_accumulation_steps": num_micro_batches // size,
        "zero_optimization": {"stage": stage, "overlap_comm": True} if stage else {"stage": 0},
        "madpipe": {
            "lightning": {
                "strategy": lightning if size > 1 else "auto",
                "devices": size,
                "accumulate_grad_batches": num_micro_batches // size,
            },
            "activation_checkpointing": choice.sharded.recomputes,
            "step_seconds": choice.step_seconds,
            "memory_bytes": choice.memory_bytes,
        },
    }

"""torchmetrics metrics of a LightningModule on a pipeline.

A step updates them on the last stage, and their states travel to the other ranks with what else it leaves behind
(see ``leftovers``). So every rank of a pipeline holds the same state, ``compute`` needs no other rank of it, and
between pipelines it gathers as torchmetrics does.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from deepspeed_partition.engine.runtime.collectives import broadcast_object, gather_objects
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.planner.units import counted
from lightning_madpipe.module import outside_pipeline
from lightning_madpipe.steps.batches import tensors_of
from lightning_madpipe.steps.serialization import packed, unpacked
from lightning_madpipe.steps.step_side_effects import attributes_kept

MOST_ITEMS = 1000
"""Items of a callback's container that are looked at."""


class MetricValue(NamedTuple):
    """A metric as the value of a ``self.log`` call, on its way to other ranks."""

    path: str
    """The name of the metric in the LightningModule."""
    batch_value: Any
    """What it is for this batch alone, ``on_step``; None where its forward was not called."""


def metrics_of(module: nn.Module) -> dict[str, Metric]:
    """The metrics of a LightningModule, by their names."""
    return {name: child for name, child in outside_pipeline(module) if isinstance(child, Metric)}


def metrics_in_containers(module: nn.Module) -> dict[str, Metric]:
    """The metrics in dicts and lists of a LightningModule, by their names; these are sent to no other rank."""
    found = {}
    for path, owner in outside_pipeline(module):
        for name, value in vars(owner).items():
            # What torch keeps of modules stands there, too.
            is_container = isinstance(value, dict | list | tuple) and not name.startswith("_")
            items = value.items() if isinstance(value, dict) else enumerate(value) if is_container else ()
            for key, child in items if is_container else ():
                if isinstance(child, Metric):
                    found[".".join(filter(None, (path, f"{name}[{key!r}]")))] = child
    return found


MOST_COLLECTED = 4
"""How often what steps have made for themselves is collected when the steps of a batch have ended."""


class ToldElsewhere:
    """Whether steps have told a metric that is sent to no other rank: one in a list, in a variable, of a meter.

    The rank that runs steps notes them, and its pipeline learns with what comes of a batch that there is one.
    """

    def __init__(self) -> None:
        self._metrics: dict[int, ref[Metric]] = {}
        self._made_by_steps: dict[int, ref[Metric]] = {}
        self._told_before: dict[int, ref[Metric]] = {}
        self._with_value: dict[int, ref[Metric]] = {}
        self._made_since: dict[int, ref[Metric]] = {}
        """What hooks have made since steps ran last, which these have told nothing."""
        self._told_here: dict[int, ref[Metric]] = {}
        """What steps have told on this rank, if it runs whole steps."""
        self._told_by_hooks: dict[int, tuple[ref[Metric], int]] = {}
        """What hooks of this rank have told since it was reset, and how often."""
        self._called_by_hook: Metric | None = None
        """What a hook calls now, which resets it, and sets its count several times."""
        self._before: dict[int, Callable[[], None]] | None = None
        """What puts back the metrics that a step tells something, while steps leave nothing."""
        self.is_step_repeated = False
        """Whether a metric is told in place of steps what these have told it."""
        self._is_known = False
        self._times_collected = 0

    def made(self, metric: Metric) -> None:
        """Note one that a step makes, perhaps for itself alone."""
        self._made_by_steps[id(metric)] = ref(metric)
        if self._before is not None:
            self._before[id(metric)] = lambda: None  # nothing was there before it

    def step_sets(self, metric: Metric) -> None:
        """Keep what a metric is before a step that leaves nothing changes it."""
        if self._before is not None and id(metric) not in self._before:
            self._before[id(metric)] = attributes_kept(metric, False)

    def step_sets_count(self, metric: Metric, count: Any) -> None:
        """Note what a step tells; what it resets has still been told by hooks of other ranks."""
        if count:
            self._metrics[id(metric)] = ref(metric)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Put back what a step meanwhile tells: no state of it comes from the last stage."""
        self._before = {}
        try:
            yield
        finally:
            for put_back in self._before.values():
                put_back()
            self._before = None

    @contextmanager
    def repeating_steps(self) -> Iterator[None]:
        """Take what is told meanwhile for what steps have told."""
        before, self.is_step_repeated = self.is_step_repeated, True
        try:
            yield
        finally:
            self.is_step_repeated = before

    def look(self) -> bool:
        """Whether there is one, when the steps of a batch have ended, on the rank that runs them."""
        told_here = self._told_here | self._metrics
        self._told_here = {key: each for key, each in told_here.items() if each() is not None}
        if not self._is_known and self._metrics:
            if self._times_collected < MOST_COLLECTED:
                self._times_collected += 1
                gc.collect()  # a metric refers to itself
            told = self._alive(self._metrics)
            # One that a step has made for itself is told in no other batch.
            again = told & self._alive(self._told_before)
            self._is_known = bool(told - self._alive(self._made_by_steps) or again)
            self._told_before = self._metrics
        self._metrics = {}
        return self._is_known

    def have_told_here(self, metric: Metric) -> bool:
        """Whether whole steps have told a metric something, on this rank."""
        return _has(self._told_here, metric)

    def hook_sets_count(self, metric: Metric, before: int, count: int) -> None:
        """Note what a hook tells, and forget what is reset.

        A collection sets counts that are the same, which tells nothing.
        """
        if metric is self._called_by_hook:
            return
        if count > before:
            self._told_by_hooks[id(metric)] = ref(metric), self.times_told_by_hooks(metric) + 1
        elif not count:
            self._told_by_hooks.pop(id(metric), None)

    @contextmanager
    def hook_calls(self, metric: Metric) -> Iterator[None]:
        """Note that a hook calls a metric, which tells it once, however often its count is set meanwhile."""
        before, self._called_by_hook = self._called_by_hook, metric
        try:
            yield
        finally:
            self._called_by_hook = before
        self._told_by_hooks[id(metric)] = ref(metric), self.times_told_by_hooks(metric) + 1

    def times_told_by_hooks(self, metric: Metric) -> int:
        """How often hooks of this rank have told a metric something, besides steps."""
        found, number = self._told_by_hooks.get(id(metric), (None, 0))
        return number if found is not None and found() is metric else 0

    @staticmethod
    def _alive(metrics: dict[int, ref[Metric]]) -> set[int]:
        return {key for key, each in metrics.items() if each() is not None}

    def keeps_value(self, metric: Metric) -> None:
        """Note one that keeps its value, until it is told something."""
        self._with_value[id(metric)] = ref(metric)

    def made_in_hook(self, metric: Metric) -> None:
        """Note one that a hook makes, perhaps on one rank alone."""
        self._made_since[id(metric)] = ref(metric)

    def may_have_told(self, metric: Metric) -> bool:
        """Whether steps may have told a metric something: not where a hook has made it behind them."""
        return self._is_known and not _has(self._made_since, metric)

    def begin(self) -> None:
        """Begin a batch, whose steps may tell what hooks have made."""
        self._made_since.clear()
        self._metrics.clear()  # what a rehearsal has told, or a first stage, which runs steps up to their call

    def learn(self, is_told: bool) -> None:
        """Learn of it from the rank that runs steps, when a batch has ended.

        What metrics have kept of a hook, or of a step on this rank alone, is forgotten: ranks that have kept a
        value would not come when the others gather.
        """
        self._is_known |= is_told
        for each in self._with_value.values():
            if (metric := each()) is not None:
                metric._computed = None
        self._with_value.clear()


def named_with_class(name: str, metric: Metric) -> str:
    """A metric of a LightningModule in a sentence."""
    return f"self.{name} ({type(metric).__name__})"


def metrics_of_callbacks(callbacks: Iterable[Any], module: nn.Module) -> list[Metric]:
    """The metrics that callbacks have, also in containers and modules; ``module`` itself is none of theirs."""
    values, seen = [value for callback in callbacks for value in vars(callback).values()], set[int]()
    for value in values:  # grows by what containers have
        if isinstance(value, dict | list | tuple) and id(value) not in seen and len(value) <= MOST_ITEMS:
            seen.add(id(value))
            values += value.values() if isinstance(value, dict) else value
    modules = (value for value in values if isinstance(value, nn.Module) and value is not module)
    return [part for value in modules for part in value.modules() if isinstance(part, Metric)]


_SYNC_DIST, _SET, _FORWARD = Metric._sync_dist, Metric.__setattr__, Metric.forward
COUNTS = ("_update_count", "_num_vals_seen")
"""What torchmetrics counts in a metric, and in a ``Running`` one, when it is told something."""


class CountOfRun(int):
    """A count of a metric that a run has left, as long as nothing has been told to the metric since.

    It stays for who counts as far again. A file of the metric has a plain number.
    """

    run: object

    def __deepcopy__(self, _: Any) -> CountOfRun:
        return self

    def __reduce__(self) -> Any:
        return int, (int(self),)


class GathersBetweenPipelines:
    """Stands as ``dist_sync_fn`` in a metric: a script may ask it for its value when a run has ended, too.

    What a script tells the metric then is each process's own again. A file of the metric has none of this, so that
    it is read where this package is missing; copies in this process have it, as those of a MetricTracker.

    Args:
        metric: Whose function it is.
        gather: A tensor of each pipeline, while the run lasts.
        num_pipelines: Of the run.
    """

    def __init__(self, metric: Metric, gather: Callable[[Tensor], list[Tensor]], num_pipelines: int) -> None:
        self._metric, self._gather, self.num_pipelines = ref(metric), gather, num_pipelines
        self._run_has_ended = False

    def run_ends(self, group: Any) -> None:
        """Gather from a group from now on, as long as the state is the run's.

        Args:
            group: Has a rank of each pipeline.
        """
        metric, self._run_has_ended, self._gather = self._metric(), True, partial(gathered, group=group)
        for name in self._counts():
            number = CountOfRun(getattr(metric, name))
            number.run = self
            setattr(metric, name, number)

    def __call__(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        is_of_run = not self._run_has_ended or self.has_state_of_run()
        return self._gather(tensor) if is_of_run else gathered(tensor, group)

    def has_state_of_run(self) -> bool:
        """Whether the run has ended, and the metric has what it told it."""
        values = [getattr(self._metric(), name) for name in self._counts()]
        return any(values) and all(isinstance(value, CountOfRun) for value in values)

    def _counts(self) -> list[str]:
        return [name for name in COUNTS if hasattr(self._metric(), name)]

    def __deepcopy__(self, _: Any) -> GathersBetweenPipelines:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()


def _has(noted: dict[int, ref[Metric]], metric: Metric) -> bool:
    """Whether a metric is noted, by its identity: its hash changes with what it is told."""
    found = noted.get(id(metric))
    return found is not None and found() is metric


def _is_sent_to_nobody(metric: Metric) -> bool:
    return all(vars(metric).get(name) is None for name in ("dist_sync_fn", "process_group"))


class _Told(NamedTuple):
    """What a rank says of a metric."""

    number: int
    """How often it was told something here."""
    by_steps: bool
    by_hooks: int
    """How often hooks have told it, of those."""


def _tell_alike(everyone: Sequence[_Told]) -> bool:
    """Whether hooks have told a metric alike on all ranks of a pipeline; steps tell it on one of them."""
    by_steps = [each for each in everyone if each.by_steps]
    if not by_steps:
        return len({each.number for each in everyone}) == 1
    # What it was told before the run is alike on all: each process runs the script.
    return len(by_steps) == 1 and len({each.by_hooks for each in everyone}) == 1


class BetweenPipelines:
    """Lets metrics gather their states between pipelines, and not from all ranks, of which several have the same.

    Those are the module's, which steps and hooks update, and the callbacks', which hooks update on every rank. A
    metric that was given a process group or a function of its own keeps it.

    Args:
        module: The LightningModule.
        callbacks: Gives the Trainer's.
        gather: A tensor of each pipeline.
        num_pipelines: How many there are.
        stages: The process group of the ranks of a pipeline.
        steps: Gives what runs the user's steps.
    """

    def __init__(
        self,
        module: nn.Module,
        callbacks: Callable[[], Iterable[Any]],
        gather: Callable[[Tensor], list[Tensor]],
        num_pipelines: int,
        stages: Any,
        steps: Callable[[], Any],
    ) -> None:
        self._module, self._callbacks, self._gather = module, callbacks, gather
        self._num_pipelines = num_pipelines
        self._set: dict[int, GathersBetweenPipelines] = {}
        """What was set in this run, by its ``id``."""
        self._stages, self._steps = stages, steps
        self.look()
        between = self

        def sync(metric: Metric, dist_sync_fn: Any = gather_all_tensors, process_group: Any = None) -> None:
            own = between.function_for(metric, dist_sync_fn, process_group)
            _SYNC_DIST(metric, own, process_group)

        # For metrics without a function of their own, such as one that a hook makes and asks. A method of
        # torchmetrics (1.0 to 1.8).
        Metric._sync_dist = sync  # type: ignore[method-assign,assignment]

        def set_noted(metric: Metric, name: str, value: Any) -> None:
            steps = between._steps() if _is_sent_to_nobody(metric) else None
            if steps is not None and name == "_computed" and value is not None:
                steps.told_elsewhere.keeps_value(metric)
            if steps is not None and name in COUNTS:
                told, is_step = steps.told_elsewhere, between._is_step()
                if name not in vars(metric):
                    (told.made if is_step else told.made_in_hook)(metric)
                elif is_step or told.is_step_repeated:
                    told.step_sets_count(metric, value)
                else:
                    told.hook_sets_count(metric, getattr(metric, name), value)
            if steps is not None and COUNTS[0] in vars(metric):
                steps.told_elsewhere.step_sets(metric)
            _SET(metric, name, value)

        Metric.__setattr__ = set_noted  # type: ignore[method-assign,assignment]

        def forward(metric: Metric, *arguments: Any, **keywords: Any) -> Any:
            steps = None if between._is_step() or not _is_sent_to_nobody(metric) else between._steps()
            with nullcontext() if steps is None else steps.told_elsewhere.hook_calls(metric):
                return _FORWARD(metric, *arguments, **keywords)

        Metric.forward = forward  # type: ignore[method-assign,assignment]

    def _is_step(self) -> bool:
        steps = self._steps()
        return steps is not None and steps.running is not None

    def function_for(self, metric: Metric, function: Any, group: Any) -> Any:
        """With what a metric gathers. Collective over all ranks where steps may have told it, and a hook asks.

        What hooks have told it, on all ranks of the pipeline, counts once. What steps have told one that is sent
        to no other rank, such as one in a list, is on the last stage alone, with what hooks have told it there:
        the others take that state until it has its value.
        """
        if function is not gather_all_tensors or group is not None or metric.process_group is not None:
            return function

        def between(tensor: Tensor, group: Any = None) -> list[Tensor]:
            return self._gather(tensor)

        if self._is_step():
            return between  # it runs on the last stage alone
        steps = self._steps()
        is_told = steps is not None and steps.told_elsewhere.may_have_told(metric)
        if not any(map(bool, self._gather(torch.tensor(int(is_told), device=metric.device)))):
            return between  # hooks alone have told it, on all ranks of a pipeline or for one
        told = None if steps is None else steps.told_elsewhere
        mine = _Told(
            max(getattr(metric, name, 0) for name in COUNTS),
            told is not None and told.have_told_here(metric),
            0 if told is None else told.times_told_by_hooks(metric),
        )
        everyone = gather_objects(mine, self._stages)
        places = [place for place, each in enumerate(everyone) if each.by_steps]
        are_alike = self._gather(torch.tensor(int(_tell_alike(everyone)), device=metric.device))
        if not all(map(bool, are_alike)):
            self._tell_of_unlike_hooks(metric, everyone)
            return function  # a hook of one rank has told it, or whole steps have run on several
        if places:
            self._take_state(metric, places[0])
        return between

    @staticmethod
    def _tell_of_unlike_hooks(metric: Metric, everyone: Sequence[_Told]) -> None:
        """Say that what hooks of several ranks have told a metric counts several times."""
        if sum(each.by_hooks > 0 for each in everyone) > 1:
            name = type(metric).__name__
            warn_once(
                f"unlike hooks/{name}",
                f"hooks of all ranks tell a {name} something, and those of one rank tell it more: it gathers from "
                "all ranks, and has what all have told it once for each. Tell one metric in hooks of all ranks, "
                "and another one on rank 0",
            )

    def _take_state(self, metric: Metric, place: int) -> None:
        """Let all ranks of the pipeline have the state of one; torchmetrics puts their own back. Collective."""
        states = packed({name: getattr(metric, name) for name in metric._defaults})
        source = dist.get_global_rank(self._stages, place)
        states = broadcast_object(states, source, self._stages)
        for name, value in unpacked(states, metric.device).items():
            setattr(metric, name, value)

    def look(self) -> None:
        """Take also metrics that hooks have made since the last look."""
        found = [*metrics_of(self._module).values(), *metrics_of_callbacks(self._callbacks(), self._module)]
        for metric in found:
            own = metric.dist_sync_fn
            is_free = own is None or (isinstance(own, GathersBetweenPipelines) and id(own) not in self._set)
            if metric.process_group is None and is_free:
                self._tell_of_run_before(metric, own)
                metric.dist_sync_fn = own = GathersBetweenPipelines(metric, self._gather, self._num_pipelines)
                self._set[id(own)] = own

    def _tell_of_run_before(self, metric: Metric, own: GathersBetweenPipelines | None) -> None:
        """Say that a metric goes on with what pipelines of another number have told it, each its share."""
        if own is None or own.num_pipelines == self._num_pipelines or not own.has_state_of_run():
            return
        before, now = counted(own.num_pipelines, "pipeline"), counted(self._num_pipelines, "pipeline")
        warn_once(
            f"metric of a run before/{type(metric).__name__}",
            f"a {type(metric).__name__} has what a run of {before} has told it, and this run has {now}: its value "
            "counts some of those data more often than others. Call its reset() before fit",
        )

    def end(self, group: Any, num_alike: int) -> None:
        """Let the metrics go on without the strategy, as long as they have what this run has told them.

        Args:
            group: Has a rank of each pipeline.
            num_alike: How many ranks have returned the same predictions; 1: there are none.
        """
        Metric.__setattr__, Metric._sync_dist = _SET, _SYNC_DIST  # type: ignore[method-assign]
        Metric.forward = _FORWARD  # type: ignore[method-assign]
        if num_alike > 1:
            Metric._sync_dist = _told_of_predictions(num_alike)  # type: ignore[method-assign]
        for own in self._set.values():
            own.run_ends(group)
        self._set.clear()


def _told_of_predictions(num_ranks: int) -> Callable[..., None]:
    """How a metric that a script makes gathers after ``trainer.predict``: as torchmetrics does, which is said."""

    def sync(metric: Metric, dist_sync_fn: Any = gather_all_tensors, process_group: Any = None) -> None:
        if dist_sync_fn is gather_all_tensors and process_group is None and metric.process_group is None:
            warn_once(
                "metric of predictions",
                f"a {type(metric).__name__} that the script asks after trainer.predict gathers from all ranks, "
                f"{num_ranks} of which have the same predictions each: its sums count them {num_ranks} times, "
                f"means once. {type(metric).__name__}(sync_on_compute=False) counts those of its rank alone",
            )
        _SYNC_DIST(metric, dist_sync_fn, process_group)

    return sync


def gathered(tensor: Tensor, group: Any) -> list[Tensor]:
    """``tensor`` of each rank of ``group``; sizes may differ."""
    return gather_all_tensors(tensor, group)


def copied(metric: Metric) -> Metric:
    """A copy of ``metric``, whose states may hold the graph that they came from; no copy can have that."""
    values = [value for part in metric.modules() for value in (*vars(part).values(), *part._buffers.values())]
    memo = {id(t): t.detach().clone() for t in tensors_of(values) if t.grad_fn is not None}
    return copy.deepcopy(metric, memo)


class BatchMetrics:
    """What metrics are for one Lightning batch alone, whose micro-batches they see one after the other.

    torchmetrics knows this value, which ``self.log(..., on_step=True)`` shows, for each call of a metric, that is,
    for a micro-batch. Here a copy of the metric sees all calls of the batch.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Metric, Metric]] = {}
        self._called: set[int] = set()

    def begin(self) -> None:
        """Forget the batch before."""
        self._called.clear()

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Follow the calls of the module's metrics while a step runs."""

        # A function and no method: who copies a metric would copy the object of a method with it.
        def follow(metric: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], _: Any) -> None:
            self._copy_of(metric).update(*arguments, **keywords)

        metrics = metrics_of(module).values()
        handles = [metric.register_forward_hook(follow, with_kwargs=True) for metric in metrics]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def value_of(self, metric: Metric) -> Any:
        """Return the value of a metric over its calls since :meth:`begin`; None where there were none.

        Nor where the metric keeps no value of its calls, as ``RunningMean``, of which Lightning shows none.
        """
        if id(metric) not in self._called or metric._forward_cache is None:
            return None
        own = self._copy_of(metric)
        # As torchmetrics does for the value of a call, which is each rank's own unless the metric says otherwise.
        own._to_sync = metric.dist_sync_on_step
        return own.compute()

    def _copy_of(self, metric: Metric) -> Metric:
        if id(metric) not in self._copies:
            own = copied(metric)
            for part in own.modules():
                part._forward_hooks.clear()
                part._forward_pre_hooks.clear()
            self._copies[id(metric)] = metric, own
        _, own = self._copies[id(metric)]
        if id(metric) not in self._called:
            self._called.add(id(metric))
            own.reset()
        return own

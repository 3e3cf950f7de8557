"""torchmetrics metrics of a LightningModule on a pipeline.

A step updates them on the last stage, and their states travel to the other ranks with what else it leaves behind
(see ``leftovers``). So every rank of a pipeline holds the same state, ``compute`` needs no other rank of it, and
between pipelines it gathers as torchmetrics does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_madpipe.module import outside_pipeline
from lightning_madpipe.steps.batches import tensors_of

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


class BetweenPipelines:
    """Lets metrics gather their states between pipelines, and not from all ranks, of which several have the same.

    Those are the module's, which steps and hooks update, and the callbacks', which hooks update on every rank. A
    metric that was given a process group or a function of its own keeps it.

    Args:
        module: The LightningModule.
        callbacks: Gives the Trainer's.
        gather: A tensor of each pipeline.
    """

    def __init__(
        self, module: nn.Module, callbacks: Callable[[], Iterable[Any]], gather: Callable[[Tensor], list[Tensor]]
    ) -> None:
        self._module, self._callbacks, self._gather = module, callbacks, gather
        self._changed: list[Metric] = []
        self.look()

    def look(self) -> None:
        """Take also metrics that hooks have made since the last look."""
        gather = self._gather
        found = [*metrics_of(self._module).values(), *metrics_of_callbacks(self._callbacks(), self._module)]
        for metric in found:
            if metric.process_group is None and metric.dist_sync_fn is None:
                # Not the process group itself, which cannot be copied, and a MetricTracker copies its metric.
                metric.dist_sync_fn = lambda tensor, group=None: gather(tensor)
                self._changed.append(metric)

    def end(self) -> None:
        """Let all of them be as before."""
        for metric in self._changed:
            metric.dist_sync_fn = None
        self._changed.clear()


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

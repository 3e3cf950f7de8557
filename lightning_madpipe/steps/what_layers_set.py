"""What layers set on themselves while they run, such as an auxiliary loss, and a step may not read.

A layer runs on the rank that has it, once per micro-batch, and the step on the last stage. What the layer has set
on itself is missing there, or is that of another micro-batch, and no gradient comes through it. To read it in a
step raises. What is set is seen where ``forward()`` is compared with the layers, and else read from the code of
the layers' classes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, NoReturn

from torch import nn
from torchmetrics import Metric

from deepspeed_partition.capture.element_attributes import of_class, subclass_of
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.names_of_forward import names_of_forward
from lightning_madpipe.compat.elsewhere import HiddenTensors
from lightning_madpipe.module import PipelineCall
from lightning_madpipe.steps.ending_contexts import EndingContexts
from lightning_madpipe.steps.hook_values import NOT_HERE, HookValue
from lightning_madpipe.steps.hooks_that_collect import Collected

BY_A_HOOK = (
    "{step} reads {shown}, which {hook} writes while that layer runs, on the rank that has it, and the step runs "
    "on the last stage: return it from forward(), `return logits, feature`, without the hook (layers of "
    "pipeline_layers() hand it on). Where it is only logged, give self.log the tensor, without float() or .item()"
)


IN_A_HOOK = (
    "{hook} reads {place}, which a layer sets while it runs: in a pipeline that is on the rank that has the "
    "layer, for the last micro-batch alone, and on other ranks it is what it was before. Let the layer return the "
    "value with its output, with one number or row for each sample, as in `return x, value.expand(len(x))`, let "
    "the layers behind it hand that on, and keep or log it in the step"
)
BY_A_HOOK_IN_A_HOOK = (
    "{hook} raises {error} where it reads {shown}, which {writer} writes while that layer runs: in a pipeline on "
    "the rank that has it, once per micro-batch, and elsewhere it is what it was. Ask whether it is there (`if "
    "self.output is not None`, `if 'block' in self.features`; a gradient, `.grad is not None`), or return it from "
    "forward(), `return logits, feature`, without the hook"
)
NOT_ON_THIS_RANK = "{hook} raises {error} on a rank that does not run that layer: {sentence}"


class Left(NamedTuple):
    """An attribute that ``forward()`` or a layer sets while it runs."""

    layer: int | None
    """The place of the layer among those that need no building; None: it stands outside of the layers."""
    path: str
    """The path of the module that has the attribute, within the layer or the LightningModule."""
    name: str


def left_by_code(call: PipelineCall) -> list[Left]:
    """The attributes that the code of the layers' classes sets in ``forward()``, and in methods that it calls."""
    return [
        Left(place, path, name)
        for place, (_, layer) in enumerate(call.existing_modules())
        for path, part in layer.named_modules()
        for name in names_of_forward(part.__class__).written
    ]


class LayerTraces:
    """Lets steps not read what layers set.

    Args:
        module: The LightningModule.
        call: Its layers.
        error: The host's exception with a sentence.
        is_in_last_stage: Whether the last stage runs a layer, by its number or the key of its tie.
    """

    def __init__(
        self,
        module: nn.Module,
        call: PipelineCall,
        error: Callable[[str], Exception],
        is_in_last_stage: Callable[[int | str], bool] = lambda _: False,
    ) -> None:
        self._module, self._error, self._is_in_last_stage = module, error, is_in_last_stage
        self._is_behind = False
        self._called = f"self.{call.attribute}()"
        self._layers = [layer for _, layer in call.existing_modules()]
        self._names = {part: f"self.{name}" for name, part in module.named_modules() if name}
        self._hidden: dict[Any, dict[str, Left | Collected]] = defaultdict(dict)
        self._kinds: dict[tuple[Any, str], type] = {}

    def add(self, left: Collection[Left]) -> None:
        """Keep steps from reading these attributes, too."""
        for each in left:
            root = self._module if each.layer is None else self._layers[each.layer]
            owner = root.get_submodule(each.path)
            if not isinstance(owner, Metric):  # which changes itself, and travels as a whole
                self._hidden[owner][each.name] = each
        self._kinds.clear()

    def add_of_hooks(self, collected: Iterable[Collected]) -> None:
        """Keep steps from reading what hooks on layers write, too."""
        for each in collected:
            if not isinstance(each.owner, Metric) and type(each.owner).__hash__ is not None:
                self._hidden[each.owner][each.name] = each
        self._kinds.clear()

    def has(self, owner: Any, name: str) -> bool:
        """Whether a step may not read an attribute."""
        return name in self._hidden.get(owner, ())

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let layers that run within a step read what they have set."""
        with ExitStack() as stack:
            for owner in self._hidden:
                kind = type(owner)
                if any(kind is refusing for refusing in self._kinds.values()):
                    stack.enter_context(of_class(owner, kind.__bases__[0]))
            yield

    @contextmanager
    def hidden(self, step: str, *, is_behind: bool = False) -> Iterator[None]:
        """Let a step raise, while it runs, where it reads what a layer sets.

        What a hook writes it may log, see ``hook_values.py``.

        Args:
            is_behind: Whether the step runs right behind the last stage, on the same micro-batch.
        """
        self._is_behind = is_behind
        stack = EndingContexts()
        try:
            with stack:
                for owner in self._hidden:
                    stack.enter_context(of_class(owner, self._refusing_class(owner, step)))
                yield
        finally:
            stack.end()

    @contextmanager
    def told_in_hook(self, hook: str, names: Collection[str]) -> Iterator[None]:
        """Tell once of what a hook reads meanwhile that layers set; raise that where the layer is elsewhere.

        Args:
            hook: The hook and whose it is, in words.
            names: Those in its code.

        Raises:
            Exception: the host's, where the hook fails after it has read what is not on this rank.
        """
        missed: list[str] = []
        collected: list[Collected] = []
        try:
            with ExitStack() as stack:
                for owner, lefts in self._hidden.items():
                    members = {
                        each.name: self._told(owner, each, hook, missed)
                        for each in lefts.values()
                        if isinstance(each, Left) and each.layer is not None and each.name in names
                    }
                    members |= {
                        each.name: _noted(each, collected)
                        for each in lefts.values()
                        if isinstance(each, Collected) and each.name in names
                    }
                    if members:
                        stack.enter_context(of_class(owner, subclass_of(type(owner), members)))
                yield
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            kind = type(error).__name__
            if missed:
                raise self._error(NOT_ON_THIS_RANK.format(hook=hook, error=kind, sentence=missed[-1])) from error
            if collected:
                shown, writer = collected[-1].shown, collected[-1].hook
                words = BY_A_HOOK_IN_A_HOOK.format(hook=hook, error=kind, shown=shown, writer=writer)
                raise self._error(words) from error
            raise

    def _told(self, owner: Any, left: Left, hook: str, missed: list[str]) -> property:
        def read(it: Any) -> Any:
            if it is owner and left.name not in it._buffers:
                place = f"{self._name_of(owner, left)}.{left.name}"
                sentence = IN_A_HOOK.format(hook=hook, place=place)
                warn_once(f"read in hook/{hook}/{left.name}", sentence)
                if any(isinstance(part._parameters, HiddenTensors) for part in owner.modules()):
                    missed.append(sentence)
            return _plainly_read(it, left.name)

        return property(read, lambda it, value: vars(it).__setitem__(left.name, value))

    def _refusing_class(self, owner: Any, step: str) -> type:
        kind = self._kinds.get((owner, step))
        if kind is None or kind.__bases__[0] is not type(owner):  # which a parametrization changes
            names = self._hidden[owner].items()
            members = {name: self._refusing(owner, each, step) for name, each in names}
            kind = self._kinds[owner, step] = subclass_of(type(owner), members)
        return kind

    def _refusing(self, owner: Any, left: Left | Collected, step: str) -> property:
        def read(_: Any) -> Any:
            if isinstance(left, Collected):
                return self._value_by_a_hook(owner, left, step)
            raise self._error(self._sentence(owner, left, step))

        return property(read, lambda it, value: vars(it).__setitem__(left.name, value))

    def _value_by_a_hook(self, owner: Any, left: Collected, step: str) -> HookValue:
        def refuse() -> NoReturn:
            raise self._error(BY_A_HOOK.format(step=step, shown=left.shown, hook=left.hook))

        is_here = self._is_behind and self._is_in_last_stage(left.layer) and left.name in vars(owner)
        return HookValue(vars(owner)[left.name] if is_here else NOT_HERE, (left.shown, left.hook), refuse)

    def _sentence(self, owner: nn.Module, left: Left, step: str) -> str:
        place = f"self.{left.name}" if owner is self._module else f"{self._name_of(owner, left)}.{left.name}"
        setter = f"{self._called} or a layer" if left.layer is None else "a layer"
        return (
            f"{step} reads {place}, which {setter} sets while it runs: in a pipeline a layer runs on the rank "
            "that has it, once per micro-batch, and the step on the last stage, where neither the value nor its "
            "gradient comes: let the layers hand it on with the activations, `return x, aux`, and the last one "
            "return it"
        )

    def _name_of(self, owner: nn.Module, left: Left) -> str:
        return self._names.get(owner, f"{left.path or type(owner).__name__} of layer {left.layer}")


def _noted(collected: Collected, read_now: list[Collected]) -> property:
    """An attribute that is what it was, and noted where it is read."""

    def read(it: Any) -> Any:
        if it is collected.owner:
            read_now.append(collected)
        return _plainly_read(it, collected.name)

    return property(read, lambda it, value: vars(it).__setitem__(collected.name, value))


def _plainly_read(owner: Any, name: str) -> Any:
    return vars(owner)[name] if name in vars(owner) else getattr(super(type(owner), owner), name)

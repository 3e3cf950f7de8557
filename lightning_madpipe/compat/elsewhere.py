"""Layers that run on other ranks: they keep their places in the user's module, and their tensors cannot be read.

A LightningModule stays as its user wrote it while a pipeline trains it: ``self.net[3]`` is the fourth layer on
every rank, under the name ``net.3``. Where another rank runs it, this rank has values of it that nobody trains. So
these are left out of ``named_parameters()`` and ``state_dict()``, and to read one of them raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed_partition.engine.pipeline.parts import held_modules, parts_of
from deepspeed_partition.engine.runtime.collectives import gather_objects
from lightning_madpipe.module import PIPELINE, TiedModule

TABLES = ("_parameters", "_buffers")
"""The attributes in which torch keeps the tensors of a module."""

DURING_A_RUN = (
    "{name} is asked for on a rank that does not run its layer, and whose values of it are not the trained ones: "
    "self.named_parameters() has those of this rank, and trainer.strategy.lightning_module_state_dict(), called "
    "on every rank, gives the whole model to rank 0"
)
"""What is said to whoever reads a tensor that another rank trains."""

AFTER_A_RUN = (
    "{name} is asked for on a rank that did not run its layer, and whose values of it are not the trained ones: "
    "call trainer.strategy.gather_model() on every rank, or let whole_model='every_rank', the default of "
    "MadPipeStrategy, bring all layers back when a run ends"
)
"""What is said where layers did not come back after a run."""

AFTER_AN_EXCEPTION = (
    "{name} is asked for on a rank that did not run its layer, after a run that an exception ended, so that "
    "layers did not come back: call trainer.strategy.gather_model() on every rank, or load a checkpoint"
)
"""What is said after an exception."""

ON_RANK_ZERO = (
    "{name} is asked for on a rank that did not run its layer: whole_model='rank_zero' has brought all layers to "
    "rank 0 only; read it there, or use whole_model='every_rank'"
)
"""What is said where rank 0 alone has the whole model."""


class ElsewhereError(RuntimeError):
    """A tensor of a layer is read, and another rank trains it."""


class GradientElsewhereError(ElsewhereError):
    """The gradient of such a tensor is read."""


class StandIn(Tensor):
    """What can be read where another rank has the values: that there is a tensor, and its form.

    ``layer.bias is not None``, ``layer.weight.shape``, ``next(self.parameters()).new_zeros(3)`` and a ``repr`` of
    the module answer; all else raises.
    """

    may_be_changed = False
    """Whether the code that has it may change it, which is done where it is."""
    _refusal: str
    _form: Tensor
    _place: torch.device

    @staticmethod
    def of(tensor: Tensor, refusal: str) -> StandIn:
        form = torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
        stand_in = torch.Tensor._make_subclass(StandIn, form.detach(), tensor.requires_grad)
        vars(stand_in).update(_refusal=refusal, _form=form, _place=device_here(tensor))
        return stand_in

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{tuple(self._form.shape)}, {self._form.dtype}, on another rank>"

    def __deepcopy__(self, memo: Any) -> StandIn:
        return self

    @property
    def _is_param(self) -> bool:  # type: ignore[override]
        """Refuse to say whether this is a parameter; torch asks, as in ``get_parameter()``."""
        raise ElsewhereError(self._refusal)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        if function == _DEVICE:
            return arguments[0]._place
        if function in _IS_ON:
            return arguments[0]._place.type == _IS_ON[function]
        if function in _ITSELF and HiddenTensors.listing is not None:  # in a step, on the way to one of its kind
            return arguments[0]
        if function in _FACTORIES and isinstance(arguments[0], StandIn):
            like = arguments[0]
            with torch._C.DisableTorchFunctionSubclass():
                empty = torch.empty(like._form.shape, dtype=like._form.dtype, device=like._place)
                return function(empty, *arguments[1:], **(keywords or {}))
        if function in _OF_THE_FORM:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*(_form(value) for value in arguments), **(keywords or {}))
        kind = GradientElsewhereError if function == _GRADIENT else ElsewhereError
        raise kind(next(value._refusal for value in _flat(arguments, keywords)))


def device_here(tensor: Tensor) -> torch.device:
    """Where a tensor of another rank would lie here, in one process: on the device, which it is not brought to."""
    return torch.device(get_accelerator().current_device_name()) if tensor.device.type == "cpu" else tensor.device


_GRADIENT = getattr(Tensor.grad, "__get__")  # noqa: B009
_DEVICE = getattr(Tensor.device, "__get__")  # noqa: B009  of a property, which mypy takes for its value
_IS_ON = {getattr(Tensor, f"is_{kind}").__get__: kind for kind in ("cpu", "cuda", "meta", "mps", "xpu")}
"""What asks for a kind of device."""
_ITSELF = frozenset((getattr(Tensor.data, "__get__"), Tensor.detach))  # noqa: B009
_FACTORIES = frozenset((
    Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor,
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
    torch.randint_like,
))  # fmt: skip
"""What makes a tensor like another one without its values."""
_PROPERTIES = ("shape", "dtype", "ndim", "layout", "requires_grad", "is_leaf")
_METHODS = ("size", "dim", "numel", "is_floating_point", "is_complex", "element_size", "__len__")
_OF_THE_FORM = frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES] + [getattr(Tensor, name) for name in _METHODS]
)
"""What can be asked of a tensor without its values."""


def _form(value: Any) -> Any:
    return value._form if isinstance(value, StandIn) else value


def _flat(*values: Any) -> Iterator[StandIn]:
    for value in values:
        if isinstance(value, StandIn):
            yield value
        elif isinstance(value, Mapping):
            yield from _flat(*value.values())
        elif isinstance(value, list | tuple):
            yield from _flat(*value)


class HiddenTensors(dict[str, Any]):
    """The ``_parameters`` or ``_buffers`` of a module, without those that another rank has.

    A ``load_state_dict()`` of the whole model in a hook loads on each rank what that has. Whoever goes through
    the tensors finds the others; whoever asks for one of these by its name gets a stand-in. In a step those who go
    through them get the stand-ins, too, see :meth:`Elsewhere.listed`.
    """

    listing: Listing | None = None
    """Gives the stand-ins, while all tensors are listed."""
    listing_for: Callable[[], Listing | None] | None = None
    """Gives that for whoever goes through the tensors in a hook, if all are to be listed there."""
    stand_in: Callable[[Tensor, str], StandIn] | None = None
    """Gives, in a hook, what is found under the name of a tensor, of that and of what whoever reads it is told."""

    def __init__(self, whole: dict[str, Any], hidden: dict[str, str]) -> None:
        super().__init__({name: value for name, value in whole.items() if name not in hidden})
        self.whole = whole
        """The dict that stood here."""
        self.hidden = hidden
        """The name of each tensor that is left out, with what is said to whoever reads it."""

    def items(self) -> Any:
        """The names and tensors, with stand-ins while all are listed."""
        listing = HiddenTensors.listing
        if listing is None and HiddenTensors.listing_for is not None:
            listing = HiddenTensors.listing_for()
        if listing is None:
            return [*super().items(), *self._given_by(sys._getframe(1))]
        return [
            (name, listing.shown(tensor, self.hidden[name]) if name in self.hidden else tensor)
            for name, tensor in self.whole.items()
        ]

    def _given_by(self, frame: FrameType | None) -> Iterator[tuple[str, StandIn]]:
        """The hidden tensors that a state dict has for which ``load_state_dict()`` asks here.

        Another rank loads these. Those that it lacks are not missing: ``state_dict()`` has this rank's own alone.
        """
        if frame is not None and frame.f_code.co_name == "_load_from_state_dict":
            state, prefix = frame.f_locals.get("state_dict", ()), frame.f_locals.get("prefix", "")
            yield from ((name, self[name]) for name in self.hidden if f"{prefix}{name}" in state)

    def __contains__(self, name: object) -> bool:
        return name in self.hidden or super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        if name in self.hidden:
            if _moves_rnn(sys._getframe(1)):  # and keeps what it is given here: no stand-in, which would stay
                return self.whole[name]
            stand_in = HiddenTensors.stand_in or StandIn.of
            return stand_in(self.whole[name], self.hidden[name])
        raise KeyError(name)

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.hidden:
            stand_in, is_changed = self[name], isinstance(value, StandIn)  # in place, by `+=`
            is_parameter = isinstance(self.whole[name], nn.Parameter)
            if not stand_in.may_be_changed or (is_parameter and not is_changed):
                raise ElsewhereError(stand_in._refusal)
            if not is_changed:
                self.whole[name] = value  # which has its form, if not its values
            return
        super().__setitem__(name, value)
        self.whole[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self.hidden:
            raise ElsewhereError(self.hidden[name])
        super().__delitem__(name)
        del self.whole[name]

    def pop(self, name: str, *default: Any) -> Any:
        if name in self:
            value = self[name]
            del self[name]
            return value
        return super().pop(name, *default)

    def __reduce__(self) -> Any:
        # A copy is no longer followed when layers move: it hides what its original did.
        return HiddenTensors, (self.whole, self.hidden)


def _moves_rnn(frame: FrameType | None) -> bool:
    """Whether torch moves or converts an RNN, which then lists its weights anew, wherever they lie."""
    while frame is not None:
        if frame.f_code is nn.RNNBase._apply.__code__:
            return True
        frame = frame.f_back
    return False


class Listing:
    """What is listed for tensors that are hidden.

    Args:
        module: The LightningModule.
        stand_in: Makes what is listed of a tensor and of what is said to whoever reads it.
    """

    def __init__(self, module: nn.Module, stand_in: Callable[[Tensor, str], Tensor] | None = None) -> None:
        self._module, self._stand_in = module, stand_in or StandIn.of
        self._shown: dict[int, Tensor] | None = None

    def shown(self, tensor: Any, refusal: str) -> Any:
        """A stand-in, one for each tensor; the tensor itself where another place of it is not hidden."""
        if not isinstance(tensor, Tensor):
            return tensor
        if self._shown is None:
            self._shown = {}
            for part in self._module.modules():
                for table in TABLES:
                    for value in vars(part).get(table, {}).values():
                        if isinstance(value, Tensor):
                            self._shown[id(value)] = value
        if id(tensor) not in self._shown:
            self._shown[id(tensor)] = self._stand_in(tensor, refusal)
        return self._shown[id(tensor)]


class Elsewhere:
    """Hides what other ranks of a pipeline run, in the module that the user wrote.

    Args:
        module: The LightningModule, in which every layer still is where the user put it.
        pipeline: Its layers.
    """

    def __init__(self, module: nn.Module, pipeline: nn.Module) -> None:
        self._module, self._pipeline = module, pipeline
        # By identity: the hash of a metric depends on what it has counted.
        self._modes_before = WeakIdKeyDictionary()
        self._is_lifted = False
        self._names = WeakIdKeyDictionary({part: name for name, part in module.named_modules()})
        self._owners, self._paths = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self._unnamed: list[str] = []
        of_tensors: dict[int, set[str]] = {}
        in_tree = {id(tensor) for part in self._names for _, _, tensor in _tensors(part)}
        for part in parts_of(pipeline):
            layer = part.spec.module if isinstance(part.spec, TiedModule) else part.spec
            own: set[int] = set()
            for path, child in layer.named_modules() if isinstance(layer, nn.Module) else ():
                self._owners.setdefault(child, set()).add(part.name)
                self._paths.setdefault(child, self._names.get(child, ".".join(filter(None, (part.name, path)))))
                own.update(id(tensor) for _, _, tensor in _tensors(child))
            for tensor in own:
                of_tensors.setdefault(tensor, set()).add(part.name)
            if not isinstance(layer, nn.Module) or not own <= in_tree:
                self._unnamed.append(part.name)
        # Such as `self.head.weight = self.embed.weight` where the layers run `self.embed` twice.
        self._aliases = [
            (part, table, name, of_tensors[id(tensor)])
            for part in self._names
            if part not in self._owners
            for table, name, tensor in _tensors(part)
            if id(tensor) in of_tensors
        ]
        self._ids_inside = frozenset(map(id, self._owners))
        self.keeps_modes = False
        """Whether a batch is evaluated in the modes that the user's module has, whatever these are."""
        self.sentence = DURING_A_RUN
        """What whoever reads a tensor of another rank is told, with ``{name}`` for its name."""

    @property
    def inside(self) -> Mapping[nn.Module, Any]:
        """The modules that layers consist of; those that a ``LayerSpec`` builds are not among them."""
        return self._owners

    @property
    def all_that_hide(self) -> list[nn.Module]:
        """The modules of the LightningModule of which tensors are hidden where other ranks run them."""
        return [*self._owners, *(part for part, *_ in self._aliases)]

    @property
    def ids_inside(self) -> frozenset[int]:
        """The identities of the modules that layers consist of."""
        if len(self._ids_inside) != len(self._owners):  # some are no more, and others may have their identities
            self._ids_inside = frozenset(map(id, self._owners))
        return self._ids_inside

    def take_over_modes(self, mode: bool = True) -> nn.Module:
        """Stand for ``train()`` of the pipeline: layers of the user's module keep the modes that they have there.

        DeepSpeed calls that before each batch, and would train what the user froze with ``eval()``. Layers that
        the user's module does not know are in its mode. A trial, a batch that DeepSpeed evaluates while the user's
        module trains, is evaluated by all layers; before the next one they have their modes again. Layers that
        were found run the code of training even there, for the step takes what that returns. A batch of the
        user's own evaluation has the modes that ``on_validation_model_eval`` and its kin have left.
        """
        self._pipeline.training = mode
        for part, was in self._modes_before.items():
            part.training = was
        self._modes_before.clear()
        call = getattr(self._pipeline, "call_of_module", None)
        captured = None if call is None else call.captured
        root = self._module if captured is None else captured.model
        for part in self.made_for_the_pipeline():
            part.training = root.training
        if captured is not None:
            captured.follow_modes()
        if not mode and self._module.training and not self.keeps_modes:
            parts = {part for layer in held_modules(self._pipeline).values() for part in layer.modules()}
            if captured is not None:
                # These choose the code that runs: in evaluation it may return other things than the step takes.
                parts -= set(self.made_for_the_pipeline())
            self._modes_before = WeakIdKeyDictionary({part: part.training for part in parts})
            for part in parts:
                part.training = False
        return self._pipeline

    def made_for_the_pipeline(self) -> Iterator[nn.Module]:
        """The modules in the layers of this rank that the LightningModule does not know."""
        for layer in held_modules(self._pipeline).values():
            for part in layer.modules():
                if part not in self._names:
                    yield part

    def hide(self) -> None:
        """Hide what this rank does not run, and show what it runs, as the layers lie now."""
        self._hide_but(held_modules(self._pipeline))

    @contextmanager
    def everything_hidden(self) -> Iterator[None]:
        """Hide meanwhile what this rank runs, too, so that whoever uses a layer is told so on every rank."""
        try:
            self._hide_but({})
            yield
        finally:
            self.hide()

    @contextmanager
    def listed(self) -> Iterator[None]:
        """Let ``parameters()`` and its kin list meanwhile what is hidden, too, by stand-ins.

        A step that counts elements or asks for a device is answered as in one process, and one that computes with
        values which other ranks have is told so.
        """
        before, HiddenTensors.listing = HiddenTensors.listing, Listing(self._module)
        try:
            yield
        finally:
            HiddenTensors.listing = before

    def _hide_but(self, held: Mapping[str, nn.Module]) -> None:
        self.show()
        hidden: dict[tuple[nn.Module, str], dict[str, str]] = {}
        for part, owners in self._owners.items():
            if owners.isdisjoint(held):
                for table, name, _ in _tensors(part):
                    hidden.setdefault((part, table), {})[name] = self._refusal(self._paths[part], name)
        for part, table, name, owners in self._aliases:
            if owners.isdisjoint(held):
                hidden.setdefault((part, table), {})[name] = self._refusal(self._names[part], name)
        for (part, table), names_there in hidden.items():
            vars(part)[table] = HiddenTensors(vars(part)[table], names_there)
        self._register_unnamed(held)

    def share_trained(self) -> None:
        """Let hidden weights be frozen or trained as on the ranks that run them. Collective over the pipeline.

        A hook that freezes layers reaches on each rank what that has, and who counts the trained ones, or writes
        them, counts those of all ranks.
        """
        own: dict[str, bool] = {}
        hidden: dict[str, nn.Parameter] = {}
        for part, path in self._names.items():
            table = vars(part).get("_parameters", {})
            whole = table.whole if isinstance(table, HiddenTensors) else table
            for name, weight in whole.items():
                full_name = ".".join(filter(None, (path, name)))
                if isinstance(table, HiddenTensors) and name in table.hidden:
                    hidden[full_name] = weight
                elif weight is not None:
                    own[full_name] = weight.requires_grad
        group = self._pipeline.mpu().get_pipe_parallel_group()  # type: ignore[operator]
        trained = {name: flag for of_rank in gather_objects(own, group) for name, flag in of_rank.items()}
        for name, weight in hidden.items():
            if name in trained:
                weight.requires_grad_(trained[name])

    def show(self) -> None:
        """Show everything, also what other ranks train."""
        for part in {*self._owners, *(part for part, *_ in self._aliases)}:
            for table in TABLES:
                if isinstance(vars(part).get(table), HiddenTensors):
                    vars(part)[table] = vars(part)[table].whole

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Show everything meanwhile, and hide afterwards what this rank does not run then."""
        if self._is_lifted:
            yield
            return
        try:
            self.show()
            self._is_lifted = True
            yield
        finally:
            self._is_lifted = False
            self.hide()

    def _refusal(self, path: str, name: str) -> str:
        return self.sentence.format(name=".".join(filter(None, (path, name))))

    def _register_unnamed(self, held: Mapping[str, nn.Module]) -> None:
        """Let the layers without a name of the user be parameters of the LightningModule all the same."""
        self._module._modules.pop(PIPELINE, None)
        here = {name: held[name] for name in self._unnamed if name in held}
        if not here:
            return
        child = nn.Module()
        tied = nn.ModuleDict()
        for name, layer in here.items():
            kind, _, key = name.rpartition(".")
            (tied if kind else child).add_module(key, layer)
        if tied:
            child.add_module("tied_modules", tied)
        self._module._modules[PIPELINE] = child


def _tensors(part: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """A module's own tensors, each with its table and its name there."""
    for table in TABLES:
        # A scripted module has no such tables.
        for name, tensor in vars(part).get(table, {}).items():
            if isinstance(tensor, Tensor):
                yield table, name, tensor

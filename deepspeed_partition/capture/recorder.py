"""One run of a model's own ``forward`` on tensors without data, written down as a tree of calls.

The tree has the modules that were called, and in each of them the torch functions and the modules that its code
called. Values are told apart by the identity of the tensors. Nothing is computed and no weight is read, so a model
may be larger than the device. What the code decides by the data of a tensor cannot be followed: the module where
that happens is run once, alone, on real tensors, and stays whole.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import itertools
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from deepspeed_partition.capture.alone import AloneRun, LeftTensors, run_alone
from deepspeed_partition.capture.casts import OpenCasts, casts_now
from deepspeed_partition.capture.decisions import Overwritten, Undecided, hang, must_be, must_give, must_stay
from deepspeed_partition.capture.draws import Draws
from deepspeed_partition.capture.gradients_within import RUN_BACKWARD, TAKE_GRADIENTS, ends_of, holds_all_between
from deepspeed_partition.capture.left_behind import Held, Left, held_by
from deepspeed_partition.capture.noted_graph import asked_by_torch, noted
from deepspeed_partition.capture.recording import (
    Attribute,
    AttributeSet,
    Call,
    Device,
    Effects,
    InPlace,
    Recording,
    Ref,
    SizeOf,
    Template,
    Value,
    is_within,
)
from deepspeed_partition.capture.shown_texts import only_shows
from deepspeed_partition.capture.sizes import Condition, CountedRange, Dimension, Shape, Size, number_of, size
from deepspeed_partition.capture.source_lines import line_of, model_frame, model_line
from deepspeed_partition.capture.structure import build, flatten, holds_tensors, plain_leaves
from deepspeed_partition.capture.weights_without_data import State, WeightsWithoutData, storage_of
from deepspeed_partition.capture.without_data import hidden_functions, written_by
from deepspeed_partition.tensor_values import has_memory

BYTES_PER_OPERATION = 0.05
"""How many bytes a device moves in the time of one multiplication or addition, about."""


LARGEST_FROM_SIZES = 2**20
"""Bytes of a tensor up to which the recording computes it, where it is made from sizes alone."""


MADE_OF_NUMBERS = (torch.arange, torch.tensor)
"""Functions that make a tensor of numbers alone, such as sizes; not those whose tensors code fills with data."""


class CaptureError(ValueError):
    """A model whose calls cannot be written down; the message says where and what to do."""


class DrawsApartError(CaptureError):
    """A model whose own code draws random numbers outside of its modules, which no layer draws again."""


class _UsesAnothers(Exception):
    """A module that runs alone uses a weight of another one, and one around both can run alone."""


@contextmanager
def patched(owner: Any, name: str, new: Any) -> Iterator[None]:
    old = vars(owner)[name]  # not getattr(), which binds class methods
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


class _Watch(TorchDispatchMode):
    """Notes what operations do below the torch functions."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._tape.saw(func, args, kwargs or {}, out)
        return out


class _Functions(TorchFunctionMode):
    """Writes down the torch functions that the model's code calls."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._tape.function(func, args, kwargs or {})


SETS_ONCE = (
    "its forward() changes the weight {weight} and notes that in the attribute {flag}; written down, it would "
    "change it in every call: note it in a buffer, as in self.register_buffer('ready', torch.tensor(0))"
)
HANGS_ON_WEIGHT = (
    "its forward() registers a hook on the gradient of the weight {weight}, one more in each run: register it "
    "once, where the model is made"
)
LEFT_ALONE = (
    "{owner} decides by data, and so runs whole, and leaves {what} beside what it returns, which the model's own "
    "code reads{where}: let its forward() return that, too"
)
USES_ANOTHERS = (
    "{} decides by data, and so runs whole, and uses {}, which is another module's ({}), and may be on another "
    "rank: let a module of both use it, or give it as an argument"
)
_HANG_HOOKS = (
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
)
SEEDING = [
    (owner, name)
    for owner in (torch, torch.random, torch.cuda, torch.cuda.random)
    for kind in ("fork_rng", "manual_seed", "seed", "set_rng_state")
    for name in (kind, f"{kind}_all")
    if name in vars(owner)
]
OF_HOSTS = ("training", "forward")
"""Attributes that hosts set on modules, too."""
_SHAPE: Any = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_GRAD_FN: Any = torch.Tensor.grad_fn.__get__  # type: ignore[union-attr]
_SIZE = torch.Tensor.size
_STRIDE, _LENGTH = torch.Tensor.stride, torch.Tensor.__len__
_NUMBERS_OF = frozenset((
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__bool__,
    torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.__complex__,
    torch.Tensor.__contains__, torch.Tensor.equal, torch.Tensor.allclose, torch.Tensor.is_nonzero, torch.equal,
    torch.allclose, torch.is_nonzero,
))  # fmt: skip
"""What takes plain numbers out of tensors."""
_NUMEL = (torch.Tensor.numel, torch.Tensor.nelement, torch.numel)


class Tape:
    """What was called so far."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        state: State,
        call: Callable[..., Any] | None,
        decisions: Sequence[bool] = (),
        computes: tuple[Any, ...] = MADE_OF_NUMBERS,
        held: Held | None = None,
    ) -> None:
        self.decisions, self._num_decisions = decisions, 0
        self._computes, self._held = computes, Held({}) if held is None else held
        self._computed: set[int] = set()
        self.model, self.device, self.state = model, device, state
        self.call = call or model
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.weights = WeightsWithoutData(model, device, state, self.fake)
        self.values: list[Value] = []
        self._kept: list[Any] = []  # as long as they live, no other object has their number
        self._value_of: dict[int, int] = {}
        self._time = itertools.count()
        self._scopes: list[Call] = []
        self._inside = 0
        self._effects = Effects()
        self._known_storages: set[int] = set()
        self._modules = dict(model.named_modules())
        self._path_of = {id(module): name for name, module in self._modules.items()}
        self._module_names = dict(self._path_of)
        """Those whose calls are modules of their own; in the end the model's is not."""
        self._outer_context = _state()
        self._random_units: set[int] = set()
        self._region = 0
        self._casts = OpenCasts()
        self.draws = Draws(model)
        self._of_data: set[int] = set()
        """The values that are not made of sizes and buffers alone."""
        self._of_sizes: set[int] = set()
        """The values that functions were given numbers for that are made from sizes."""
        self._sets: dict[tuple[str, str], AttributeSet] = {}
        self._left: dict[int, str] = {}
        """The values that another run has left behind, and what each is called."""
        self._filled: list[tuple[Left, Any]] = []
        """What another run has filled, and what was there when it was last looked at."""
        self._filled_by: dict[str, Call] = {}
        self._in_place: dict[str, InPlace] = {}
        """The tensors of the program, by what they are called, that are neither weights nor buffers."""
        self._left_alone = LeftTensors()
        self._left_numbers: list[tuple[Call, str, str]] = []
        self._set_alone: set[tuple[int, str]] | None = None
        """Where a module that runs alone sets numbers and texts: the number of the owner, and the attribute."""
        self._closing: Call | None = None

    # What another run has left behind

    def begin_with(self, left: Sequence[Left]) -> None:
        """Let containers and variables hold what another run has left there, which is then told from all else."""
        for each in left:
            names = {id(leaf): name for name, value in each.members.items() for leaf in flatten(value)[0]}
            each.put_in(functools.partial(self._stand_in, names))
        self._filled = [(each, each.now) for each in left]

    def _note_fills(self) -> None:
        """Note that the code that runs has filled what another run has filled, too."""
        for place, (each, before) in enumerate(self._filled):
            if each.now != before:
                self._filled_by.setdefault(each.written, self._scopes[-1])
                self._filled[place] = each, each.now

    def _stand_in(self, names: Mapping[int, str], value: Any) -> Any:
        leaves, structure = flatten(value)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, FakeTensor):
                leaves[place] = self.input(leaf)
                self._left[self._value_of[id(leaves[place])]] = names.get(id(leaf), "")
        return build(structure, leaves) if any(isinstance(leaf, FakeTensor) for leaf in leaves) else value

    def is_of_batch(self, left: Left) -> bool:
        """Whether what a run has left is made of a batch, or a number."""
        leaves = [leaf for member in left.members.values() for leaf in flatten(member)[0]]
        values = (self._value_of.get(id(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor))
        return any(type(leaf) in (int, float) for leaf in leaves) or not self._of_data.isdisjoint(values)

    def input(self, tensor: torch.Tensor) -> Any:
        """A tensor without data, in the place of an argument."""
        with torch.no_grad(), self.fake:
            dtype = self.state.changed.get(tensor.dtype, tensor.dtype)
            fake = torch.empty(tensor.shape, dtype=dtype, device=self.device)
        if tensor.requires_grad:
            fake.requires_grad_(True)
        self._of_data.add(self._value(fake, time=-1))
        return fake

    # Values

    def _value(self, tensor: torch.Tensor, time: int | None = None) -> int:
        number = self._value_of.get(id(tensor))
        if number is not None:
            return number
        with torch._C.DisableTorchFunction():
            dense = tensor.layout is torch.strided
            storage = storage_of(tensor) if dense else -id(tensor)
            self.values.append(
                Value(
                    tuple(map(int, tensor.shape)),
                    tensor.dtype,
                    tensor.numel() * tensor.element_size(),
                    tensor.requires_grad,
                    storage,
                    next(self._time) if time is None else time,
                    tuple(scope.time for scope in self._scopes) if time != -1 else (),
                    dense,
                )
            )
        self._known_storages.add(storage)
        self._kept.append(tensor)
        self._value_of[id(tensor)] = len(self.values) - 1
        return len(self.values) - 1

    def template(self, value: Any, *, time: int | None = None) -> Template:
        leaves, structure = flatten(value)
        return Template(structure, tuple(self._leaf(leaf, time) for leaf in leaves))

    def _leaf(self, leaf: Any, time: int | None) -> Any:
        if isinstance(leaf, torch.Tensor):
            name = self.weights.name_of(leaf)
            if name is not None:
                return Attribute(name)
            if id(leaf) in self._value_of:
                return Ref(self._value_of[id(leaf)])
            if not isinstance(leaf, FakeTensor) and id(leaf) not in self._computed:
                self._reads_left(leaf)
                self._kept.append(leaf)
                return leaf  # a constant of the model that is neither parameter nor buffer
            if time is None:
                self._whole("a tensor is made by code that torch does not show")
            return Ref(self._value(leaf, time))
        if isinstance(leaf, Size):
            return SizeOf(leaf.expression)
        if isinstance(leaf, torch.device) and leaf == self.device:
            return Device()
        if isinstance(leaf, torch.Generator) and not self._held.has(leaf):
            self._seeds("torch.Generator()")
        if isinstance(leaf, types.FunctionType | functools.partial) and _closes_over_tensors(leaf):
            self._whole("a function is handed on that holds tensors")
        return leaf

    def _whole(self, reason: str) -> None:
        for scope in self._scopes[-1:]:
            scope.why_whole = scope.why_whole or f"{reason} ({model_line()})"

    def _seeds(self, function: str) -> None:
        """Note that code sets the state of torch's generators: a layer would not do so again."""
        for scope in self._scopes[-1:] if not self._is_steps() else ():
            scope.seeds = scope.seeds or f"{function} ({model_line()})"
            self._whole(f"its code sets the state of random generators by {function}")

    def _is_steps(self) -> bool:
        """Whether a step's own code runs, which the host runs itself around the layers."""
        is_step = self.call is not self.model or getattr(self.model.forward, "ends_in_a_loss", False)
        return is_step and len(self._scopes) == 1

    def _note(self, expression: Any, outcome: Any) -> None:
        if self._scopes and not self._inside:
            self._scopes[-1].conditions.append(Condition(expression, outcome, model_line()))

    # Functions

    def function(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._inside or not self._scopes:
            return func(*args, **kwargs)
        if torch._C._functorch.maybe_current_level() is not None:
            self._whole("a function is transformed")
            return func(*args, **kwargs)
        sizes = self._sizes(func, args, kwargs)
        if sizes is not None:
            return sizes
        if func in TAKE_GRADIENTS:
            self._takes_gradients(func.__name__, *args, **kwargs)
        given_leaves, structure = flatten((args, kwargs))
        if func is torch.Tensor.__bool__ and (known := self._decided(args[0])) is not None:
            return known
        if func == _GRAD_FN or func in _HANG_HOOKS:
            asked_by = asked_by_torch()
            if asked_by:
                self._uses_graph(f"{asked_by}()")
            if func == _GRAD_FN:
                node = func(*args, **kwargs)
                return noted(node, self._uses_graph) if asked_by is None else node
        given = Template(structure, tuple(self._leaf(leaf, None) for leaf in given_leaves))
        plain_args, plain_kwargs = build(structure, map(number_of, given_leaves))
        outer, self._effects = self._effects, Effects()
        self._inside += 1
        try:
            with unset_fake_temporarily() if self._is_known(func, given_leaves) else nullcontext():
                out = func(*plain_args, **plain_kwargs)
            out = self._with_data(func, plain_args, plain_kwargs, out)
        finally:
            self._inside -= 1
            effects, self._effects = self._effects, outer
        self._note_gradients(given_leaves)
        if func in _NUMBERS_OF:
            self._verify_number(func, given, out)
        if func in _HANG_HOOKS:
            self._hook_hung(func, given)
        else:
            self._function_called(func, given, effects, out)
        return out

    def _hook_hung(self, func: Any, given: Template) -> None:
        """Write down that code hangs a hook on a tensor, which the layer that makes it does in each run."""
        tensor = given.leaves[0]
        if isinstance(tensor, Attribute) and func is not torch.Tensor.retain_grad and not self._is_steps():
            self._whole(HANGS_ON_WEIGHT.format(weight=tensor.name))
        if isinstance(tensor, Ref):
            self._add(functools.partial(hang, func), given, hangs_hook=True)

    def _note_gradients(self, given: Sequence[Any]) -> None:
        """Note which tensors need a gradient since something was added to them that does."""
        for leaf in given:
            number = self._value_of.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None
            if number is not None:
                self.values[number].requires_grad |= leaf.requires_grad

    # Tensors that are made from sizes alone: positions, and what is computed of them

    def _with_data(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """What a function returns, with its data where it was given numbers and tensors made from sizes alone.

        A model's code may ask such a tensor, as for positions of which none begins a sequence anew. The answer
        holds for these sizes; the layers verify it.
        """
        if not self._computes:
            return out
        given = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        from_sizes = func in self._computes or bool(given)
        from_sizes = from_sizes and all(id(leaf) in self._computed for leaf in given) and not self._effects.random
        overwritten = {storage_of(leaf) for leaf in given if id(leaf) in self._computed} & self._effects.mutated
        if not from_sizes:
            if overwritten:
                raise Overwritten
            return out
        returned = flatten(out)[0]
        if not overwritten and not (returned and all(map(_is_small_and_exact, returned))):
            return out
        effects, self._effects = self._effects, Effects()
        try:
            with unset_fake_temporarily(), torch.no_grad():
                real = func(*args, **kwargs)
        finally:
            self._effects = effects
        for leaf in flatten(real)[0]:
            self._computed.add(id(leaf))
            self._kept.append(leaf)
        return real

    def _function_called(self, func: Any, given: Template, effects: Effects, out: Any) -> None:
        leaves, _ = flatten(out)
        self.weights.written |= effects.mutated & self.weights.of_storage.keys()
        mutated = set(effects.mutated)
        effects.mutated &= self._known_storages | self.weights.of_storage.keys()
        if not effects.mutated and not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            if mutated:
                self._note_in_place(Call(0, (), func, given), mutated)
            return
        call = Call(next(self._time), self._numbers(), func, given, effects=effects, context=self._context())
        self._note_in_place(call, mutated)
        call.returned = self.template(out, time=call.time)
        call.end, call.where, call.in_checkpoint = call.time, model_line(), bool(self._region)
        if effects.random or any(map(self._is_of_data, _with_values(func, given.leaves))):
            self._of_data.update(call.returned.refs())
        if any(isinstance(leaf, SizeOf) for leaf in given.leaves) or not self._of_sizes.isdisjoint(given.refs()):
            self._of_sizes.update(call.returned.refs())
        if getattr(func, "__name__", "") in ("lt", "__lt__"):
            self._remember_comparison(given, call.returned)
        self._scopes[-1].calls.append(call)

    def _note_in_place(self, call: Call, mutated: set[int]) -> None:
        """Note which tensors of the program code changes that are neither weights nor buffers."""
        for leaf in call.given.leaves:
            has_one = isinstance(leaf, torch.Tensor) and has_memory(leaf)
            shown = self._held.of_storage.get(storage_of(leaf)) if has_one else None
            if shown is not None:
                memories = self._in_place.setdefault(shown, InPlace(set())).memories
                self._inside += 1  # what follows is no call of the model's
                self._kept.append(self.fake.from_tensor(leaf))
                self._inside -= 1
                memories.update((storage_of(leaf), storage_of(self._kept[-1])))
        for each in self._in_place.values() if mutated else ():
            if not mutated.isdisjoint(each.memories):
                each.scopes.append(self._scopes[-1])
                each.calls.append(call)

    def _is_of_data(self, leaf: Any) -> bool:
        """Whether a leaf of a template is a weight, or a tensor that is not made of sizes and buffers alone."""
        if isinstance(leaf, Attribute):
            return isinstance(self.weights.by_name[leaf.name], nn.Parameter)
        return isinstance(leaf, Ref) and leaf.value in self._of_data

    def _attribute_set(self, module: nn.Module, name: str, value: Any) -> None:
        """Note an attribute in which code may keep something for its next run."""
        owner = self._path_of.get(id(module))
        if self._set_alone is not None:
            if owner is not None and name not in OF_HOSTS and plain_leaves(value):
                self._set_alone.add((id(module), name))
            return
        if self._inside or not self._scopes or owner is None or name in OF_HOSTS:
            return
        before = vars(module).get(name)
        is_number = type(value) in (int, float) and type(before) in (int, float) and value != before
        values = (self._value_of.get(id(leaf)) for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor))
        if is_number or not self._of_data.isdisjoint(values):
            self._sets[owner, name] = AttributeSet(self._scopes[-1], value, model_line())

    def _numbers(self) -> tuple[int, ...]:
        return tuple(scope.time for scope in self._scopes)

    def _sizes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a question for sizes is answered, with their origin; None for other functions."""
        if func == _SHAPE or func is _SIZE:
            kind = "shape"
        elif func is _STRIDE:
            kind = "stride"
        elif func in _NUMEL or func is _LENGTH:
            kind = "numel" if func in _NUMEL else "shape"
        else:
            return None
        tensor = args[0]
        number = self._value_of.get(id(tensor)) if isinstance(tensor, torch.Tensor) else None
        if number is None:
            return None
        where = args[1] if len(args) > 1 else kwargs.get("dim")
        with torch._C.DisableTorchFunction():
            all_sizes = tuple(map(int, torch.Tensor.stride(tensor) if kind == "stride" else tensor.shape))
            total = tensor.numel()

        def at(place: int) -> Size:
            return size(all_sizes[place], Dimension(number, kind, place), self._note)

        if kind == "numel":
            return size(total, Dimension(number, kind, 0), self._note)
        if func is _LENGTH:
            return int(at(0))
        if where is not None:
            return at(int(number_of(where)) % len(all_sizes))
        return Shape(at(place) for place in range(len(all_sizes)))

    # torch.rand([]) < 0.0, by which models skip layers at random, is false without knowing the number

    def _remember_comparison(self, given: Template, returned: Template) -> None:
        leaves = [leaf for leaf in given.leaves if leaf is not None]
        if (
            len(leaves) == 2
            and isinstance(leaves[0], Ref)
            and isinstance(leaves[1], int | float)
            and leaves[1] <= 0
        ):
            made_by = next(
                (call for call in reversed(self._scopes[-1].calls) if leaves[0].value in _made(call)), None
            )
            if made_by is not None and made_by.target is torch.rand:
                self._random_units.update(returned.refs())

    def _decided(self, tensor: torch.Tensor) -> bool | None:
        """Whether a tensor is true, where that is known or supposed; None where a module decides by it."""
        number = self._value_of.get(id(tensor))
        if number in self._random_units:
            return False
        if id(tensor) in self._computed:
            with unset_fake_temporarily(), torch._C.DisableTorchFunction():
                outcome = bool(tensor)
            self._verify(must_stay, outcome, tensor)
            return outcome
        if len(self._scopes) > 1 or number is None:
            return None
        place, self._num_decisions = self._num_decisions, self._num_decisions + 1
        if place >= len(self.decisions):
            raise Undecided(f"whether a tensor is true is not known without its data ({model_line()})")
        outcome = self.decisions[place]
        self._verify(must_be, outcome, tensor)
        return outcome

    def _is_known(self, func: Any, given: Sequence[Any]) -> bool:
        """Whether a function takes numbers out of tensors that the recording has computed."""
        tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
        return func in _NUMBERS_OF and bool(tensors) and all(id(leaf) in self._computed for leaf in tensors)

    def _verify_number(self, func: Any, given: Template, out: Any) -> None:
        """Let layers verify a number that code takes out of a tensor that is made from sizes."""
        if not self._of_sizes.isdisjoint(given.refs()) and not only_shows(model_frame()):
            verify = functools.partial(must_give, func, out, model_line())
            self._add(verify, given, effects=Effects(verifies=True))

    def _verify(self, verify: Callable[..., None], outcome: bool, tensor: torch.Tensor) -> None:
        given = self.template(((outcome, tensor, model_line()), {}))
        self._add(verify, given, effects=Effects(verifies=True))

    def _add(self, target: Any, given: Template, **more: Any) -> None:
        """Write down a call of ours, which returns nothing."""
        call = Call(next(self._time), self._numbers(), target, given, self.template(None), **more)
        call.end, call.where = call.time, model_line()
        self._scopes[-1].calls.append(call)

    # Operations below

    def saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        effects = self._effects
        if torch.Tag.nondeterministic_seeded in func.tags:
            effects.random = True
        written = written_by(func, args, kwargs)
        effects.mutated |= {storage_of(tensor) for tensor in written if tensor.layout is torch.strided}
        outs = out if isinstance(out, list | tuple) else [out]
        moved = [each for each in outs if isinstance(each, torch.Tensor)]
        packet = getattr(func, "_overloadpacket", None)
        if packet in flop_registry:
            moved += [each for each in args if isinstance(each, torch.Tensor)]  # weights are read, too
        effects.work += sum(each.numel() * each.element_size() for each in moved) / BYTES_PER_OPERATION
        if packet in flop_registry:
            with suppress(Exception):
                effects.work += flop_registry[packet](*args, **kwargs, out_val=out)
        if not self._inside and self._scopes:
            for tensor in outs:
                known = isinstance(tensor, torch.Tensor) and (
                    id(tensor) in self._value_of or self.weights.name_of(tensor) is not None
                )
                if isinstance(tensor, FakeTensor) and not known:
                    self._of_data.add(self._value(tensor))
                    self._whole("an operation is called in a way that torch does not show")

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that autograd keeps for the backward."""
        with torch._C.DisableTorchFunction():
            if tensor.layout is torch.strided and storage_of(tensor) not in self.weights.of_storage:
                self._effects.kept[storage_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def _context(self) -> tuple[Any, ...]:
        now, outer = _state(), self._outer_context
        if now == outer:
            return ()
        return now[0], self._casts.since(outer[1], self.device)

    # Modules

    def module(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        name = self._module_names.get(id(module))
        if self._inside or not self._scopes or name is None:
            return call(module, *args, **kwargs)
        scope = self.opened(name, args, kwargs)
        self._note_draws()
        self._note_fills()
        recomputes_itself = type(module).__call__ is not nn.Module.__call__
        scope.recomputed, self._region = bool(self._region) and not recomputes_itself, 0
        self._scopes[-1].calls.append(scope)
        region = scope.recomputed
        self._scopes.append(scope)
        try:
            out = self._without_data(scope, module, call(module, *args, **kwargs))
            self._note_draws()
        except CaptureError:
            raise
        except Exception as error:
            out = self._run_alone(scope, module, args, kwargs, error)
            self.draws.forget()
        finally:
            self._note_fills()
            self._scopes.pop()
            self._region = int(region)
        return self.closed(scope, out)

    def _note_draws(self, ended: types.CodeType | None = None) -> None:
        """Note whether the code of the module that runs, or has come to its end, has drawn numbers."""
        drawn = self.draws.since_last(ended)
        if drawn is not None:
            self._scopes[-1].drawn = self._scopes[-1].drawn or drawn

    def opened(self, name: str, args: Any, kwargs: Any) -> Call:
        leaves, structure = flatten((args, kwargs))
        given = Template(structure, tuple(self._leaf(leaf, None) for leaf in leaves))
        scope = Call(next(self._time), self._numbers(), name, given, is_module=True, context=self._context())
        scope.where, scope.module_type = model_line(), type(self._modules[name]).__name__
        scope.objects = [leaf for leaf in given.leaves if not isinstance(leaf, _PLAIN)]
        self._look_into(scope)
        return scope

    def _look_into(self, scope: Call) -> None:
        """Note whether a module was given an object that holds tensors, or that it has put tensors into."""
        if any(_is_opaque(leaf) for leaf in scope.objects):
            scope.why_open = "it is given an object that holds tensors"

    def closed(self, scope: Call, out: Any) -> Any:
        """Note what a module returned, and return it; sizes among it are then known as its own."""
        for call in scope.calls:
            scope.effects.add(call.effects)
        scope.end = next(self._time)
        self._look_into(scope)
        scope.objects = []
        leaves, structure = flatten(out)
        self._closing = scope
        scope.returned = Template(structure, tuple(self._leaf(leaf, None) for leaf in leaves))
        self._closing = None
        if any(_is_opaque(leaf) for leaf in scope.returned.leaves):
            scope.why_open = "it returns an object that holds tensors"
        return out

    def _run_alone(self, scope: Call, module: nn.Module, args: Any, kwargs: Any, error: Exception) -> Any:
        """The output of a module that cannot run without data, from one run on data of our own."""
        if not scope.target:  # the model itself
            raise error
        line = line_of(error)
        leaves, _ = flatten((args, kwargs))
        self._set_alone = set()
        try:
            with unset_fake_temporarily():
                run = run_alone(module, args, kwargs, self.weights, self.device, self._reads_left)
                run.numbers |= self._set_alone
        except CaptureError:
            raise
        except Exception:
            raise error from None
        finally:
            self._set_alone = None
        result = run.result
        if _holds_packed(result):  # no layer can send it: as many rows as data say
            raise error
        scope.calls.clear()
        scope.conditions.clear()
        why = _WHY_WHOLE.get(type(error), f"{type(error).__name__} without data")
        scope.why_whole = f"{why} at {line}" if line else why
        scope.effects.random = True
        outs, out_structure = flatten(result)
        wants = any(parameter.requires_grad for parameter in module.parameters()) or any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves
        )
        scope.effects.work += sum(p.numel() for p in module.parameters()) * max(
            (
                leaf.numel() // max(leaf.shape[-1], 1)
                for leaf in run.given
                if isinstance(leaf, torch.Tensor) and leaf.dim()
            ),
            default=1,
        )
        changed = {
            id(now): leaf
            for now, leaf, is_changed in zip(run.given, leaves, run.is_changed, strict=True)
            if is_changed
        }
        if not self._computed.isdisjoint(map(id, changed.values())):
            raise Overwritten
        scope.effects.mutated |= {storage_of(leaf) for leaf in changed.values()} | run.buffers
        self._note_left(scope, run)
        fakes = []
        self._inside += 1  # what follows is no call of the model's
        outer, self._effects = self._effects, Effects()
        try:
            with self.fake, torch._C.DisableTorchFunction():
                for leaf in changed.values():  # so that its version tells, and a gradient goes through it
                    leaf.add_(torch.zeros((), dtype=leaf.dtype, requires_grad=wants and leaf.is_floating_point()))
                for leaf in outs:
                    if id(leaf) in changed:
                        leaf = changed[id(leaf)]
                    elif isinstance(leaf, torch.Tensor):
                        leaf = self._stand_in_of(leaf, wants)
                    fakes.append(leaf)
        finally:
            self._inside -= 1
            self._effects = outer
        return build(out_structure, fakes)

    def _stand_in_of(self, tensor: torch.Tensor, wants: bool) -> Any:
        """A tensor without data for one that a module has made of data."""
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        if wants and tensor.is_floating_point():
            fake = fake.requires_grad_(True).clone()
        self._of_data.add(self._value(fake))
        return fake

    def _without_data(self, scope: Call, module: nn.Module, out: Any) -> Any:
        """What a module returns, without the data of what modules within it have left when they ran alone."""
        leaves, structure = flatten(out)
        left = [isinstance(leaf, torch.Tensor) and self._left_alone.owner_of(leaf) is not None for leaf in leaves]
        if not any(left):
            return out
        wants = any(parameter.requires_grad for parameter in module.parameters())
        self._inside += 1
        outer, self._effects = self._effects, Effects()
        try:
            for place, leaf in enumerate(leaves):
                if left[place]:
                    self._reads_left(leaf)
                    with self.fake, torch._C.DisableTorchFunction():
                        leaves[place] = self._stand_in_of(leaf, wants)
        finally:
            self._inside -= 1
            self._effects = outer
        return build(structure, leaves)

    def _note_left(self, scope: Call, run: AloneRun) -> None:
        """Note what a module that ran alone has left beside its result, instead of what was noted within it."""
        for tensor in run.made_of_data:
            self._left_alone.add(tensor, scope)
        for tensor in run.made_anew:
            self._left_alone.add(tensor, scope, is_made_anew=True)
        self._left_numbers = [each for each in self._left_numbers if scope.time not in each[0].scopes]
        numbers = ((self._path_of.get(owner), name) for owner, name in run.numbers)
        self._left_numbers += [(scope, *each) for each in sorted((path, name) for path, name in numbers if path)]
        for each in self._in_place.values():
            kept = [place for place, by in enumerate(each.scopes) if not is_within(by, scope)]
            each.scopes = [each.scopes[place] for place in kept]
            each.calls = [each.calls[place] for place in kept]
        for tensor in run.in_place:
            shown = self._held.of_storage.get(storage_of(tensor))
            if shown is not None:
                changed = self._in_place.setdefault(shown, InPlace(set()))
                changed.memories.add(storage_of(tensor))
                changed.scopes.append(scope)
                changed.calls.append(scope)

    def _reads_left(self, tensor: torch.Tensor) -> None:
        """Let a module stay whole that reads what one within it has left when it ran alone.

        Raises:
            CaptureError: other code reads it, or a module that runs alone a weight or a buffer of another one.
        """
        scopes = [*self._scopes, *([] if self._closing is None else [self._closing])]
        if self._set_alone is not None and isinstance(tensor, FakeTensor):
            if (name := self.weights.name_of(tensor)) is not None:
                if any(name.startswith(f"{scope.target}.") for scope in scopes[1:-1]):
                    raise _UsesAnothers(name)  # one around both runs alone
                raise CaptureError(USES_ANOTHERS.format(scopes[-1].target, name, model_line()))
            return
        left = self._left_alone.owner_of(tensor)
        if left is None or (self._set_alone is not None and self._left_alone.is_made_anew(tensor)):
            return
        owner = left.target
        for scope in reversed(scopes[1:]):
            if is_within(left, scope):
                if scope is not left:
                    scope.why_whole = scope.why_whole or f"its code reads what {owner} leaves ({model_line()})"
                return
        raise CaptureError(LEFT_ALONE.format(owner=owner, what="a tensor", where=f" ({model_line()})"))

    # The run

    def _noting_seeds(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            self._seeds(f"{name}()")
            return function(*args, **kwargs)

        return noting

    def _takes_gradients(self, function: str, *args: Any, **kwargs: Any) -> None:
        """Note that code takes gradients: across a boundary a layer has a part of the graph alone.

        A module around all of it that they go through stays whole.
        """
        if self._inside or not self._scopes or self._is_steps():
            return
        outputs, inputs = ends_of(function, *args, **kwargs)
        for scope in reversed(self._scopes):
            scope.why_whole = scope.why_whole or f"its code takes gradients by {function}() ({model_line()})"
            if scope.target and holds_all_between(
                scope, outputs, inputs, self.values, lambda each: self._value_of.get(id(each)),
                lambda each: self.weights.name_of(each) is not None,
            ):  # fmt: skip
                break

    def _uses_graph(self, function: str) -> None:
        """Note that code registers hooks on a graph: what is written down would not do so again."""
        if not self._inside and not self._is_steps():
            self._whole(f"its code registers hooks on the graph by {function}")

    @contextmanager
    def recording(self) -> Iterator[None]:
        call = nn.Module.__call__

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.module(call, module, args, kwargs)

        def region(*_: Any, **__: Any) -> Iterator[None]:
            self._region += 1
            yield
            self._region = max(0, self._region - 1)

        class Reentrant:
            @staticmethod
            def apply(function: Any, preserve: Any, *args: Any) -> Any:
                self._region += 1
                try:
                    return function(*args)
                finally:
                    self._region = max(0, self._region - 1)

        def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside or not self._scopes:
                return _ORIGINAL_APPLY.__func__(cls, *args, **kwargs)
            given = self.template((args, kwargs))
            outer, self._effects = self._effects, Effects()
            self._inside += 1
            try:
                plain, structure = flatten((args, kwargs))
                plain_args, plain_kwargs = build(structure, map(number_of, plain))
                with hidden_functions():
                    out = _ORIGINAL_APPLY.__func__(cls, *plain_args, **plain_kwargs)
            finally:
                self._inside -= 1
                effects, self._effects = self._effects, outer
            self._function_called(functools.partial(_apply, cls), given, effects, out)
            return out

        call_script = torch._C.ScriptFunction.__call__
        call_method = torch._C.ScriptMethod.__call__

        def scripted(function: Any, *args: Any, **kwargs: Any) -> Any:
            # What is compiled detaches its inputs for a backward of its own, and calls operations one by one.
            if self._inside or not self._scopes:
                return call_script(function, *args, **kwargs)
            return self.function(function, args, kwargs)

        def scripted_method(method: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._inside:
                self._whole("its code is compiled by TorchScript")
            return call_method(method, *args, **kwargs)

        set_attribute = nn.Module.__setattr__

        def set_noted(module: nn.Module, name: str, value: Any) -> None:
            self._attribute_set(module, name, value)
            set_attribute(module, name, value)

        run_backward: Any = getattr(torch.autograd, RUN_BACKWARD, None)

        def taken(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._takes_gradients("backward", outputs, inputs=kwargs.get("inputs", args[3:4]))
            return run_backward(outputs, *args, **kwargs)

        enter = saved_tensors_hooks.__enter__

        def entered(hooks: saved_tensors_hooks) -> None:
            if not _is_checkpoints(hooks):
                self._uses_graph(f"{type(hooks).__name__}()")
            enter(hooks)

        length = builtins.len

        def length_of(value: Any) -> Any:
            """Let ``len(x)`` be the same number as ``x.shape[0]``, which Python would make a plain one."""
            if isinstance(value, torch.Tensor) and self._scopes and not self._inside and value.dim():
                known = self._sizes(_SIZE, (value, 0), {})
                if known is not None:
                    return known
            return length(value)

        with ExitStack() as stack:
            for owner, name in SEEDING:
                stack.enter_context(patched(owner, name, self._noting_seeds(name, getattr(owner, name))))
            stack.enter_context(patched(builtins, "len", length_of))
            stack.enter_context(patched(builtins, "range", CountedRange))
            stack.enter_context(self._casts.noted())
            if run_backward is not None:
                stack.enter_context(patched(torch.autograd, RUN_BACKWARD, taken))
            stack.enter_context(patched(nn.Module, "__call__", called))
            stack.enter_context(patched(nn.Module, "__setattr__", set_noted))
            stack.enter_context(patched(torch._C.ScriptFunction, "__call__", scripted))
            stack.enter_context(patched(torch._C.ScriptMethod, "__call__", scripted_method))
            if hasattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator"):
                stack.enter_context(
                    patched(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", region)
                )
            stack.enter_context(patched(torch.utils.checkpoint, "CheckpointFunction", Reentrant))
            stack.enter_context(patched(torch.autograd.Function, "apply", classmethod(applied)))
            if hasattr(torch.compiler, "set_stance"):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(saved_tensors_hooks(self.keep, lambda tensor: tensor))
            stack.enter_context(patched(saved_tensors_hooks, "__enter__", entered))
            stack.enter_context(self.fake)
            stack.enter_context(_Watch(self))
            stack.enter_context(_Functions(self))
            stack.enter_context(torch.enable_grad())
            yield

    def run(self, args: Any, kwargs: Any) -> Recording:
        leaves, structure = flatten((args, kwargs))
        inputs = []
        fakes = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                leaf = self.input(leaf)
                inputs.append(self._value_of[id(leaf)])
            fakes.append(leaf)
        fake_args, fake_kwargs = build(structure, fakes)
        root = Call(next(self._time), (), "", self.template((fake_args, fake_kwargs)), is_module=True)
        self._scopes.append(root)
        with self.draws.rewound(), self.recording():
            self._outer_context = _state()
            out = self._with_views_of_weights(self._call_model(fake_args, fake_kwargs))
            # A step may draw behind its last call, what it makes a loss of.
            if not self._is_steps():
                self._note_draws(getattr(inspect.unwrap(self.model.forward), "__code__", None))
        self._note_fills()
        self._scopes.pop()
        self.closed(root, out)
        return Recording(
            root, self.values, inputs, self.weights.of_storage, self.weights.by_name,
            dict(self.model.named_modules()), self.device, self.weights.dtypes,
            self.weights.first_names, self._sets,
            begun_with=self._left, filled_by=self._filled_by, in_place=self._in_place,
            left_numbers=self._left_numbers,
        )  # fmt: skip

    def _with_views_of_weights(self, out: Any) -> Any:
        """What the model returns, with a view in the place of each weight or buffer: a layer can return that."""
        leaves, structure = flatten(out)
        is_weight = [isinstance(leaf, torch.Tensor) and self.weights.name_of(leaf) is not None for leaf in leaves]
        if not any(is_weight) or self._is_steps():
            return out
        return build(
            structure,
            [leaf.view_as(leaf) if each else leaf for leaf, each in zip(leaves, is_weight, strict=True)],
        )

    def _call_model(self, args: Any, kwargs: Any) -> Any:
        self._module_names.pop(id(self.model), None)
        return self.call(*args, **kwargs)


DECIDES = "its code decides by the numbers in a tensor"
_WHY_WHOLE: dict[type[Exception], str] = {
    DataDependentOutputException: DECIDES,
    DynamicOutputShapeException: "the numbers in a tensor give a shape",
}


def _is_small_and_exact(leaf: Any) -> bool:
    """Whether a leaf is a tensor of integers or booleans of a size that is worth computing."""
    if not isinstance(leaf, torch.Tensor) or leaf.dtype.is_floating_point or leaf.dtype.is_complex:
        return False
    with torch._C.DisableTorchFunction():
        return leaf.layout is torch.strided and leaf.untyped_storage().nbytes() <= LARGEST_FROM_SIZES


def _is_checkpoints(hooks: saved_tensors_hooks) -> bool:
    """Whether they are those by which torch's ``checkpoint`` recomputes."""
    return type(hooks).__module__ == torch.utils.checkpoint.__name__


def _apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function.apply(*args, **kwargs)


_ORIGINAL_APPLY: Any = vars(torch.autograd.Function)["apply"]


def _made(call: Call) -> list[int]:
    return call.returned.refs() if call.returned is not None else []


_PLAIN = (Ref, Attribute, SizeOf, Device, torch.Tensor, str, int, float, nn.Module, type, type(None), torch.dtype)


def _holds_packed(value: Any) -> bool:
    """Whether a packed sequence stands among what a module returns."""
    if isinstance(value, nn.utils.rnn.PackedSequence):
        return True
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return any(map(_holds_packed, inner))


def _is_opaque(leaf: Any) -> bool:
    return not isinstance(leaf, _PLAIN) and holds_tensors(leaf)


def _closes_over_tensors(function: types.FunctionType | functools.partial[Any]) -> bool:
    if isinstance(function, functools.partial):
        return any(
            isinstance(each, Size | torch.Tensor)
            or (isinstance(each, types.FunctionType) and _closes_over_tensors(each))
            for each in (function.func, *function.args, *function.keywords.values())
        )
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing is in it yet
            held.append(cell.cell_contents)
    return any(isinstance(each, Size | torch.Tensor) or holds_tensors(each, 2) for each in held)


def _with_values(func: Any, leaves: Sequence[Any]) -> Sequence[Any]:
    """The leaves of a call whose values count, and not their sizes, type or device alone."""
    name = getattr(func, "__name__", "")
    if name.startswith("new_") or name.endswith("_like"):
        return ()
    return leaves[:1] if name in ("expand_as", "reshape_as", "to", "type_as", "view_as") else leaves


def _state() -> tuple[Any, ...]:
    """Whether gradients are on, and autocast by device."""
    return torch.is_grad_enabled(), casts_now()


_RECORDING: list[Tape] = []


def is_recording() -> bool:
    """Whether a model is being recorded now: its code runs for that, and computes nothing."""
    return bool(_RECORDING)


def record(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    state: State | None = None,
    call: Callable[..., Any] | None = None,
    decisions: Sequence[bool] = (),
    left: Sequence[Left] = (),
) -> Recording:
    """Run a model's ``forward`` once without data.

    Args:
        state: The types of weights, where they are others than the model's now.
        call: What is run in the place of the model: a function that calls it, or modules of it.
        decisions: What is supposed where the model's own code asks whether a tensor is true; the layers verify it.
        left: What another run has left behind, and this one begins with.

    Raises:
        Exception: whatever its code raises without data.
    """
    for number in range(len(MADE_OF_NUMBERS), 0, -1):
        try:
            computes = MADE_OF_NUMBERS[:number]
            return _record(model, args, kwargs, state or State(), call, decisions, left, computes=computes)
        except Overwritten:  # data are written to one of them
            continue
    return _record(model, args, kwargs, state or State(), call, decisions, left, computes=())


def _record(
    model: nn.Module, args: Any, kwargs: Any, state: State, call: Callable[..., Any] | None,
    decisions: Sequence[bool], left: Sequence[Left], *, computes: tuple[Any, ...],
) -> Recording:  # fmt: skip
    device = state.device or device_of(model, args, kwargs)
    held = held_by(model, call, (args, kwargs))
    tape = Tape(model, device, state, call, decisions, computes, held)
    quiet = logging.getLogger("torch._subclasses.fake_tensor")
    level = quiet.level
    quiet.setLevel(logging.CRITICAL)
    _RECORDING.append(tape)
    try:
        with held.put_back(), torch.random.fork_rng(devices=[]), tape.weights.in_place():
            tape.begin_with(left)
            recording = tape.run(args, kwargs)
    finally:
        _RECORDING.remove(tape)
        quiet.setLevel(level)
    recording.left = [each for each in held.left if tape.is_of_batch(each)]
    for path, weight, flag in tape.weights.set_once:
        raise CaptureError(SETS_ONCE.format(weight=f"{path}.{weight}", flag=f"{path}.{flag}"))
    return recording


def device_of(model: nn.Module, args: Any, kwargs: Any) -> torch.device:
    """The device of a model's weights, else that of its arguments; a model without memory counts as on the CPU."""
    tensors = [*model.parameters(), *model.buffers(), *(t for t in flatten((args, kwargs))[0])]
    found = next((t.device for t in tensors if isinstance(t, torch.Tensor)), torch.device("cpu"))
    return torch.device("cpu") if found.type == "meta" else found

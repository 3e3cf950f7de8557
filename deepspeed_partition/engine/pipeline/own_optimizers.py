"""Whether an optimizer that is not torch's may be given a part of the parameters.

Each rank of a pipeline runs the optimizer on the parameters of its own layers. That is the step of one process if
each parameter is updated by itself. A norm over all gradients, or one learning rate that is estimated from all of
them (Prodigy, D-Adaptation), is another number on each rank. Under ZeRO, bf16 and fp16 the optimizer gets flat
slices, and then each element has to be updated by itself. A copy of the optimizer is tried on small tensors,
before the first step: no documentation of it is needed, and none of the user's weights is touched.
"""

from __future__ import annotations

import copy
import random
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_partition.engine.runtime.random_state import preserved_random_state, torch_state

NUM_STEPS = 32
"""Steps of a trial: an estimate such as that of Prodigy grows slowly, and Shampoo begins after 25 steps."""

SIZES = tuple(10.0**power for power in (-8, -6, -4, -2, 2, 4, 6))
"""Factors of gradients in further trials: a step may do something else where a norm of all crosses a threshold,
which lies between the gradients that are looked at and the larger ones beside them."""

NUM_STEPS_OF_SIZES = 4
"""Steps of each of these trials."""

LONGEST_SIDE = 6
"""Elements of a dimension in a trial."""

MOST_WEIGHTS = 64
"""Parameters that a trial has at most, before it leaves all but two of each group out."""

TOLERANCE = 1e-3
"""A difference between two trials, relative to how far they went, that counts as one."""

BY_ELEMENTS = ("FusedAdam", "FusedLion", "DeepSpeedCPUAdam", "DeepSpeedCPULion", "DeepSpeedCPUAdagrad")
"""Optimizers of DeepSpeed's that update each element by itself. Those on a GPU step no small tensors of a CPU."""

WAYS_OUT = "use an optimizer that updates each parameter by itself, such as those of torch.optim"

RETURNED = "configure_optimizers returns {kind}, "
CLIPPED = "Trainer(gradient_clip_val=...)"

COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "irecv", "isend", "recv", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip
"""Functions of ``torch.distributed`` by which an optimizer brings the parts of the ranks together itself."""

DRAWN_BY_NAME = (
    "draw in a hook, such as on_train_batch_end, for each parameter with a generator that is seeded by its name "
    "and the step, `for name, p in self.named_parameters(): seed = zlib.crc32(f'{name} "
    "{self.global_step}'.encode()); noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))"
    ".to(p)`, which is the same in one process and in a pipeline"
)


_tried_before: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


class CommunicatesError(Exception):
    """The step of an optimizer asks other ranks, which a trial on this one cannot judge."""


class TrialError(Exception):
    """The copy of an optimizer could not make its steps."""


def was_tried(optimizer: torch.optim.Optimizer) -> bool:
    """Whether :func:`why_not_in_parts` has been asked about ``optimizer``."""
    return optimizer in _tried_before


def why_not_in_parts(
    optimizer: torch.optim.Optimizer,
    *,
    flattened: bool,
    returned: str = RETURNED,
    clipped: str = CLIPPED,
    drawn: str = DRAWN_BY_NAME,
    with_closure: bool = True,
) -> str | None:
    """Say why ``optimizer`` would train otherwise on the parameters of one rank; None if it would not.

    Args:
        optimizer: The user's, with all parameters.
        flattened: Whether DeepSpeed will give it one flat tensor per group.
        returned: How sentences begin, with ``{kind}`` for its class.
        clipped: What clips the norm of all gradients without it, in words.
        drawn: What to do in the place of draws, in words.
        with_closure: Whether one process gives its step a closure, which the engine of a pipeline does not.

    Returns:
        The sentence; None also where its step communicates with other ranks, whose parts it may bring together.

    Raises:
        TrialError: nobody knows, for its copy raises.
    """
    package, kind = type(optimizer).__module__.partition(".")[0], type(optimizer).__name__
    if package == "torch" or (package == "deepspeed" and kind in BY_ELEMENTS):
        return None
    _tried_before.add(optimizer)
    try:
        with preserved_random_state(), _refused_collectives():
            kind = type(optimizer).__name__
            reason = _found_reason(optimizer, flattened, returned.format(kind=kind), clipped, drawn)
            return _why_closure_matters(optimizer) if reason is None and with_closure else reason
    except CommunicatesError:
        return None


def _found_reason(
    optimizer: torch.optim.Optimizer, flattened: bool, returned: str, clipped: str, drawn: str
) -> str | None:
    kind = type(optimizer).__name__
    if _needs_closure(optimizer):
        return (
            f"the step of {kind} calls its closure without asking whether there is one, and the engine of a "
            "pipeline, which has the gradients by then, gives none: write `if closure is not None: ...` "
            "there; an optimizer that needs the loss a second time, such as SAM, cannot run in a pipeline"
        )
    before = _drawn_so_far()
    alone = _tried(optimizer, beside=False)
    if _drawn_so_far() != before:
        return (
            f"{returned}whose step draws from the common random generators, and in "
            "a pipeline each rank draws for the parameters of its own layers, which are other numbers than in "
            f"one process: {drawn}"
        )
    if not _is_same(alone, _tried(optimizer, beside=True)) or not all(
        _is_same_at(optimizer, size) for size in SIZES
    ):
        return (
            f"{returned}whose step of a parameter depends on the others (a norm or "
            "an estimate over all of them), and in a pipeline each rank has the parameters of its own layers: "
            f"{WAYS_OUT}; the norm of all gradients is clipped by {clipped}"
        )
    if not _is_same(alone, _tried_alone(optimizer)):
        return (
            f"{returned}whose step of a parameter depends on which others it is "
            f"given "
            "(by their places in its groups, or by what it draws for them), and in a pipeline each rank "
            "gives it "
            f"the parameters of its own layers: {WAYS_OUT}"
        )
    if flattened and not _is_same(alone, _tried_flat(optimizer)):
        return (
            f"{returned}whose step of an element depends on the tensor that it "
            "stands in, and DeepSpeed's ZeRO, bf16 and fp16 optimizers flatten tensors: use "
            "precision='32-true' and stage=0, or another optimizer"
        )
    return None


def _why_closure_matters(optimizer: torch.optim.Optimizer) -> str | None:
    """Say what the step does with a closure that it does not do without one."""
    calls: list[float] = []

    def with_losses(of_step: Callable[[int], float]) -> list[Tensor] | None:
        calls.clear()

        def closure() -> Tensor:
            calls.append(of_step(len(calls)))
            return torch.tensor(calls[-1])

        try:
            return _tried(optimizer, beside=False, closure=closure)
        except TrialError:  # such as one that wants the loss to have a graph: what it does then is not known
            return None

    kind, plain = type(optimizer).__name__, _tried(optimizer, beside=False)
    falling = with_losses(lambda step: 1 / (1 + step))
    gives_none = "the engine of a pipeline, which has the gradients by then, gives none"
    if len(calls) > NUM_STEPS:
        return (
            f"the step of {kind} calls its closure {len(calls) / NUM_STEPS:.3g} times, and {gives_none}: an "
            "optimizer that needs the loss a second time, such as SAM, cannot run in a pipeline"
        )
    rising = with_losses(lambda step: 1.0 + step)
    if all(found is None or _is_same(plain, found) for found in (falling, rising)):
        return None
    return (
        f"the step of {kind} does something else with a closure than without one, such as to follow the loss, and "
        f"{gives_none}: let its step do without; a learning rate may follow the loss by a scheduler, or in "
        "on_train_batch_end, which has it in outputs['loss']"
    )


def kept_beside_state(
    optimizer: torch.optim.Optimizer, *, after_steps: bool = False, follows: bool = False
) -> list[str]:
    """Name what an optimizer keeps of its parameters outside of ``state``, which alone goes with them.

    Such as a list in the order of the groups, ``self.slow = [p.clone() for p in ...]``, or the states of another
    optimizer that it holds.

    Args:
        optimizer: Any optimizer; those of torch keep nothing else.
        after_steps: Look at a copy that has made its first steps; else at the optimizer as it is now.
        follows: Whether the engine takes along what goes with the groups: see :func:`goes_with_groups`.

    Returns:
        Expressions, such as ``self.slow``; none where a copy cannot make steps.
    """
    if type(optimizer).__module__.partition(".")[0] == "torch":
        return []
    if not after_steps:
        return list(_kept_in(optimizer, follows))
    try:
        with preserved_random_state(), _refused_collectives():
            trial = _Trial(optimizer)
            trial.run()
    except (TrialError, CommunicatesError):
        return []
    return list(_kept_in(trial.optimizer, follows))


def goes_with_groups(value: Any, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a value has something for each parameter of an optimizer, in a form that tells for which one.

    Such as ``[p.clone() for p in group["params"]]`` of one group or of all, lists of these, a dict by parameters
    or by their ``id()``, and the states of another optimizer with the same parameters. A list for one of several
    groups of the same shapes does not tell for which.

    Args:
        value: An attribute of the optimizer.
        groups: Its ``param_groups``.
    """
    members = [list(group["params"]) for group in groups]
    every = [weight for group in members for weight in group]
    if isinstance(value, torch.optim.Optimizer):
        return goes_with_groups(value.state, groups)
    if isinstance(value, dict):
        known = {id(weight) for weight in every}
        return all((key if type(key) is int else id(key)) in known for key in value)
    if not isinstance(value, list):
        return False
    if value and all(isinstance(each, list) for each in value):
        return [_shapes(each) for each in value] == [_shapes(group) for group in members]
    shapes = _shapes(value)
    return shapes == _shapes(every) or not shapes or [_shapes(group) for group in members].count(shapes) == 1


def _shapes(values: Sequence[Any]) -> list[Any]:
    return [each.shape if isinstance(each, Tensor) else None for each in values]


def _kept_in(optimizer: Any, follows: bool) -> Iterator[str]:
    for name, value in vars(optimizer).items():
        if follows and goes_with_groups(value, optimizer.param_groups):
            continue
        if name not in OF_TORCH and _holds_tensors(value, id(optimizer.state), DEPTH):
            yield f"self.{name}"
    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor) and _holds_tensors(value, 0, DEPTH):
            yield f"self.state[{key!r}]"
    for place, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name not in ("params", "param_names") and _holds_tensors(value, 0, DEPTH):
                yield f"self.param_groups[{place}][{name!r}]"


def _holds_tensors(value: Any, state: int, depth: int) -> bool:
    """Whether a value has tensors of more than one element, and is none that goes with parameters."""
    if isinstance(value, Tensor):
        return value.numel() > 1 and not isinstance(value, nn.Parameter)
    if not depth or id(value) == state:
        return False
    if isinstance(value, torch.optim.Optimizer):
        return _holds_tensors(value.state, state, depth - 1)
    if isinstance(value, dict):
        return any(_holds_tensors(child, state, depth - 1) for child in value.values())
    return isinstance(value, list | tuple | deque) and any(
        _holds_tensors(child, state, depth - 1) for child in value
    )


OF_TORCH = frozenset(("state", "param_groups", "defaults"))
"""The attributes of an optimizer that are told apart by parameters, or hold none of them."""

DEPTH = 3


@contextmanager
def _refused_collectives() -> Iterator[None]:
    here = threading.get_ident()

    def refused(function: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*arguments: Any, **keywords: Any) -> Any:
            if threading.get_ident() == here:
                raise CommunicatesError
            return function(*arguments, **keywords)

        return refuse

    before = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
    for name, function in before.items():
        setattr(dist, name, refused(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def _drawn_so_far() -> tuple[Any, ...]:
    """What changes when something is drawn from the common generators, also from the one of the device."""
    return torch_state(), random.getstate(), repr(numpy.random.get_state(legacy=False))


def _is_same_at(optimizer: torch.optim.Optimizer, size: float) -> bool:
    """Whether a step of a parameter does not depend on the others where gradients are by a factor larger."""
    alone = _tried(optimizer, beside=False, size=size)
    if not all(bool(moved.isfinite().all()) for moved in alone):
        return True  # the optimizer, or its type of numbers, is not made for them
    return _is_same(alone, _tried(optimizer, beside=True, size=size))


def _tried(
    optimizer: torch.optim.Optimizer,
    *,
    beside: bool,
    size: float | None = None,
    closure: Callable[[], Tensor] | None = None,
) -> list[Tensor]:
    """How far every second parameter goes; with ``beside``, while the others have large gradients."""
    trial = _Trial(optimizer)
    if size is not None:
        trial.enlarge(size)
    if len(trial.weights) == 1:
        trial.put_a_stranger_beside()
    if beside:
        trial.let_others_leap()
    return trial.run(closure)


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps are made with a closure alone."""
    try:
        _Trial(optimizer).run()
    except TrialError as error:
        calls: list[Tensor] = []

        def closure() -> Tensor:
            calls.append(torch.zeros(()))
            return calls[-1]

        try:
            _Trial(optimizer).run(closure=closure)
        except TrialError:  # such as one that wants gradients which the closure has made
            return bool(calls) and "'NoneType' object is not callable" in str(error)
        return True
    return False


def _tried_alone(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """How far every second parameter goes where the others are taken out of the groups, as on a rank."""
    trial = _Trial(optimizer)
    trial.take_others_out()
    return trial.run()


def _tried_flat(optimizer: torch.optim.Optimizer) -> list[Tensor] | None:
    trial = _Trial(optimizer)
    trial.flatten()
    try:
        return trial.run()
    except TrialError:  # as Muon does, which takes matrices only
        return None


def _is_same(expected: Sequence[Tensor], found: Sequence[Tensor] | None) -> bool:
    if found is None:
        return False
    moved = max(float(one.abs().max()) for one in expected)
    differs = max(float((one - other).abs().max()) for one, other in zip(expected, found, strict=True))
    return differs <= TOLERANCE * moved


class _Trial:
    """A copy of an optimizer on small tensors."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        memo: dict[int, Any] = {}
        given = [weight for group in optimizer.param_groups for weight in group["params"]]
        generator = torch.Generator().manual_seed(0)
        for group in optimizer.param_groups:
            few = group["params"] if len(given) <= MOST_WEIGHTS else list(_of_two_kinds(group["params"]))
            for weight in few:
                memo[id(weight)] = _small(weight, generator)
        kept = {id(weight) for weight in memo.values()}
        for weight in given:
            memo.setdefault(id(weight), nn.Parameter(torch.zeros(())))
            _shorten_state(optimizer.state.get(weight), weight, memo)
        for values, weights in _parallel(optimizer):
            for value, weight in zip(values, weights, strict=True):
                _shorten_state({"": value}, weight, memo)
        try:
            attributes = copy.deepcopy(
                {name: value for name, value in vars(optimizer).items() if name not in NOT_COPIED}, memo
            )
        except Exception as error:  # of the user's classes
            raise TrialError(f"it cannot be copied ({type(error).__name__}: {error})") from error
        self.optimizer: Any = object.__new__(type(optimizer))
        vars(self.optimizer).update(attributes)
        for table in HOOKS:
            vars(self.optimizer)[table] = OrderedDict()
        self._parallel = list(_parallel(self.optimizer))
        for group in self.optimizer.param_groups:
            self._set_weights(group, [weight for weight in group["params"] if id(weight) in kept])
        self.weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        self._gradients = {weight: list(_steady(weight, generator)) for weight in self.weights}
        self._starts = {weight: weight.detach().clone() for weight in self.weights[::2]}
        self._pieces: dict[nn.Parameter, list[nn.Parameter]] = {}
        self._num_steps = NUM_STEPS

    def enlarge(self, size: float) -> None:
        """Let all gradients be larger by a factor, in fewer steps."""
        self._num_steps = NUM_STEPS_OF_SIZES
        self._gradients = {weight: [each * size for each in found] for weight, found in self._gradients.items()}

    def put_a_stranger_beside(self) -> None:
        """Give the first group another parameter, where there is but one."""
        group = next(each for each in self.optimizer.param_groups if each["params"])
        [weight] = group["params"]
        stranger = nn.Parameter(weight.detach() * 10 + 1)
        self._gradients[stranger] = list(self._gradients[weight])
        self._set_weights(group, [weight, stranger])

    def let_others_leap(self) -> None:
        """Give every parameter that is not looked at gradients that are large and change their signs."""
        for weight in self._gradients.keys() - self._starts.keys():
            self._gradients[weight] = [
                gradient.roll(step) * (-1) ** step * 300 for step, gradient in enumerate(self._gradients[weight])
            ]

    def take_others_out(self) -> None:
        """Leave each group the parameters that are looked at."""
        for group in self.optimizer.param_groups:
            self._set_weights(
                group, [weight for weight in group["params"] if any(weight is each for each in self._starts)]
            )

    def _set_weights(self, group: dict[str, Any], weights: list[nn.Parameter]) -> None:
        group["params"] = weights
        self._cut_parallel()
        if "param_names" in group:
            group["param_names"] = [f"weight_{place}" for place in range(len(weights))]

    def _cut_parallel(self) -> None:
        """Leave lists that go with the groups what they have for the parameters that are there."""
        there = {id(weight) for group in self.optimizer.param_groups for weight in group["params"]}
        for values, weights in self._parallel:
            kept = [(value, weight) for value, weight in zip(values, weights, strict=True) if id(weight) in there]
            values[:], weights[:] = [value for value, _ in kept], [weight for _, weight in kept]

    def flatten(self) -> None:
        """Put two flat pieces in the place of each parameter."""
        for group in self.optimizer.param_groups:
            for weight in group["params"]:
                places = [slice(0, weight.numel() // 2), slice(weight.numel() // 2, None)]
                pieces = [nn.Parameter(weight.detach().flatten()[place].clone()) for place in places]
                for piece, place in zip(pieces, places, strict=True):
                    self._gradients[piece] = [each.flatten()[place].clone() for each in self._gradients[weight]]
                    state = self.optimizer.state.get(weight, {})
                    if state:
                        self.optimizer.state[piece] = {
                            name: value.flatten()[place].clone() if _is_shaped_as(value, weight) else value
                            for name, value in state.items()
                        }
                self.optimizer.state.pop(weight, None)
                self._pieces[weight] = pieces
            self._set_weights(group, [piece for weight in group["params"] for piece in self._pieces[weight]])

    def run(self, closure: Callable[[], Tensor] | None = None) -> list[Tensor]:
        """How far each parameter that is looked at has gone."""
        try:
            if callable(getattr(self.optimizer, "train", None)):  # as schedule-free ones ask for
                self.optimizer.train()
            for step in range(self._num_steps):
                for group in self.optimizer.param_groups:
                    for weight in group["params"]:
                        weight.grad = self._gradients[weight][step].clone()
                self.optimizer.step(*(() if closure is None else (closure,)))
        except CommunicatesError:
            raise
        except Exception as error:  # of the user's class
            raise TrialError(f"a copy of it raises {type(error).__name__}: {error}") from error
        return [self._now(weight) - start for weight, start in self._starts.items()]

    def _now(self, weight: nn.Parameter) -> Tensor:
        pieces = self._pieces.get(weight)
        return (
            weight.detach() if pieces is None else torch.cat([piece.detach() for piece in pieces]).view_as(weight)
        )


NOT_COPIED = ("load_state_dict", "state_dict", "step")
"""A learning-rate schedule puts there, on the instance, what counts its steps; an engine, what marks copies."""

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""The attributes in which torch (2.4 to 2.13) keeps the hooks of an optimizer's step."""


def _parallel(optimizer: Any) -> Iterator[tuple[list[Any], list[nn.Parameter]]]:
    """The lists of an optimizer that have a tensor for each parameter of a group, or of all, with these."""
    groups = [list(group["params"]) for group in optimizer.param_groups]
    every = [weight for group in groups for weight in group]
    for name, value in vars(optimizer).items():
        if name in OF_TORCH or not isinstance(value, list) or not value:
            continue
        if all(isinstance(each, list) for each in value):
            if [_shapes(each) for each in value] == [_shapes(group) for group in groups]:
                yield from zip(value, groups, strict=True)
            continue
        for weights in (every, *groups):
            if weights and _shapes(value) == _shapes(weights):
                yield value, list(weights)
                break


def _of_two_kinds(weights: Sequence[nn.Parameter]) -> Iterator[nn.Parameter]:
    """The first parameter of all, and the first with another number of dimensions, or else the second one."""
    yield from weights[:1]
    for weight in [*(each for each in weights if each.ndim != weights[0].ndim), *weights[1:]]:
        yield weight
        return


def _small(weight: nn.Parameter, generator: torch.Generator) -> nn.Parameter:
    """The parameter that stands for ``weight`` in a copy."""
    shape = [min(side, LONGEST_SIDE) for side in weight.shape]
    values = torch.randn(shape, generator=generator) * 0.01
    small = nn.Parameter(values.to(weight.device, weight.dtype))
    vars(small).update({name: value for name, value in vars(weight).items() if not isinstance(value, Tensor)})
    return small


def _shorten_state(state: dict[str, Any] | None, weight: nn.Parameter, memo: dict[int, Any]) -> None:
    """Let the state that an optimizer made with its parameters fit the small ones."""
    for value in (state or {}).values():
        # A list of the parameters themselves, self.params = [...], has the small ones by now.
        if _is_shaped_as(value, weight) and id(value) not in memo:
            corner = tuple(slice(side) for side in memo[id(weight)].shape)
            # A parameter that is left out is a number in the copy.
            memo[id(value)] = value.detach()[corner].clone() if corner else torch.zeros(())


def _is_shaped_as(value: Any, weight: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == weight.shape


def _steady(weight: nn.Parameter, generator: torch.Generator) -> Iterator[Tensor]:
    """Gradients of a trial, which stay about the same: then an estimate of the learning rate grows."""
    direction = torch.randn(weight.shape, generator=generator)
    for _ in range(NUM_STEPS):
        noise = torch.randn(weight.shape, generator=generator)
        yield (0.1 * direction + 0.02 * noise).to(weight.device, weight.dtype)

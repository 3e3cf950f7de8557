"""Layers that compute something else for a part of a batch: they mix its samples, or keep something between runs.

In a pipeline a layer runs once per micro-batch, and in one process once per batch. That is the same for a layer
that treats each sample by itself and keeps nothing. The others are named, once, before the first step.

Each layer runs on a few samples, one layer after the other, with the same random numbers each time:

- as they are, and with either half of the samples in the place of the other. What depends on both halves mixes
  samples, in whatever dimension they stand;
- on each half alone, where it draws nothing: together that is what it gives for all of them;
- with its floating inputs times 30 and divided by it, and on up to sixteen samples, of which the first half are
  one and the same: a norm may be limited, and a router of experts may drop what is too much for one of them;
- with inputs that are all ones and zeros, as masks are, set to zero for a sample of either half and the end of
  another: what has no value of its own may get a mean over the others, and lengths may differ in a later batch;
- once more, watched: code that asks a tensor for a number that depends on the samples may decide by it for all of
  them (``deciding_layers.py``);
- twice in a row: attributes and buffers that the second run changes again, such as a counter or a running average,
  are kept; so is something if the second run gives something else.

A layer that passes so in training runs backward, too (``gradients_on_parts.py``). Batch normalization is named
elsewhere, and does not count meanwhile. All of it takes place on copies of parameters and buffers; attributes and
random numbers are put back. It costs fourteen forwards of one layer for at most four samples, three for at most
sixteen (six with masks), and four or five forwards with their backwards. Three more are for what layers hand over
beside their outputs (``handed_over.py``).
"""

from __future__ import annotations

import math
import pickle
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed_partition.capture.model_layers import contents_of
from deepspeed_partition.engine.runtime.first_failure import in_words
from deepspeed_partition.engine.runtime.random_state import preserved_random_state, random_state, torch_state
from deepspeed_partition.generators import COMMON, GENERATORS, generator_state, members_of
from deepspeed_partition.hidden_modules import parts_of
from deepspeed_partition.layer_calls import unpacking
from deepspeed_partition.profiling.attributes import attributes_kept, attributes_of
from deepspeed_partition.profiling.isolation import stand_ins
from lightning_madpipe.compat.unsupported import layers_of_instances, layers_of_statistics
from lightning_madpipe.module import PipelineCall, TiedModule
from lightning_madpipe.steps.deciding_layers import lines_that_decide
from lightning_madpipe.steps.gradients_on_parts import (
    BackwardRun,
    Directions,
    Gradients,
    Halves,
    gradients_depend_on_others,
)
from lightning_madpipe.steps.handed_over import HandOver, hand_over
from lightning_madpipe.steps.hooks_that_collect import collected_by_hooks
from lightning_madpipe.steps.module_state import fits, modes, silenced
from lightning_madpipe.steps.tensor_comparison import TOLERANCES
from lightning_madpipe.steps.what_steps_leave import Numbers, numbers_of
from lightning_madpipe.steps.written_inputs import GivenTensors

FEW = 4
MANY = 16
SCALES = (30.0, 1 / 30)
"""What floating inputs of a layer are multiplied by, to meet limits that ordinary ones do not reach."""
DEPTH = 2
EXACT = 1e-5
"""Relative difference of numbers that a layer keeps which is not rounding."""

Tensors = tuple[Tensor, ...]
Three = tuple[Tensors, Tensors, Tensors]
"""Values for some samples, and for others in the place of the first and of the second half."""
Dims = tuple[int | None, ...]


class LayerRaisedError(Exception):
    """A layer that is looked at raises, or hands on what no layer may."""


@dataclass(frozen=True, slots=True)
class FewSamples:
    """What a step gives ``forward`` for a few samples of a batch."""

    inputs: Tensors
    dims: tuple[int | None, ...] | None
    """The dimension of each input that counts the samples, None where it is the same for all; None: not known."""
    more: Tensors | None = None
    """The inputs of more samples, which stand in the same dimensions."""


@dataclass(slots=True)
class OnParts:
    """The layers that compute something else for a part of a batch, by name."""

    mixing: list[str] = field(default_factory=list)
    keeping: list[str] = field(default_factory=list)
    """Attributes and buffers that a layer changes whenever it runs, and layers that keep something elsewhere."""
    mixing_gradients: list[str] = field(default_factory=list)
    """Layers that mix samples in their backward alone."""
    deciding: list[str] = field(default_factory=list)
    """Other layers whose code asks for numbers that depend on their input, with the line."""
    drawing: list[str] = field(default_factory=list)
    """Layers, or dropout in them, that draw from common generators: torch's, Python's, NumPy's."""
    writing: list[str] = field(default_factory=list)
    """Layers that change in place what the step gives ``forward``."""
    handed_over: tuple[HandOver, str] | None = None
    """Two layers of which one takes something beside its input that the other has left, and what to say of it."""
    ended: str | None = None
    """Where the look ended before the last layer, and why, in words; None where a layer itself has raised."""


def few_samples(all_of_them: Tensors, half: Tensors) -> FewSamples:
    """The inputs of a few samples, with the dimensions that those of the first half show."""
    dims: list[int | None] = []
    if len(all_of_them) != len(half):
        return FewSamples(all_of_them, None)
    for tensor, part in zip(all_of_them, half, strict=True):
        dim = grown_dim(tensor, part)
        if dim is not None and (dim < 0 or tensor.shape[dim] != 2 * part.shape[dim]):
            return FewSamples(all_of_them, None)
        dims.append(dim)
    return FewSamples(all_of_them, None if all(dim is None for dim in dims) else tuple(dims))


def grown_dim(tensor: Tensor, part: Tensor) -> int | None:
    """The dimension in which a tensor is longer than that of a part; None: none; -1: it cannot be told."""
    if tensor.ndim != part.ndim:
        return -1
    dims = [dim for dim, (a, b) in enumerate(zip(tensor.shape, part.shape, strict=True)) if a != b]
    return None if not dims else dims[0] if len(dims) == 1 else -1


def layers_on_parts(
    module: nn.Module,
    call: PipelineCall,
    samples: FewSamples,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    is_cut: bool = True,
) -> OnParts:
    """Find the layers that compute something else for a part of a batch.

    Args:
        call: The layers, all of which this process can run.
        samples: Of which half the first ones are the first half.
        dtype: What the engine trains in; None for the parameters' own type.
        is_cut: Whether layers run on several ranks.
    """
    found = OnParts()
    layers = [layer for _, layer in call.existing_modules()]
    functions = [function_of_layer(layer) for layer in call.layers]
    names = WeakIdKeyDictionary({part: f"self.{name}" for name, part in module.named_modules() if name})
    is_training = module.training and torch.is_grad_enabled()
    if is_cut:
        found.handed_over = _handed_over(module, call, functions, names, samples, device, dtype)
    passed: Tensors | None = samples.inputs
    needed = tuple(tensor.requires_grad for tensor in samples.inputs)
    parts = _Parts.of(samples)
    others = [_Chain.of_alike(samples), _Chain.of_masked(samples)]
    given = GivenTensors(len(samples.inputs))
    with (
        silenced([module, *layers]),
        preserved_random_state(),
        torch.inference_mode(False),
        torch.set_grad_enabled(is_training),
    ):
        apart = parts_of(each for layer in call.layers for each in _modules_of(layer))
        for place, (layer, function) in enumerate(zip(call.layers, functions, strict=True)):
            if function is None or passed is None:
                break
            modules = _modules_of(layer)
            name, shown = _in_words(place, layer, names)
            look = _Look(name, shown, function, modules, found, needed, names, _number_of(samples), given)
            try:
                with stand_ins(modules, device, dtype=dtype, trains=False, apart=apart) as noted:
                    look.put_weights_back = noted()
                    behind, parts_behind = look.at(passed, parts)
                    needed = look.needed_behind
                    # What is found in a model is written down with what it writes.
                    if given.layer_writes() and call.captured is None:
                        found.writing.append(shown)
                    if parts is None or parts_behind is None:
                        for chain in others:
                            chain.three = None
                    else:
                        chains = [*others, *parts.scaled(passed)]
                        look.look_at_others(chains, _dims_of(behind, parts_behind))
                    passed, parts = behind, parts_behind
            except LayerRaisedError:  # it is told where the layer runs for good
                break
            except Exception as error:
                found.ended = f"{look.shown} ({in_words(error)})"
                break
    if is_training:
        by_frequency = _embeddings_by_frequency(names, call)
        found.mixing_gradients += [name for name in by_frequency if name not in found.mixing_gradients]
    return found


def function_of_layer(layer: Any) -> Callable[[Any], Any] | None:
    """What runs a layer on what the one before it returns; None where it has to be built."""
    if not isinstance(layer, TiedModule):
        return None if isinstance(layer, LayerSpec) else unpacking(layer)
    if layer.forward_fn is None:
        return layer.module
    return lambda passed: layer.forward_fn(layer.module, passed)


def _modules_of(layer: Any) -> list[nn.Module]:
    own = layer.module if isinstance(layer, TiedModule) else layer
    return [own] if isinstance(own, nn.Module) else []


def _in_words(place: int, layer: Any, names: Mapping[nn.Module, str]) -> tuple[str, str]:
    """The name of a layer, and that with its kind."""
    own = layer.module if isinstance(layer, TiedModule) else layer
    is_module = isinstance(own, nn.Module)
    name = names.get(own, f"layer {place}") if is_module else f"layer {place}"
    kind = type(own).__name__ if is_module else getattr(own, "__name__", type(own).__name__)
    contents = contents_of(layer.forward_fn if isinstance(layer, TiedModule) and layer.forward_fn else own)
    if contents is not None:  # code of the model beside modules
        kind = contents.in_words(names) or kind
    return name, f"{name} ({kind})"


def _handed_over(
    module: nn.Module,
    call: PipelineCall,
    functions: Sequence[Callable[[Any], Any] | None],
    names: Mapping[nn.Module, str],
    samples: FewSamples,
    device: torch.device,
    dtype: torch.dtype | None,
) -> tuple[HandOver, str] | None:
    if call.captured is not None:
        return None  # what its layers hand over is written down
    parts = _Parts.of(samples)
    others = _times(samples.inputs, 0.5) if parts is None else parts.other_first
    modules = [_modules_of(layer) for layer in call.layers]
    everything = [module for group in modules for module in group]
    collecting = [each.function for each in collected_by_hooks(module, call)]
    with silenced(everything, but=collecting), ExitStack() as stack:
        if device.type != "cpu" or dtype is not None:
            if not fits(everything, device, dtype):
                return None
            stack.enter_context(stand_ins(everything, device, dtype=dtype, trains=False))
        try:
            found = hand_over(functions, modules, samples.inputs, others)
        except Exception:  # attributes that cannot be read, which the look at each layer tells
            return None
    if found is None:
        return None
    return found, found.in_words([_in_words(place, layer, names)[1] for place, layer in enumerate(call.layers)])


@dataclass(frozen=True, slots=True)
class _Parts:
    """What stands between two layers beside that for a few samples."""

    other_first: Tensors
    """The values with other samples in the place of the first half."""
    other_second: Tensors
    alone: tuple[Tensors, Tensors] | None
    """The values for either half alone; None where that is not known."""

    @staticmethod
    def of(samples: FewSamples) -> _Parts | None:
        if samples.dims is None:
            return None
        pairs = list(zip(samples.inputs, samples.dims, strict=True))
        halves = [(t, t) if dim is None else t.split(t.shape[dim] // 2, dim) for t, dim in pairs]
        firsts, seconds = (tuple(both[place] for both in halves) for place in (0, 1))

        def twice(tensors: Tensors) -> Tensors:
            dims = zip(tensors, samples.dims or (), strict=True)
            return tuple(tensor if dim is None else torch.cat([tensor, tensor], dim) for tensor, dim in dims)

        return _Parts(twice(seconds), twice(firsts), (firsts, seconds))

    def scaled(self, own: Tensors) -> list[_Chain]:
        """The values times numbers, where some are floating."""
        if not any(tensor.is_floating_point() for tensor in own):
            return []
        return [
            _Chain((_times(own, by), _times(self.other_first, by), _times(self.other_second, by))) for by in SCALES
        ]


def _dims_of(whole: Tensors, parts: _Parts) -> Dims | None:
    """The dimension of each tensor that counts the samples; None where that is not known."""
    if parts.alone is None:
        return None
    dims = tuple(map(grown_dim, whole, parts.alone[0]))
    return None if any(dim is not None and dim < 0 for dim in dims) else dims


def _in_halves(three: Three, dims: Dims) -> Three | None:
    """Let the tensors for other samples in the place of either half differ in that half alone."""
    firsts: list[Tensor] = []
    seconds: list[Tensor] = []
    for own, of_first, of_second, dim in zip(*three, dims, strict=True):
        if dim is None:
            firsts.append(own)
            seconds.append(own)
            continue
        if own.shape[dim] % 2:
            return None
        half = own.shape[dim] // 2
        one, other = own.split(half, dim)
        firsts.append(torch.cat([of_first.narrow(dim, 0, half), other], dim))
        seconds.append(torch.cat([one, of_second.narrow(dim, half, half)], dim))
    return three[0], tuple(firsts), tuple(seconds)


def _times(tensors: Tensors, by: float) -> Tensors:
    return tuple(tensor * by if tensor.is_floating_point() else tensor for tensor in tensors)


class _Chain:
    """What stands between two layers for other samples: these, and others in the place of either half."""

    def __init__(self, three: Three | None) -> None:
        self.three = three
        """None behind a layer that takes no such samples, or behind which it is not known where they stand."""

    @staticmethod
    def of_alike(samples: FewSamples) -> _Chain:
        """More samples, of which those of the first half are one and the same."""

        def halves(tensor: Tensor, dim: int, rows: int) -> tuple[Tensor, Tensor]:
            half = tensor.shape[dim] // 2
            alike = torch.cat([tensor.narrow(dim, 0, rows)] * (half // rows), dim)
            return alike, tensor.narrow(dim, half, half)

        return _Chain(_of_halves(samples, halves))

    @staticmethod
    def of_masked(samples: FewSamples) -> _Chain:
        """More samples, of which masks leave some out, and the end of another; none where no input is a mask."""
        inputs = _many(samples)
        dims = samples.dims or ()
        if not any(dim is not None and _is_mask(tensor) for tensor, dim in zip(inputs, dims, strict=False)):
            return _Chain(None)

        def halves(tensor: Tensor, dim: int, rows: int) -> tuple[Tensor, Tensor]:
            first, second = (half.clone() for half in tensor.split(tensor.shape[dim] // 2, dim))
            if _is_mask(tensor):
                for half in (first, second):
                    _places_left_out(half.narrow(dim, 0, rows), dim).zero_()
                last = second.narrow(dim, second.shape[dim] - rows, rows)
                last[..., (last.shape[-1] + 1) // 2 :] = 0
            return first, second

        return _Chain(_of_halves(samples, halves))


def _many(samples: FewSamples) -> Tensors:
    return samples.inputs if samples.more is None else samples.more


def _places_left_out(mask: Tensor, dim: int) -> Tensor:
    """What of a sample's mask may be zero; on a device all but a place that it keeps.

    There a place of -1, which is that of the last one where there is none, ends the process, and no look.

    Args:
        dim: The dimension that counts the samples.
    """
    if mask.device.type == "cpu" or mask.ndim == 1:
        return mask
    places = next((each for each in reversed(range(mask.ndim)) if each != dim and mask.shape[each] > 1), None)
    return mask[:0] if places is None else mask.narrow(places, 1, mask.shape[places] - 1)


def _is_mask(tensor: Tensor) -> bool:
    """Whether a tensor of several numbers has no others than ones and zeros, and some of them are ones."""
    is_one = tensor == 1
    return tensor.ndim > 0 and not tensor.is_complex() and bool(is_one.any() and (is_one | (tensor == 0)).all())


def _of_halves(samples: FewSamples, halves: Callable[[Tensor, int, int], tuple[Tensor, Tensor]]) -> Three | None:
    """Samples in two halves, and with each half in the place of the other; None where they cannot be told apart.

    Args:
        halves: Makes the halves of a tensor, given the dimension that counts the samples and the rows of a sample.
    """
    own, dims = _many(samples), samples.dims
    if dims is None or len(own) != len(dims):
        return None
    size = _number_of(FewSamples(own, dims))
    if size < 4 or size % 2:
        return None
    three: list[Tensors] = []
    for tensor, dim in zip(own, dims, strict=True):
        if dim is None:
            three.append((tensor, tensor, tensor))
            continue
        first, second = halves(tensor, dim, tensor.shape[dim] // size)
        three.append((torch.cat([first, second], dim), torch.cat([second] * 2, dim), torch.cat([first] * 2, dim)))
    together, of_first, of_second = zip(*three, strict=True)
    return together, of_first, of_second


def _embeddings_by_frequency(names: Mapping[nn.Module, str], call: PipelineCall) -> list[str]:
    """Embeddings whose gradient is divided by how often a number stands in what they are given."""
    parts = dict.fromkeys(part for _, layer in call.existing_modules() for part in layer.modules())
    return [
        f"{names.get(part, 'a layer')} ({type(part).__name__})"
        for part in parts
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
        and part.scale_grad_by_freq
        and part.weight.requires_grad
    ]


class _Look:
    """A look at one layer, whose parameters and buffers are copies.

    Args:
        needed: Whether training needs the gradient of each input.
        names: How the user writes each module.
        num_samples: The number of samples that the first layer is given.
        given: Is told of each run of the layer.
    """

    def __init__(
        self,
        name: str,
        shown: str,
        function: Callable[[Any], Any],
        modules: list[nn.Module],
        found: OnParts,
        needed: tuple[bool, ...],
        names: Mapping[nn.Module, str],
        num_samples: int,
        given: GivenTensors,
    ) -> None:
        self._names, self._num_samples, self._given = names, num_samples, given
        self._name, self.shown, self._function = name, shown, function
        self._modules, self._found, self._needed = modules, found, needed
        self.put_weights_back: Callable[[], None] = lambda: None
        """Gives the copies of weights that the layer has written the values that they had."""
        self.needed_behind: tuple[bool, ...] = ()
        """Whether training needs the gradient of each output."""
        inside = [part for module in modules for part in module.modules()]
        self._statistics = WeakIdKeyDictionary({part: None for part in inside if _has_statistics(part)})

    def at(self, passed: Tensors, parts: _Parts | None) -> tuple[Tensors, _Parts | None]:
        """Look at the layer; return what the next one gets, and that for parts, or None where it is not known."""
        restore = random_state()
        with modes(dict.fromkeys(self._statistics, False)):
            is_repeatable = self._look_twice(passed, restore)
            before = _places(restore)
            whole, draws, end = self._run(passed, restore)
            if draws or before != _places():
                self._found.drawing += [*dropouts(self._modules, self._names)] or [self.shown]
            if parts is None or not is_repeatable:
                return whole, None
            # Where a batch normalization has no other statistics than those of the batch, it is named already.
            is_named = any(map(_has_statistics, self._statistics))
            other_first, _, end_first = self._run(parts.other_first, restore)
            other_second, _, end_second = self._run(parts.other_second, restore)
            alone = self._alone(parts, restore)
        three = list(zip(whole, other_first, other_second, strict=True))
        if any(not a.shape == b.shape == c.shape for a, b, c in three) or not end == end_first == end_second:
            return whole, None  # what is drawn or handed on depends on the samples
        following = _Parts(other_first, other_second, alone)
        mixes = any(_depends_on_both(*each) for each in three)
        if not mixes and not draws:
            mixes = alone is not None and not _are_together(whole, *alone, self._num_samples)
        if mixes and not is_named:
            self._found.mixing.append(self.shown)
        elif not mixes:
            self._look_at_decisions(passed, restore)
        if mixes:
            return whole, self._parted(whole, following)
        with modes(dict.fromkeys(self._statistics, False)):
            self._look_at_gradients(passed, parts, whole, following, draws, restore)
        return whole, _Parts(other_first, other_second, self._halves(whole, following)) if draws else following

    def look_at_others(self, chains: Sequence[_Chain], dims: Dims | None) -> None:
        """Look at the layer for other samples: many alike, some without values, with smaller and larger numbers.

        It may divide by a norm from some size on, drop what is more than it has room for, or fill in a mean.

        Args:
            dims: The dimension of each output that counts the samples; None where it is not known.
        """
        restore = random_state()
        with modes(dict.fromkeys(self._statistics, False)), torch.no_grad():
            is_named = any(map(_has_statistics, self._statistics)) or self.shown in self._found.mixing
            for chain in chains:
                if chain.three is None:
                    continue
                try:
                    three = [self._run(inputs, restore) for inputs in chain.three]
                except Exception:  # no input for this layer
                    chain.three = None
                    continue
                whole, first, second = (outputs for outputs, *_ in three)
                is_known = len({end for *_, end in three}) == 1
                chain.three = self._unmixed((whole, first, second), dims, is_named) if is_known else None

    def _unmixed(self, three: Three, dims: Dims | None, is_named: bool) -> Three | None:
        """What the next layer gets for other samples, as if this one did not mix them; it is named where it does.

        None where it mixes samples and it is not known where those stand.
        """
        each = list(zip(*three, strict=True))
        if any(not own.shape == first.shape == second.shape for own, first, second in each):
            return None
        named = self.shown in self._found.mixing
        mixes = any(_depends_on_both(*tensors) for tensors in each if all(t.isfinite().all() for t in tensors))
        if mixes and not is_named and not named:
            self._found.mixing.append(self.shown)
        if mixes or named:  # which may only put samples into the places of others
            return None if dims is None else _in_halves(three, dims)
        return three

    def _run(self, inputs: Tensors, restore: Callable[[], None]) -> tuple[Tensors, bool, bytes]:
        """Return what the layer makes of ``inputs``, whether it draws, and where random numbers are then."""
        restore()
        begin = torch_state()
        with self._state_kept():
            outputs = self._called(inputs)
        end = torch_state()
        return outputs, begin != end, end

    @contextmanager
    def _state_kept(self) -> Iterator[None]:
        """Put back what the layer changes of its attributes, buffers and weights."""
        with attributes_kept(self._modules, buffers=True):
            try:
                yield
            finally:
                self.put_weights_back()

    def _called(self, inputs: Tensors) -> Tensors:
        _, outputs = self._recorded(inputs)
        self.needed_behind = tuple(output.requires_grad for output in outputs)
        return tuple(output.detach() for output in outputs)

    def _recorded(self, inputs: Tensors) -> tuple[Tensors, Tensors]:
        """The inputs as leaves of a graph, and what the layer makes of them."""
        grad = torch.is_grad_enabled()
        leaves = tuple(
            tensor.detach().clone().requires_grad_(grad and needed)
            for tensor, needed in zip(inputs, self._needed, strict=True)
        )
        given = tuple(leaf.clone() for leaf in leaves)  # which a layer may change in place, as no leaf may be
        versions = [tensor._version for tensor in given]
        try:
            outputs = self._function(given[0] if len(given) == 1 else given)
            outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        except Exception as error:
            raise LayerRaisedError from error
        if not all(isinstance(output, Tensor) for output in outputs):
            raise LayerRaisedError("it hands on something else than tensors, which is refused elsewhere")
        self._given.note(given, versions, outputs)
        return leaves, outputs

    def _look_at_gradients(
        self,
        passed: Tensors,
        parts: _Parts,
        whole: Tensors,
        following: _Parts,
        draws: bool,
        restore: Callable[[], None],
    ) -> None:
        """Name a layer whose gradient for a sample depends on other samples, and what its backward keeps."""
        ways = []
        for own, between in ((passed, parts), (whole, following)):
            halves = self._halves(own, between)
            if between.alone is None or halves is None:
                return  # it is not known where either half stands
            # Nor where rows of a half alone are others, as of queries that are the same for all samples.
            is_run_alone = between is parts or not draws
            pairs = zip((*halves[0], *halves[1]), (*between.alone[0], *between.alone[1]), strict=True)
            if is_run_alone and any(_differ_by_more(one, other) for one, other in pairs):
                return
            ways.append(Halves(between.alone, tuple(map(grown_dim, own, between.alone[0]))))
        parameters = [weight for module in self._modules for weight in module.parameters() if weight.requires_grad]
        if not any(self.needed_behind):
            return
        run = BackwardRun(self._recorded, restore, parameters)

        def run_anew(inputs: Tensors, directions: Directions) -> Gradients:
            with self._state_kept():
                return run(inputs, directions)

        try:
            with self._state_kept():
                first = run(passed, ways[1].directions())
                between_runs = dict(self._kept())
                second = run(passed, ways[1].directions())
                after = dict(self._kept())
            changed = [name for name, value in after.items() if not _are_same(value, between_runs.get(name))]
            is_known = bool(changed) or not first.differs_from(second)
            changed = changed if is_known else [f"something in {self.shown}"]
            self._found.keeping.extend(name for name in changed if name not in self._found.keeping)
            depends = is_known and gradients_depend_on_others(run_anew, first, passed, *ways, draws=draws)
        except Exception:  # it is told where the layer runs for good
            return
        if depends:
            self._found.mixing_gradients.append(self.shown)

    def _look_at_decisions(self, passed: Tensors, restore: Callable[[], None]) -> None:
        restore()
        try:
            with self._state_kept(), torch.no_grad():
                lines = lines_that_decide(self._recorded, passed)
        except Exception:  # code that runs on nothing but plain tensors is not watched
            return
        if lines:
            self._found.deciding.append(f"{self.shown}, {', '.join(lines)}")

    def _alone(self, parts: _Parts, restore: Callable[[], None]) -> tuple[Tensors, Tensors] | None:
        if parts.alone is None:
            return None
        try:
            return self._run(parts.alone[0], restore)[0], self._run(parts.alone[1], restore)[0]
        except Exception:  # such as statistics of a single sample
            return None

    def _halves(self, whole: Tensors, parts: _Parts) -> tuple[Tensors, Tensors] | None:
        """What the layer gives either half in the whole; None where it is not known which part of it that is."""
        parted = self._parted(whole, parts)
        if parted is None:
            return None
        pairs = zip(
            (*parted.other_first, *parted.other_second), (*parts.other_first, *parts.other_second), strict=True
        )
        return None if any(_differ(own, other) for own, other in pairs) else parted.alone

    def _parted(self, whole: Tensors, parts: _Parts) -> _Parts | None:
        """What the next layer would get if this one had not mixed samples."""
        if parts.alone is None:
            return None
        tensors: list[Tensors] = []
        for own, first, second, half in zip(
            whole, parts.other_first, parts.other_second, parts.alone[0], strict=True
        ):
            dim = grown_dim(own, half)
            if dim is None:
                tensors.append((own, own, own, own))
                continue
            if dim < 0 or own.shape[dim] != 2 * half.shape[dim]:
                return None
            one, other = own.split(half.shape[dim], dim)
            of_first, of_second = first.split(half.shape[dim], dim)[0], second.split(half.shape[dim], dim)[1]
            tensors.append((torch.cat([of_first, other], dim), torch.cat([one, of_second], dim), one, other))
        other_first, other_second, *alone = map(tuple, zip(*tensors, strict=True))
        return _Parts(other_first, other_second, (alone[0], alone[1]))

    def _look_twice(self, inputs: Tensors, restore: Callable[[], None]) -> bool:
        """Name what the layer keeps from one run to the next; return whether that can be put back."""
        restore()
        with self._state_kept():
            before = dict(self._kept())
            first = self._called(inputs)
            between = dict(self._kept())
            restore()
            second = self._called(inputs)
            after = dict(self._kept())
        changed = [name for name, value in after.items() if not _are_same(value, between.get(name))]
        is_known = True
        if not changed and any(map(_differ, first, second)):
            changed = [name for name, value in between.items() if not _are_same(value, before.get(name))]
            is_known = bool(changed)
            changed = changed or [f"something in {self.shown}"]
        self._found.keeping.extend(name for name in changed if name not in self._found.keeping)
        return is_known

    def _kept(self) -> Iterator[tuple[str, Numbers]]:
        for module in self._modules:
            for path, part in module.named_modules():
                if part in self._statistics or _is_captured(part):
                    continue
                for name, value in (*attributes_of(part).items(), *part._buffers.items()):
                    if not isinstance(value, nn.Parameter):
                        yield ".".join(filter(None, (self._name, path, name))), numbers_of(_plain(value))


def _is_captured(part: nn.Module) -> bool:
    """Whether this is a layer that was found: its attributes are its code, and the user's modules are below."""
    return any(kind.__module__.startswith("deepspeed_partition.capture.") for kind in type(part).__mro__)


def _plain(value: Any, depth: int = DEPTH) -> Any:
    """A value whose numbers can be read: an object of the program as a dict, a generator as a number."""
    if isinstance(value, GENERATORS):
        state = generator_state(value)
        return zlib.crc32(state.numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state))
    if isinstance(value, deque | set):
        return [_plain(child, depth) for child in value]
    if isinstance(value, list | tuple):
        is_long = len(value) > 1000
        return len(value) if is_long else [_plain(child, depth) for child in value]
    if isinstance(value, dict):
        return {key: _plain(child, depth) for key, child in value.items()}
    table = members_of(value) if depth else None
    return value if table is None else {key: _plain(child, depth - 1) for key, child in table.items()}


def _are_same(value: Numbers, other: Numbers | None) -> bool:
    if other is None or value.keys() != other.keys():
        return False
    pairs = [(value[key], other[key]) for key in value]
    return all(a.shape == b.shape and (torch.equal(a, b) or _is_rounding(a, b)) for a, b in pairs)


def _is_rounding(a: Tensor, b: Tensor) -> bool:
    are_whole = bool((a == a.round()).all()) and bool((b == b.round()).all())
    return not are_whole and torch.allclose(a, b, rtol=EXACT, atol=1e-12, equal_nan=True)


def _places(restore: Callable[[], None] = lambda: None) -> list[int]:
    """Where Python's and NumPy's common generators are, once they are put back."""
    restore()
    return [zlib.crc32(pickle.dumps(generator_state(generator))) for generator in COMMON.values()]


def dropouts(modules: Sequence[nn.Module], names: Mapping[nn.Module, str]) -> Iterator[str]:
    """The modules of torch's that leave numbers out at random in the mode that they are in, with their kind."""
    for part in (part for module in modules for part in module.modules()):
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.training and part.p and part in names:
            yield f"{names[part]} ({type(part).__name__})"


def _has_statistics(part: nn.Module) -> bool:
    return any(True for found in (layers_of_statistics, layers_of_instances) for _ in found(iter([("", part)])))


def _changes(own: Tensor, other: Tensor, share: float = 0.1) -> Tensor:
    """Where two tensors differ by more than rounding."""
    if not own.is_floating_point():
        return own != other
    left, right = own.double(), other.double()
    finite = left[left.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    tolerance = share * TOLERANCES.get(own.dtype, 1e-1) * largest
    same = (left == right) | (left.isnan() & right.isnan()) | ((left - right).abs() <= tolerance)
    return ~same


def _differ(own: Tensor, other: Tensor) -> bool:
    return own.shape != other.shape or bool(_changes(own, other).any())


def _depends_on_both(own: Tensor, other_first: Tensor, other_second: Tensor) -> bool:
    """Whether something depends on both halves. A single number, such as an auxiliary loss, is for the step."""
    if own.numel() <= 1:
        return False
    return bool((_changes(own, other_first) & _changes(own, other_second)).any())


def _number_of(samples: FewSamples) -> int:
    """The number of samples, as far as the lengths of the dimensions that count them tell."""
    pairs = zip(samples.inputs, samples.dims or (), strict=False)
    return math.gcd(*(tensor.shape[dim] for tensor, dim in pairs if dim is not None))


def _are_together(whole: Tensors, first: Tensors, second: Tensors, num_samples: int) -> bool:
    """Whether what a layer gives for either half is what it gives for all samples, each at its place."""
    for own, one, other in zip(whole, first, second, strict=True):
        if own.numel() != one.numel() + other.numel() or own.numel() <= 1 or own.is_complex():
            continue  # the same for all samples, such as a mask
        dim = grown_dim(own, one)
        if dim is None or dim < 0 or own.shape[dim] != 2 * one.shape[dim]:
            together = torch.cat([one.reshape(-1), other.reshape(-1)])
            if _differ_by_more(own.reshape(-1).sort().values, together.sort().values):
                return False
        elif all(_differ_by_more(own, each) for each in _joined(one, other, dim, num_samples)):
            return False
    return True


def _joined(first: Tensor, second: Tensor, dim: int, num_samples: int) -> Iterator[Tensor]:
    """What two halves make together: one behind the other, or in turns, as where a sequence comes before samples.

    Each sample has the same number of rows, and a turn has at least one row of each sample.
    """
    length = first.shape[dim]
    rows_of_sample = max(2 * length // max(num_samples, 1), 1)
    for turns in range(1, rows_of_sample + 1):
        if length % turns == 0 and rows_of_sample % turns == 0:
            halves = [half.unflatten(dim, (turns, length // turns)) for half in (first, second)]
            yield torch.cat(halves, dim + 1).flatten(dim, dim + 1)


def _differ_by_more(own: Tensor, other: Tensor) -> bool:
    """Whether tensors differ by more than products of other shapes may."""
    return bool(_changes(own, other, share=1.0).any())

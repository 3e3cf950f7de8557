"""A backward in two halves: the gradient of the input, sent on at once, and those of the weights, any time later.

    out <- N3 <- N2 <- N1 <- input         nodes of the graph on a way from the output to the input
            |           |
            T3          T1                 what leads to weights and not to the input
            |           |
            w3          w1

The first half (``Halves.first``) runs N3, N2 and N1 for their gradients to the left alone, and keeps the gradients
that come to those with a branch to weights, here N3 and N1. The second half (``Halves.second``) gives each of them
its gradient once more, for the branches alone, and accumulates. So no gradient is computed twice, each weight is
given its gradient of a micro-batch at once, as in an undivided backward, and every hook is called once.

- What only the first half needs of the saved tensors is freed as soon as a node has used it: tensors are saved
  through hooks (``torch.autograd.graph.saved_tensors_hooks``), since a graph lets go of all or nothing.
- A function in Python (``torch.autograd.Function``) on the way to the input runs once, in the first half, with all
  of its gradients: it may do anything in its backward.
- A weight that several nodes use is summed up in the second half.
- Where a graph cannot be divided, ``why_not`` of the survey says why, and ``Halves.whole`` runs it undivided.

Sources: zero-bubble pipelines (Qi et al., 2024) for the two halves.
"""

from __future__ import annotations

import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from deepspeed_partition.tensor_values import version_of

CAN_SPLIT = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)
"""Whether this torch runs a backward from a place in the graph to a place in the graph."""
TOO_OLD = "torch is older than 2.6"
_BYTES_AT_ONCE = 256 * 1024
"""Branches whose weights have no more than so many bytes together are run at once: a run takes some time."""
_OF_TORCH = re.compile(r"\w+Backward\d+")
"""Names of nodes that read each saved tensor once when they run."""

Tensors = Any
"""A tensor, or a tuple with tensors in it."""


class _Saved:
    """A tensor that the graph has saved, until nobody needs it any more."""

    __slots__ = ("__weakref__", "block", "tensor", "version")

    def __init__(self, tensor: torch.Tensor | None, block: _Block | None = None) -> None:
        self.tensor, self.block = tensor, block
        self.version = None if tensor is None else version_of(tensor)


class _Block:
    """Layers that run again when the backward asks for the first tensor that they saved.

    Args:
        run: runs the layers; generators other than torch's are its business.
        tensors: the input.
    """

    def __init__(self, run: Callable[..., Any], tensors: Sequence[Any]) -> None:
        self._run: Callable[..., Any] | None = run
        self._tensors = [each.detach() if isinstance(each, torch.Tensor) else each for each in tensors]
        self._need = [isinstance(each, torch.Tensor) and each.requires_grad for each in tensors]
        self._kept: list[weakref.ref[_Saved]] = []
        self._drawn = _default_generators()
        self._device_type = next((each.device.type for each in tensors if isinstance(each, torch.Tensor)), "cpu")
        self._autocast = torch.is_autocast_enabled(self._device_type)
        self._autocast_dtype = torch.get_autocast_dtype(self._device_type)

    def pack(self, _: torch.Tensor) -> _Saved:
        saved = _Saved(None, self)
        self._kept.append(weakref.ref(saved))
        return saved

    def run_again(self) -> None:
        run, self._run = self._run, None
        if run is None:
            raise RuntimeError(
                "layers that ran again did not save what they had saved at first: their forward must do the same "
                "in both runs"
            )
        num_saved = 0

        def keep(tensor: torch.Tensor) -> None:
            nonlocal num_saved
            saved = self._kept[num_saved]() if num_saved < len(self._kept) else None
            num_saved += 1
            if saved is not None:
                saved.tensor, saved.version = tensor.detach(), None

        tensors = [
            each.detach().requires_grad_(needs) if isinstance(each, torch.Tensor) else each
            for each, needs in zip(self._tensors, self._need, strict=True)
        ]
        self._tensors = []
        present = _default_generators()
        self._drawn()
        try:
            with (
                torch.enable_grad(),
                torch.autocast(self._device_type, dtype=self._autocast_dtype, enabled=self._autocast),
                saved_tensors_hooks(keep, _never),
            ):
                run(*tensors)
        finally:
            present()


def _never(_: object) -> torch.Tensor:
    raise RuntimeError("layers that run again for a backward run no backward themselves")


def _default_generators() -> Callable[[], None]:
    """Return a function that puts torch's default generators back to where they are now."""
    on_cpu = torch.get_rng_state()
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore() -> None:
        torch.set_rng_state(on_cpu)
        if on_devices is not None:
            torch.cuda.set_rng_state_all(on_devices)

    return restore


class _Cut(torch.autograd.Function):
    """Ends a graph behind the first layers: what comes before is left to the second half."""

    @staticmethod
    def forward(
        ctx: Any, _: torch.Tensor, caught: list[torch.Tensor | None], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.caught = caught
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        ctx.caught[:] = gradients
        return (None,) * (2 + len(gradients))


class _Driver(torch.autograd.Function):
    """Runs a function within a backward that was asked for certain gradients: others are not computed there."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, run: Callable[[], None]) -> torch.Tensor:
        ctx.run = run
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, None]:
        ctx.run()
        return None, None


class _Source:
    """A place where gradients enter the second half."""

    def __init__(self, edge: GradientEdge, gradient: torch.Tensor | None = None) -> None:
        self.edge, self.gradient = edge, gradient


class Halves:
    """The backward of one run of layers on one micro-batch, in two halves.

    Call ``saving`` around the forward and ``begins_at`` within it, on the input; then ``survey``, and by what it
    says either ``first`` and ``second``, or ``whole``.
    """

    def __init__(self) -> None:
        self._begin: list[GradientEdge] = []
        self._end_of_first: list[GradientEdge | None] = []
        """Where the graph of the first layers ends, where it was cut."""
        self._caught: list[torch.Tensor | None] = []
        self.is_cut = False
        self._recomputes_itself = False
        self._captured: dict[Any, tuple[torch.Tensor | None, ...]] = {}
        """Gradients that came to nodes with branches to weights, in the order in which they ran."""
        self._branches: dict[Any, list[int]] = {}
        """The outputs of nodes on a way to the input that lead to weights alone."""
        self._of_python: set[Any] = set()
        """Those of them that are functions in Python."""
        self._known: list[_Source] = []
        """Sources whose gradient is there."""
        self._roots: list[tuple[Any, torch.Tensor | None]] = []
        self._used: list[_Saved] = []
        """Saved tensors that nodes may read more than once until they are through."""
        self._on_way: set[Any] = set()
        self._is_first = False
        """Whether the first half runs."""
        self._is_once_more = False
        """Whether nodes run for the second time."""
        self._all: weakref.WeakSet[_Saved] = weakref.WeakSet()

    # The forward

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Save what a forward keeps so that the first half can let go of it."""
        plain = torch.utils.checkpoint._checkpoint_without_reentrant_generator

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._recomputes_itself = True
            return plain(*args, **kwargs)

        torch.utils.checkpoint._checkpoint_without_reentrant_generator = noted
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            torch.utils.checkpoint._checkpoint_without_reentrant_generator = plain

    def begins_at(self, tensors: Tensors) -> None:
        """Note the tensors, floating ones and others, whose gradients the first half is to make."""
        whole = tensors if isinstance(tensors, tuple) else (tensors,)
        floating = [each for each in whole if each.is_floating_point()]
        self._begin = [get_gradient_edge(each) for each in floating if each.requires_grad]

    def cut_behind_first(self, outputs: Tensors) -> Tensors:
        """End the graph behind layers whose input needs no gradient; return their outputs, of another graph.

        Called behind each layer, until one has an output that needs a gradient: the layers up to it have no first
        half, and what comes behind them has one.
        """
        if self.is_cut or not CAN_SPLIT or not torch.is_grad_enabled():
            return outputs
        whole = outputs if isinstance(outputs, tuple) else (outputs,)
        needed = [each for each in whole if isinstance(each, torch.Tensor) and each.requires_grad]
        if not needed:
            return outputs
        self.is_cut = True
        self._end_of_first = [get_gradient_edge(each) for each in needed]
        self._caught = [None] * len(needed)
        anchor = torch.zeros((), requires_grad=True)
        behind = iter(_Cut.apply(anchor, self._caught, *(each.detach() for each in needed)))
        own = tuple(
            next(behind) if isinstance(each, torch.Tensor) and each.requires_grad else each for each in whole
        )
        self.begins_at(tuple(each for each in own if isinstance(each, torch.Tensor)))
        return own if isinstance(outputs, tuple) else own[0]

    def checkpoint(self, run: Callable[..., Any], *tensors: Any) -> Any:
        """Run layers that keep nothing but their input, and run again in the backward."""
        block = _Block(run, tensors)
        with saved_tensors_hooks(block.pack, self._unpack):
            return run(*tensors)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        # A node that saves its own output would otherwise hold itself: for ever, where no backward comes to it.
        saved = _Saved(tensor if tensor.grad_fn is None else tensor.detach())
        self._all.add(saved)
        return saved

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        if saved.tensor is None and saved.block is not None:
            saved.block.run_again()
            saved.block = None
        tensor = saved.tensor
        if tensor is None:
            raise RuntimeError("a saved tensor was asked for once more, in the same half of a backward")
        if saved.version is not None and tensor._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a {tensor.dtype} of the shape {tuple(tensor.shape)} is at version {tensor._version}; expected "
                f"version {saved.version} instead"
            )
        if self._is_once_more:
            self._used.append(saved)
            return tensor
        if not self._is_first:
            return tensor
        node = torch._C._current_autograd_node()
        if node is None or (node in self._branches and node not in self._of_python):
            return tensor
        if _OF_TORCH.fullmatch(type(node).__name__):
            saved.tensor = saved.block = None
        else:
            self._used.append(saved)
        return tensor

    def _free_used(self) -> None:
        for saved in self._used:
            saved.tensor = None
        self._used.clear()

    def kept(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that are kept now: saved ones, and gradients that wait for the second half."""
        yield from (saved.tensor for saved in self._all if saved.tensor is not None)
        for gradients in self._captured.values():
            yield from (gradient for gradient in gradients if gradient is not None)
        yield from (each.gradient for each in self._known if each.gradient is not None)

    # The backward

    def survey(self, roots: Sequence[Any]) -> str | None:
        """Find out how the graph can be divided.

        Args:
            roots: tensors, or places in the graph, at which the backward begins.

        Returns:
            Why it cannot be, in words that go behind a colon; None where it can.
        """
        if not CAN_SPLIT:
            return TOO_OLD
        if self._recomputes_itself:
            return "a layer recomputes itself (torch.utils.checkpoint)"
        targets = {edge.node for edge in self._begin}
        on_way, has_weights = _reaching(targets, [edge.node for edge in map(_edge_of, roots)])
        for node, reaches in on_way.items():
            name = type(node).__name__
            if name.startswith("CheckpointFunction"):
                return "a layer recomputes itself (torch.utils.checkpoint, use_reentrant=True)"
            if name.startswith("CompiledFunction"):
                return "a layer is compiled"
            if not reaches:
                continue
            branches = [
                index
                for index, (after, _) in enumerate(node.next_functions)
                if after is not None and after not in targets and has_weights.get(after) and not on_way[after]
            ]
            if branches and name == "CopySlices":
                return "a layer adds weights to a part of a tensor in place"
            if branches:
                self._branches[node] = branches
            if branches and isinstance(node, BackwardCFunction):
                self._of_python.add(node)
        self._on_way = targets | {node for node, reaches in on_way.items() if reaches}
        return None

    def first(self, roots: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Run the first half; return the gradients of what the graph begins at, None where there is none.

        Args:
            roots: those of ``survey``.
            gradients: of the roots; None: of a number, 1.
        """
        edges = [_edge_of(root) for root in roots]
        given = [
            torch.ones_like(root) if gradient is None else gradient
            for root, gradient in zip(roots, gradients, strict=True)
        ]
        both = list(zip(edges, given, strict=True))
        self._known += [_Source(edge, gradient) for edge, gradient in both if edge.node not in self._on_way]
        both = [(edge, gradient) for edge, gradient in both if edge.node in self._on_way]
        if not both:
            return [None] * len(self._begin)
        handles = [self._watched(node, branches) for node, branches in self._branches.items()]
        self._is_first = True
        del given, gradients
        try:
            ends: Sequence[torch.Tensor | None] = Variable._execution_engine.run_backward(
                tuple([edge for edge, _ in both]), tuple([gradient for _, gradient in both]), True, False,
                tuple(self._begin), allow_unreachable=True, accumulate_grad=False,
            )  # fmt: skip
        finally:
            self._is_first = False
            for handle in handles:
                handle.remove()
        self._free_used()
        self._begin, self._on_way = [], set()
        if self._end_of_first:
            self._add_first(ends)
            return []
        return list(ends)

    def _add_first(self, gradients: Sequence[torch.Tensor | None]) -> None:
        both = zip(self._end_of_first, gradients, strict=True)
        self._known += [_Source(edge, each) for edge, each in both if edge is not None and each is not None]
        self._end_of_first = []

    def _watched(self, node: Any, branches: list[int]) -> Any:
        """Keep what the second half needs of a node: the gradients that come to it, or those that it makes."""
        captured, known = self._captured, self._known

        def before(gradients: tuple[torch.Tensor | None, ...]) -> None:
            captured[node] = gradients

        def after(made: tuple[torch.Tensor | None, ...], _: tuple[torch.Tensor | None, ...]) -> None:
            for branch in branches:
                gradient = made[branch]
                if gradient is not None:
                    known.append(_Source(GradientEdge(*node.next_functions[branch]), gradient))

        return node.register_hook(after) if node in self._of_python else node.register_prehook(before)

    def second(self) -> None:
        """Run the second half: weights get their gradients."""
        sources: list[tuple[Any, int, _Source]] = []
        for node in self._captured:
            for branch in self._branches[node]:
                sources.append((node, branch, _Source(GradientEdge(*node.next_functions[branch]))))
        sources += [(None, 0, known) for known in self._known]
        self._known = []
        for group in _groups(sources):
            self._run_group(group)
        self._captured.clear()
        self._branches.clear()

    def _run_group(self, group: list[tuple[Any, int, _Source]]) -> None:
        lazily: dict[Any, list[tuple[int, _Source]]] = defaultdict(list)
        for node, branch, source in group:
            if node is not None:
                lazily[node].append((branch, source))
        if lazily:
            self._run_nodes(lazily)
        roots = [(source.edge, source.gradient) for _, _, source in group if source.gradient is not None]
        for _, _, source in group:
            source.gradient = None
        group.clear()
        lazily.clear()
        if roots:
            _accumulate([edge for edge, _ in roots], [gradient for _, gradient in roots])

    def _run_nodes(self, lazily: dict[Any, list[tuple[int, _Source]]]) -> None:
        """Run nodes once more, for their branches alone and without their hooks."""

        def run() -> None:
            self._is_once_more = True
            for node, branches in lazily.items():
                made = node(*self._captured.pop(node))
                whole = made if isinstance(made, tuple) else (made,)
                for branch, source in branches:
                    source.gradient = whole[branch]

        anchor = torch.zeros((), requires_grad=True)
        with torch.enable_grad():
            root = _Driver.apply(anchor, run)
        wanted = {source.edge: None for branches in lazily.values() for _, source in branches}
        Variable._execution_engine.run_backward(
            (root,), (torch.ones(()),), False, False, (get_gradient_edge(anchor), *wanted), allow_unreachable=True,
            accumulate_grad=False,
        )  # fmt: skip
        self._is_once_more = False
        self._free_used()

    def whole(self, roots: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> None:
        """Run the backward undivided, with what a cut behind the first layers has left over."""
        given = [
            torch.ones_like(root) if gradient is None else gradient
            for root, gradient in zip(roots, gradients, strict=True)
        ]
        _accumulate(roots, given)
        if self._end_of_first:
            self._add_first(self._caught)
            known, self._known = self._known, []
            _accumulate([each.edge for each in known], [each.gradient for each in known])


def _edge_of(root: Any) -> GradientEdge:
    return root if isinstance(root, GradientEdge) else get_gradient_edge(root)


def _accumulate(roots: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> None:
    if roots:
        Variable._execution_engine.run_backward(
            tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
        )


def _reaching(targets: set[Any], roots: Sequence[Any]) -> tuple[dict[Any, bool], dict[Any, bool]]:
    """Return for each node whether a way leads from it to a target, and whether one leads to a weight."""
    on_way: dict[Any, bool] = {}
    has_weights: dict[Any, bool] = {}
    stack = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        after = [each for each, _ in node.next_functions if each is not None and each not in targets]
        if is_done:
            on_way[node] = any(each in targets for each, _ in node.next_functions if each is not None) or any(
                on_way[each] for each in after
            )
            has_weights[node] = type(node).__name__ == "AccumulateGrad" or any(has_weights[each] for each in after)
        elif node not in on_way and node not in targets:
            stack.append((node, True))
            stack += [(each, False) for each in after if each not in on_way]
    return on_way, has_weights


def _groups(sources: list[tuple[Any, int, _Source]]) -> Iterator[list[tuple[Any, int, _Source]]]:
    """Yield sources that must be run at once: those of a node, and those with ways to the same node of the graph.

    So each weight gets its gradient once, and no node runs twice. Small groups are yielded together.
    """
    owner: dict[Any, int] = {}
    parent = list(range(len(sources)))
    num_bytes = [0] * len(sources)

    def find(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for index, (node, _, source) in enumerate(sources):
        stack = [source.edge.node, *([] if node is None else [node])]
        is_own = node
        while stack:
            each = stack.pop()
            if each in owner:
                parent[find(index)] = find(owner[each])
                continue
            owner[each] = index
            if each is not is_own:
                if type(each).__name__ == "AccumulateGrad":
                    num_bytes[index] += each.variable.nbytes
                stack += [after for after, _ in each.next_functions if after is not None]
    grouped: dict[int, list[int]] = {}
    for index in range(len(sources)):
        grouped.setdefault(find(index), []).append(index)
    together: list[tuple[Any, int, _Source]] = []
    so_far = 0
    for indices in grouped.values():
        of_group = sum(num_bytes[index] for index in indices)
        if together and so_far + of_group > _BYTES_AT_ONCE:
            yield together
            together, so_far = [], 0
        together += [sources[index] for index in indices]
        so_far += of_group
    if together:
        yield together

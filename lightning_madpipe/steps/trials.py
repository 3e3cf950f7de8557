"""The step of one batch, tried on all of its outputs and on those of each micro-batch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_partition.engine.pipeline.batch_attempt import OUT_OF_MEMORY
from deepspeed_partition.engine.runtime.collectives import portable
from deepspeed_partition.engine.runtime.first_failure import in_words
from deepspeed_partition.profiling import LiveBytes
from deepspeed_partition.profiling.failed_backward import forget_failed_backward
from lightning_madpipe.compat.elsewhere import ElsewhereError
from lightning_madpipe.module import outside_pipeline
from lightning_madpipe.steps.batch_numbers import LENGTH, NUMBER, BatchNumbers, Use, Watch, other_answers
from lightning_madpipe.steps.batch_runs import WAY_OUT, BatchRun, cut_inputs
from lightning_madpipe.steps.float32_precision import full_precision
from lightning_madpipe.steps.logged_sizes import told_apart
from lightning_madpipe.steps.losses import (
    TOLERANCE,
    Finding,
    Tried,
    Unknown,
    Weight,
    best_of,
    class_weights_of,
    factors_of,
    fits,
    normalized,
    shared_gradients_fit,
    values_of,
    views_of,
    weights_of,
)
from lightning_madpipe.steps.micro_batches import MicroBatch
from lightning_madpipe.steps.step_results import (
    RULES,
    merged_logs,
    merged_results,
    result_name,
    returned_numbers,
    rule_of,
    sizes_logged,
)
from lightning_madpipe.steps.tensor_comparison import as_real, equal, has_gradient
from lightning_madpipe.steps.user_step import NoLossError, UserSteps
from lightning_madpipe.steps.what_steps_leave import StepTraces, Trace, differences, has_twins, unlike

LOW_PRECISION = (torch.bfloat16, torch.float16)
MOST_QUESTIONS = 16
"""Questions of a batch that are answered otherwise, each of which runs the step again."""
COMPARES = "it compares samples, or is weighted by more than one thing"
UNEXPLAINED = "its micro-batches are weighted neither by their samples nor by anything else that was tried"


def try_batch(steps: UserSteps, module: Any, run: BatchRun, is_tuple: bool, *, compares: bool) -> Finding:
    """Find out how the loss of a batch comes from those of its micro-batches, on the last stage in a rehearsal.

    Args:
        run: Whose outputs have come through.
        compares: Whether to do that; else only the cost of the loss is measured.
    """
    steps.drawn_from.clear()
    steps.told_of_draws.add(run.whole.step)  # of what is found here
    with steps.trial():
        finding = _tried(steps, module, run, is_tuple, compares=compares)
    steps.known_draws |= steps.drawn_from
    return dataclasses.replace(finding, drawn_from=tuple(sorted(steps.drawn_from)))


def _tried(steps: UserSteps, module: Any, run: BatchRun, is_tuple: bool, *, compares: bool) -> Finding:
    try:
        joined = steps.join(run, trains=False)
    except ValueError as error:
        return _unknown(Unknown.NOT_JOINED, str(error).removesuffix(f": {WAY_OUT}"))
    floating = [tensor for tensor in joined if tensor.is_floating_point()]
    low = any(tensor.dtype in LOW_PRECISION for tensor in floating)
    try:
        if low and compares:
            # Rounded gradients would hide what differs by less than a percent.
            wide = tuple(tensor.float() if tensor.is_floating_point() else tensor for tensor in joined)
            finding = _compared(steps, module, run, wide, is_tuple, TOLERANCE)
            if finding.unknown is None and finding.why_not is None:
                return dataclasses.replace(finding, **_cost(steps, run, joined, is_tuple))
        tolerance = 2 * max(torch.finfo(tensor.dtype).eps for tensor in floating) if low else TOLERANCE
        finding = Finding() if not compares else _compared(steps, module, run, joined, is_tuple, tolerance)
        if finding.raised is not None:
            forget_failed_backward()
            return finding
        return dataclasses.replace(finding, **_cost(steps, run, joined, is_tuple))
    except OUT_OF_MEMORY as error:
        forget_failed_backward()
        return _unknown(Unknown.NO_TRIAL, f"there is no memory for all outputs of a batch at once ({error})")
    except NoLossError as error:
        return _unknown(Unknown.NO_LOSS, str(error))
    except Exception as error:
        forget_failed_backward()
        return _unknown(Unknown.MEETS_AGAIN, f"it raises {type(error).__name__}: {error}")


def _with_shared(joined: tuple[Tensor, ...], rows: Sequence[Sequence[Tensor | None]]) -> list[tuple[Tensor, ...]]:
    """The outputs of parts: their rows, and what all of them share."""
    return [tuple(tensor if row is None else row for tensor, row in zip(joined, own, strict=True)) for own in rows]


def _unknown(kind: Unknown, why: str, **known: Any) -> Finding:
    return Finding(unknown=kind, why_unknown=why, **known)


@full_precision()  # TF32 rounds a gradient otherwise where the loss has another factor
def _compared(
    steps: UserSteps, module: Any, run: BatchRun, joined: tuple[Tensor, ...], is_tuple: bool, tolerance: float
) -> Finding:
    draws, traces = _Draws(run.whole.seed), StepTraces(steps, module)
    numbers = Watch()
    try:
        with draws:
            whole = steps.try_once(run.whole, joined, is_tuple, numbers.begin)
    except OUT_OF_MEMORY:
        raise
    except Exception as raised:
        if isinstance(raised, NoLossError | ElsewhereError) or len(run.micro_batches) == 1:
            raise
        of_part = _raised_by_parts(steps, run, joined, is_tuple)
        if of_part is not None and in_words(of_part) == in_words(raised):
            raise
        # Where the step is trained, it would raise what it raises for a part, or nothing.
        return _unknown(Unknown.MEETS_AGAIN, f"it raises {in_words(raised)}", raised=portable(raised))
    if draws.are_common:
        steps.drawn_from.add("torch")
    left_by_whole = traces.taken()
    gained_by_whole = traces.gained
    if not numpy.isfinite(whole.loss):
        return _unknown(Unknown.NOT_FINITE, f"it is {whole.loss}")
    if len(run.micro_batches) == 1:
        return Finding()
    outputs = _outputs_of_parts(run, joined)
    # The micro-batches draw what the whole batch has drawn, each its rows.
    alike = [dataclasses.replace(each, seed=run.whole.seed) for each in run.micro_batches]
    pieces = _tried_parts(
        steps, draws, alike, outputs, is_tuple, lambda part: traces.note(part.size), numbers.begin
    )
    if isinstance(pieces, Finding):
        return pieces
    left_by_pieces, traces.losses = traces.taken(), [piece.loss for piece in pieces]
    uneven = [name for name, end in whole.drawn.items() if any(piece.drawn.get(name) != end for piece in pieces)]
    if uneven:
        return Finding(
            why_not=f"it draws from {', '.join(uneven)} otherwise for a batch than for a part of it, such as once "
            "for each sample"
        )
    if draws.are_for_batch and draws.are_for_samples:
        return Finding(draws_for_batch=True, draws_for_samples=True)
    if draws.are_seeded:
        return Finding(
            why_not="it seeds the random numbers that it draws for each sample, and every micro-batch would draw "
            "the same ones"
        )
    if not _passes_rows(whole, pieces, run.sizes):
        return Finding(
            why_not="what it passes to forward() for a batch is not what it passes for its parts together"
        )
    error = _error_of_mean(whole, pieces, run.sizes)
    if not any(gradient is not None and bool(gradient.any()) for gradient in whole.gradients):
        if any(gradient is not None and bool(gradient.any()) for piece in pieces for gradient in piece.gradients):
            return Finding(why_not="it has no gradient where parts of the batch have one", relative_error=error)
        known = {"relative_error": error, "draws_for_batch": draws.are_for_batch}
        return _unknown(Unknown.NO_GRADIENT, "it has no gradient", **known)
    factors = factors_of(whole, pieces, run.cut(whole.gradients), tolerance)
    if factors is None:
        return Finding(why_not=COMPARES, relative_error=error)
    views = views_of([micro_batch.data for micro_batch in run.micro_batches])
    weights = weights_of(views, run.sizes, class_weights_of(outside_pipeline(module)))
    losses = numpy.array([piece.loss for piece in pieces])
    fitting = frozenset(
        key for key, values in weights.items() if fits(factors, losses, whole.loss, values, key, tolerance)
    )
    fitting = frozenset(
        key
        for key in fitting
        if (factors_of_key := normalized(weights[key], key)) is not None
        and shared_gradients_fit(whole, pieces, run.dims, factors_of_key, tolerance)
    )
    if not fitting:
        return Finding(why_not=UNEXPLAINED, relative_error=error)
    found = _as_trained(steps, module, run, joined, is_tuple, tolerance, whole, draws, fitting)
    if isinstance(found, Finding):
        return found
    fitting, trained = found
    left_as_trained = traces.taken()
    differing = differences(traces, left_by_whole, left_by_pieces, left_as_trained)
    bends, may_not = numbers.bends_of_batch(whole.operations)
    left_by: dict[str, str] = {}
    if may_not is None:
        told = {name for name, _ in differing}
        left = _Left(traces, {name: trace for name, trace in left_by_whole.items() if name not in told})
        left.forget(told)
        may_not = _decides(steps, run, joined, is_tuple, tolerance, whole, numbers, left)
        left_by = left.by_lines
    best = best_of(fitting)
    assert best is not None
    shares = normalized(weights[best], best)
    assert shares is not None, "it fits"
    _note_logs(alike, pieces, shares)
    run.whole.log_calls = whole.log_calls
    cuts = [alike, trained] if trained else [alike]
    logs = _logs(run, cuts, tolerance)
    left_out = {name for name, _ in differing} | {str(place) for place in traces.going_on}
    steps.note_left(traces.changes, left_out, gained_by_whole, run.whole.size)
    result_rules, wrong_results = _results(whole.returned, cuts, tolerance)
    logs["log_rules"].update(result_rules)
    return Finding(
        factors=factors,
        fitting=fitting,
        considered=frozenset(weights),
        bends=bends,
        may_not=may_not,
        relative_error=error,
        draws_for_batch=draws.are_for_batch,
        draws_for_samples=draws.are_for_samples,
        means=tuple(traces.means_over(left_by_whole)),
        traces=tuple(differing),
        left_by=left_by,
        **logs,
        wrong_results=wrong_results,
    )


def _tried_parts(
    steps: UserSteps,
    draws: _Draws,
    parts: Sequence[MicroBatch],
    outputs: Sequence[tuple[Tensor, ...]],
    is_tuple: bool,
    note: Callable[[MicroBatch], None] = lambda _: None,
    watched_by: Callable[..., AbstractContextManager[object]] = lambda *_: nullcontext(),
) -> list[Tried] | Finding:
    """Run the step on each part of a batch, on its rows of what the whole batch has drawn.

    Args:
        note: Is told of each part that has run.
        watched_by: A context of each step, for the tensors of its part and the outputs.

    Returns:
        What is found where one of them gives no loss.
    """
    pieces, told = [], steps.told_metrics.for_trial()
    begin, total = 0, sum(part.size for part in parts)
    for part, own in zip(parts, outputs, strict=True):
        try:
            with draws.replayed(begin, part.size, total), told.watching(part):
                pieces.append(steps.try_once(part, own, is_tuple, watched_by))
            told.end(part)
            note(part)
        except OUT_OF_MEMORY:
            raise
        except NoLossError:
            return Finding(why_not="it returns a loss for the batch and none for a part of it")
        except Exception as raised:
            return Finding(why_not=f"for a part of it, it raises {type(raised).__name__}: {raised}")
        begin += part.size
    return pieces


def _note_logs(parts: Sequence[MicroBatch], pieces: Sequence[Tried], shares: numpy.ndarray) -> None:
    for part, piece, share in zip(parts, pieces, shares, strict=True):
        part.log_calls, part.share, part.returned = piece.log_calls, float(share), piece.returned


def _error_of_mean(whole: Tried, pieces: Sequence[Tried], sizes: Sequence[int]) -> float | None:
    """The relative error of the mean over samples; None: of labels that are all missing in a micro-batch."""
    mean = float(sum(piece.loss * size for piece, size in zip(pieces, sizes, strict=True)) / sum(sizes))
    off = abs(mean - whole.loss) / max(abs(whole.loss), 1e-12)
    return off if numpy.isfinite(off) else None


def _as_trained(
    steps: UserSteps,
    module: Any,
    run: BatchRun,
    joined: tuple[Tensor, ...],
    is_tuple: bool,
    tolerance: float,
    whole: Tried,
    draws: _Draws,
    fitting: frozenset[Weight],
) -> tuple[frozenset[Weight], list[MicroBatch]] | Finding:
    """Those of the weights that explain the batch in the micro-batches that it is trained in, too.

    A trial cuts the batch unevenly, to see what grows with the samples, and so may put the one sample whose loss
    is clamped beside another one, with which it is not.

    Returns:
        Also those micro-batches, with what they log; none where the trial's are cut alike. Or what is found
        instead where no weight explains the batch.
    """
    sizes = [micro_batch.size for micro_batch in run.trained_as]
    outputs = None if sizes == run.sizes else _rows_of(run, joined, sizes)
    gradients = None if outputs is None else _rows_of(run, whole.gradients, sizes)
    if outputs is None or gradients is None:
        return fitting, []
    alike = [dataclasses.replace(each, seed=run.whole.seed) for each in run.trained_as]
    pieces = _tried_parts(steps, draws, alike, _with_shared(joined, outputs), is_tuple)
    if isinstance(pieces, Finding):
        return pieces
    error = _error_of_mean(whole, pieces, sizes)
    factors = factors_of(whole, pieces, gradients, tolerance)
    if factors is None:
        return Finding(why_not=COMPARES, relative_error=error)
    views = views_of([micro_batch.data for micro_batch in run.trained_as])
    weights = weights_of(views, sizes, class_weights_of(outside_pipeline(module)))
    losses = numpy.array([piece.loss for piece in pieces])
    still = frozenset(
        key
        for key in fitting
        if (values := values_of(key, weights)) is not None
        and fits(factors, losses, whole.loss, values, key, tolerance)
    )
    best = best_of(still)
    shares = None if best is None else normalized(weights[best], best)
    if shares is not None:
        _note_logs(alike, pieces, shares)
        return still, alike
    return Finding(why_not=UNEXPLAINED, relative_error=error)


def _decides(
    steps: UserSteps,
    run: BatchRun,
    joined: tuple[Tensor, ...],
    is_tuple: bool,
    tolerance: float,
    whole: Tried,
    numbers: Watch,
    left: _Left,
) -> str | None:
    """The question of a batch by whose answer the step goes on otherwise, in words; None if there is none.

    Of an answer by which it only leaves something else on the module ``left`` is told.
    """
    questions = numbers.questions_of_batch()[:MOST_QUESTIONS]
    left.is_looked_at = not steps.looked_at_left.issuperset(questions)
    steps.looked_at_left.update(questions)

    def answered(
        answers: Mapping[Use, Callable[[Any], Any]],
    ) -> tuple[Tried | None, dict[str, Trace | None]]:
        watch = functools.partial(BatchNumbers, answers=answers)
        try:
            tried = steps.try_once(dataclasses.replace(run.whole), joined, is_tuple, watch, is_known=True)
        except OUT_OF_MEMORY:
            raise
        except Exception:  # it does not go on with that answer
            forget_failed_backward()
            left.taken()
            return None, {}
        return tried, left.taken()

    def is_same(tried: Tried | None) -> bool:
        return tried is not None and _is_same(whole, tried, tolerance)

    # Most numbers are only logged, which one run for all of them shows.
    together = [answered(dict(answers)) for answers in _together(questions)]
    if all(is_same(tried) and not others for tried, others in together):
        return None
    again, others = answered({})
    if not is_same(again):  # it does not go on alike twice
        return None
    left.forget(others)
    for use in questions:
        found = [each for answer in other_answers(use) if (each := answered({use: answer}))[0] is not None]
        runs = [tried for tried, _ in found if tried is not None]
        differs = [not is_same(tried) for tried in runs]
        # A number that a loss is divided by makes another one of each.
        is_number = use.function in (NUMBER, LENGTH)
        if any(differs) and (not is_number or not all(differs) or _has_twins(runs, tolerance)):
            return f"it decides by a number of the whole batch in {use.line}"
        left.note(use.line, found, is_number=is_number)
    return None


class _Left:
    """What the step leaves on its module in runs that answer questions of the batch otherwise.

    Args:
        traces: Takes what a run has left.
        whole: What it leaves for the batch, but for what is known to differ by micro-batches.
    """

    def __init__(self, traces: StepTraces, whole: Mapping[str, Trace]) -> None:
        self._traces, self._whole = traces, dict(whole)
        self._not_alike: set[str] = set()
        self.is_looked_at = True
        self.by_lines: dict[str, str] = {}
        """The line that decides what is left, by the name of that."""

    def taken(self) -> dict[str, Trace | None]:
        """What the last run has left otherwise than the batch, or not at all; it is undone."""
        return unlike(self._whole, self._traces.taken_apart()) if self.is_looked_at else {}

    def forget(self, names: Collection[str]) -> None:
        """Say nothing of what is not alike in two runs with the same answers."""
        self._not_alike.update(names)

    def note(self, line: str, found: Sequence[tuple[Any, Mapping[str, Trace | None]]], *, is_number: bool) -> None:
        """Note what a line decides by other answers to its question, given what runs with these have left.

        Args:
            is_number: The answers are numbers. Where each of them leaves another one, it decides nothing.
        """
        for name in {name for _, left in found for name in left} - self._not_alike - self.by_lines.keys():
            others = [left[name] for _, left in found if name in left]
            if not is_number or len(others) < len(found) or has_twins(others):
                self.by_lines[name] = line


def _together(questions: Sequence[Use]) -> Iterator[list[tuple[Use, Callable[[Any], Any]]]]:
    """Other answers to all questions at once, as often as one of them has others."""
    every = [list(other_answers(use)) for use in questions]
    for place in range(max(map(len, every), default=0)):
        yield [(use, answers[min(place, len(answers) - 1)]) for use, answers in zip(questions, every, strict=True)]


def _has_twins(found: Sequence[Tried], tolerance: float) -> bool:
    return any(_is_same(one, other, tolerance) for one, other in itertools.combinations(found, 2))


def _is_same(one: Tried, other: Tried, tolerance: float) -> bool:
    """Whether two runs of a step on the same batch have one loss, and pass the same to the layers."""
    if not abs(one.loss - other.loss) <= tolerance * abs(one.loss):
        return False
    for own, others in ((one.passed, other.passed), (one.gradients, other.gradients)):
        for mine, theirs in zip(own, others, strict=True):
            if (mine is None) != (theirs is None):
                return False
            if isinstance(mine, Tensor) and isinstance(theirs, Tensor) and not torch.equal(mine, theirs):
                wide = [as_real(tensor.detach()).double() for tensor in (mine, theirs)]
                if wide[0].shape != wide[1].shape or not bool(
                    (wide[0] - wide[1]).norm() <= tolerance * wide[0].norm()
                ):
                    return False
    return True


def _rows_of(
    run: BatchRun, tensors: Sequence[Tensor | None], sizes: Sequence[int]
) -> list[tuple[Tensor | None, ...]] | None:
    """Tensors of the shapes of the joined outputs, cut for other micro-batches; None if they cannot be."""
    columns: list[Sequence[Tensor | None]] = []
    total = sum(sizes)
    for tensor, dim in zip(tensors, run.dims, strict=True):
        if tensor is None or dim is None:
            columns.append([None] * len(sizes))
            continue
        length = tensor.shape[dim]
        if any(length * size % total for size in sizes):
            return None
        columns.append(tensor.split([length * size // total for size in sizes], dim))
    return list(zip(*columns, strict=True))


def _outputs_of_parts(run: BatchRun, joined: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    return _with_shared(joined, run.cut(joined))


def _raised_by_parts(
    steps: UserSteps, run: BatchRun, joined: tuple[Tensor, ...], is_tuple: bool
) -> Exception | None:
    """What the step, which failed for the batch, raises for the first of its micro-batches that it fails for."""
    try:
        for micro_batch, own in zip(run.micro_batches, _outputs_of_parts(run, joined), strict=True):
            steps.try_once(micro_batch, own, is_tuple)
    except OUT_OF_MEMORY:
        raise
    except Exception as raised:
        return raised
    return None


def _passes_rows(whole: Tried, pieces: Sequence[Tried], sizes: Sequence[int]) -> bool:
    """Whether the inputs of the batch are those of its micro-batches, one after the other, but for rounding.

    In half precision that may be as much as a statistic of the batch takes from each sample: these are the same.
    """
    tensors = [*whole.passed, *(tensor for piece in pieces for tensor in piece.passed)]
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return False
    try:
        rows = cut_inputs(whole.passed, [tuple(tensor.shape) for tensor in pieces[0].passed], sizes)
    except ValueError:
        return False
    return all(
        len(own) == len(piece.passed)
        and all(
            _are_alike_but_rounded(mine, theirs, batch)
            for mine, theirs, batch in zip(own, piece.passed, whole.passed, strict=True)
        )
        for own, piece in zip(rows, pieces, strict=True)
    )


def _are_alike_but_rounded(mine: Tensor, theirs: Tensor, batch: Tensor) -> bool:
    """Whether samples are the same but for rounding, in proportion to the largest number in each of their places.

    A time in seconds or a mark of -9999 in one place hides no difference in another one. Where all samples of the
    batch are near zero in a place, by chance, it is in proportion to what most other places have at least.
    """
    if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        return False
    if equal(mine, theirs):
        return True
    if not has_gradient(mine) or mine.dtype in LOW_PRECISION or mine.ndim != batch.ndim:
        return False
    size = batch.detach().abs()
    dim = next((dim for dim, length in enumerate(mine.shape) if length != batch.shape[dim]), 0) if mine.ndim else 0
    largest = torch.where(size.isfinite(), size, 0.0).amax(dim, keepdim=mine.ndim > 0)
    some = largest[largest > 0]
    least = some.sort().values[max(0, some.numel() // 10 - 1)] if some.numel() else 0.0
    tolerance = TOLERANCE * torch.finfo(mine.dtype).eps / torch.finfo(torch.float32).eps
    are_close = (mine - theirs).abs() <= tolerance * largest.clamp(min=least)
    return bool((are_close | (mine == theirs) | (mine.isnan() & theirs.isnan())).all())


def _logs(run: BatchRun, cuts: Sequence[Sequence[Any]], tolerance: float) -> dict[str, Any]:
    """How each logged number of the micro-batches gives that of the batch, and those that none does.

    Args:
        cuts: The micro-batches of each way to cut the batch: by chance two rules may give the same in one of them.
    """
    expected = dict(_numbers(merged_logs([run.whole])))
    found = [{rule: dict(_numbers(merged_logs(parts, rule))) for rule in RULES} for parts in cuts]
    names = {call["name"]: rule_of(call) for call in run.whole.log_calls}
    rules: dict[str, frozenset[str]] = {}
    wrong = []
    for key, value in expected.items():
        limit = max(tolerance, 1e-5) * max(abs(value), 1e-6)
        fitting = frozenset(RULES)
        for values in found:
            still = {rule for rule in fitting if abs(values[rule].get(key, numpy.nan) - value) <= limit}
            if not still and fitting:
                wrong.append((key[0], values["samples"].get(key, numpy.nan), value, names[key[0]]))
            fitting &= still
        rules[key[0]] = rules.get(key[0], fitting) & fitting
    logged = [each for micro_batch in cuts[0] for each in sizes_logged(micro_batch.log_calls)]
    constants, counts = told_apart(list(sizes_logged(run.whole.log_calls)), logged)
    return {
        "log_rules": rules,
        "wrong_logs": tuple(wrong),
        "constant_sizes": constants,
        "counted_sizes": counts,
    }


def _results(
    returned: Any, cuts: Sequence[Sequence[MicroBatch]], tolerance: float
) -> tuple[dict[str, frozenset[str]], tuple[tuple[str, float, float], ...]]:
    """How each number that the step returns comes from those of the micro-batches, and those that do not.

    Args:
        returned: What the step returns for the batch.
        cuts: The micro-batches of each way to cut the batch, the one that it is trained in last.

    Returns:
        Nothing is said of what cannot be joined, which is refused where it is trained.
    """
    found = [{rule: merged_results(parts, rule) for rule in RULES} for parts in cuts]
    rules, wrong = {}, []
    for place, value in returned_numbers(returned).items():
        limit = max(tolerance, 1e-5) * max(abs(value), 1e-6)
        numbers = [{rule: each[rule].get(place, numpy.nan) for rule in RULES} for each in found]
        rules[result_name(place)] = fitting = frozenset(
            rule for rule in RULES if all(_is_near(each[rule], value, limit) for each in numbers)
        )
        if not fitting and not numpy.isnan(numbers[-1]["samples"]):
            wrong.append((place, numbers[-1]["samples"], value))
    return rules, tuple(wrong)


def _is_near(found: float, value: float, limit: float) -> bool:
    return abs(found - value) <= limit or found == value or bool(numpy.isnan(found) and numpy.isnan(value))


def _numbers(log_calls: Sequence[Mapping[str, Any]]) -> list[tuple[tuple[str, int], float]]:
    seen: dict[str, int] = {}
    numbers = []
    for call in log_calls:
        seen[call["name"]] = seen.get(call["name"], -1) + 1
        if isinstance(call["value"], float):
            numbers.append(((call["name"], seen[call["name"]]), call["value"]))
    return numbers


def _cost(steps: UserSteps, run: BatchRun, joined: tuple[Tensor, ...], is_tuple: bool) -> dict[str, Any]:
    """Seconds and bytes of the step on the whole batch; the joined outputs are in them."""
    device = joined[0].device
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        seconds = steps.try_once(run.whole, joined, is_tuple).seconds
        made = torch.cuda.max_memory_allocated(device) - before
    else:
        seconds = steps.try_once(run.whole, joined, is_tuple).seconds
        live = LiveBytes()
        with live:
            steps.try_once(run.whole, joined, is_tuple)
        made = live.peak_bytes
    return {"loss_seconds": seconds, "loss_bytes": made}  # with a copy of the outputs, as large as the joined ones


class _Draws(TorchDispatchMode):
    """Random numbers of a step on a batch, which its micro-batches draw again, each the rows of its samples.

    Args:
        seed: The one that a step begins with; where torch has another one, the step has set it.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._drawn: list[tuple[Tensor, ...]] = []
        self._begun: list[bytes | None] = []
        """The state of the user's generator before each draw; None for a draw from torch's own."""
        self._rows: tuple[int, int, int] | None = None
        self._place = 0
        self.are_seeded = False
        """Whether micro-batches draw alike for different samples, because the step seeds what it draws from."""
        self.are_common = False
        """Whether something is drawn from torch's common generator, as a step of a pipeline begins with it."""
        self.are_for_batch = self.are_for_samples = False
        """Whether something is drawn from torch's common generator once for a batch, and for each sample."""

    def replayed(self, begin: int, size: int, total: int) -> _Draws:
        self._rows, self._place = (begin, size, total), 0
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags or "randperm" in str(func):
            return func(*args, **(kwargs or {}))
        begun = _state_of((kwargs or {}).get("generator"))
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple) else (result,)
        if self._rows is None:
            self._drawn.append(tuple(tensor.detach().clone() for tensor in made))
            self._begun.append(begun)
            self.are_common |= begun is None and self._is_unseeded(made[0])
        elif self._place < len(self._drawn):
            self._draw_again(made, begun)
        self._place += 1
        return result

    def _draw_again(self, made: tuple[Tensor, ...], begun: bytes | None) -> None:
        drawn = self._drawn[self._place]
        if self._is_seeded(made[0], begun):
            self.are_seeded |= any(own.shape != whole.shape for own, whole in zip(made, drawn, strict=False))
            return
        if begun is None:
            is_for_samples = any(own.shape != whole.shape for own, whole in zip(made, drawn, strict=False))
            self.are_for_samples |= is_for_samples
            self.are_for_batch |= not is_for_samples
        for own, whole in zip(made, drawn, strict=False):
            self._take(own, whole)

    def _is_seeded(self, own: Tensor, begun: bytes | None) -> bool:
        if begun is not None:  # a generator that is not seeded anew goes on from batch to batch
            return begun == self._begun[self._place]
        return not self._is_unseeded(own)

    def _is_unseeded(self, drawn: Tensor) -> bool:
        on_cpu = drawn.device.type == "cpu"
        return (torch if on_cpu else get_accelerator()).initial_seed() == self._seed

    def _take(self, own: Tensor, whole: Tensor) -> None:
        assert self._rows is not None
        begin, size, total = self._rows
        if own.shape == whole.shape:
            own.copy_(whole)
            return
        for dim, (length, all_of_them) in enumerate(zip(own.shape, whole.shape, strict=False)):
            rest = [
                (a, b) for place, (a, b) in enumerate(zip(own.shape, whole.shape, strict=False)) if place != dim
            ]
            if length * total == all_of_them * size and own.ndim == whole.ndim and all(a == b for a, b in rest):
                own.copy_(whole.narrow(dim, all_of_them * begin // total, length))
                return


def _state_of(generator: torch.Generator | None) -> bytes | None:
    return None if generator is None else generator.get_state().numpy().tobytes()

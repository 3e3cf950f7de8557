"""Profiles of what a user's function makes: the work of ``madpipe profile MODULE:FACTORY``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from deepspeed_partition.capture import layers_as_they_are
from deepspeed_partition.planner.problem import Chain
from deepspeed_partition.profiling.layers import profile_chain
from deepspeed_partition.profiling.sources import said


def profile_factory(
    spec: str,
    *,
    micro_batch_size: int,
    device: str | None = None,
    repeats: int = 5,
    threads: int | None = None,
    progress: bool = True,
) -> Chain:
    """Measure the layers that a factory makes, and return their chain, in seconds and bytes.

    A factory is a function of the micro-batch size, or of nothing. It returns ``(layers, sample)``, or
    ``(layers, sample, loss_fn)``: the arguments of ``profile_chain``. So ``sample`` is one micro-batch of
    inputs, and with a ``loss_fn`` the pair ``(inputs, labels)``. Or it returns ``(model, args, kwargs)``: a model
    as it is, whose ``forward`` is captured with these arguments of one micro-batch::

        def gpt(micro_batch_size):
            layers = [nn.Embedding(256, 64), *(Block(64) for _ in range(8)), nn.Linear(64, 256)]
            return layers, torch.zeros(micro_batch_size, 128, dtype=torch.long)

    Args:
        spec: ``"module:name"``, looked for in the current directory first, or ``"path/to/file.py:name"``.
        micro_batch_size: samples per micro-batch, which the factory is called with.
        device: as for ``profile_chain``.
        repeats: runs of each layer that count.
        progress: show a bar on standard error, where that is a terminal.
        threads: how many threads torch uses on the CPU, during this call.

    Raises:
        ValueError: there is no such factory, it failed, or it returned something else; one sentence says which.
        MemoryError: the device is too small for a layer alone.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"threads is {threads}: at least 1 is needed")
    with _threads(threads):
        layers, sample, loss_fn = made_by(spec, micro_batch_size)
        return profile_chain(
            layers, sample, loss_fn=loss_fn, device=device, name=spec, repeats=repeats, progress=progress
        )


def load_factory(spec: str) -> Callable[..., Any]:
    """Import ``"module:name"`` or ``"file.py:name"``, and return the function; the name may be dotted.

    Raises:
        ValueError: it cannot be found or imported, or is no function.
    """
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise ValueError(f"factory {spec!r} is not of the form MODULE:FACTORY, such as 'models.gpt:small'")
    try:
        module = _load_file(where) if where.endswith(".py") else _load_module(where)
    except (Exception, SystemExit) as error:
        raise ValueError(f"factory {spec!r}: {where} cannot be imported: {said(error)}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"factory {spec!r}: {where} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"factory {spec!r}: {name!r} is a {type(found).__name__}, not a function")
    factory: Callable[..., Any] = found
    return factory


def _load_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:  # not removed again: a factory may import more when called
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _load_file(path: str) -> ModuleType:
    file = Path(path).resolve()
    if not file.is_file():
        raise FileNotFoundError("there is no such file")
    if str(file.parent) not in sys.path:  # as for a script: it may import its neighbours
        sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses and pickle look a class's module up here
    spec.loader.exec_module(module)
    return module


def made_by(spec: str, micro_batch_size: int) -> tuple[Any, Any, Any]:
    """Return layers, a sample and a loss function, or None for that, as a factory makes them.

    Raises:
        ValueError: as ``profile_factory``.
    """
    factory = load_factory(spec)
    arguments = _arguments(factory, spec, micro_batch_size)
    try:
        made = factory(*arguments)
    except (Exception, SystemExit) as error:
        raise ValueError(f"factory {spec!r} failed: {said(error)}") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        what = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
        raise ValueError(
            f"factory {spec!r} returned {what}: it returns (layers, sample), (layers, sample, loss_fn) or "
            "(model, args, kwargs)"
        )
    if len(made) == 3 and isinstance(made[0], nn.Module) and isinstance(made[2], dict):
        return _captured(spec, *made)
    layers, sample, loss_fn = made if len(made) == 3 else (*made, None)
    if loss_fn is not None and not callable(loss_fn):
        raise ValueError(
            f"factory {spec!r} returned a {type(loss_fn).__name__} for loss_fn: it must be a function"
        )
    return layers, sample, loss_fn


def _captured(spec: str, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, None]:
    """The layers of a model as it is, and their sample."""
    try:
        layers = layers_as_they_are(model, tuple(args), kwargs)
    except ValueError as error:
        raise ValueError(f"factory {spec!r}: {said(error)}") from error
    inputs = layers.captured.inputs_of(*args, **kwargs)
    return layers, inputs if len(inputs) > 1 else inputs[0], None


def _arguments(factory: Callable[..., Any], spec: str, micro_batch_size: int) -> tuple[int, ...]:
    try:
        signature = inspect.signature(factory)
    except ValueError:  # written in C: nothing is known of its arguments
        return (micro_batch_size,)
    for arguments in ((micro_batch_size,), ()):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return arguments
    raise ValueError(
        f"factory {spec!r} takes {signature}: it must take the micro-batch size as its only argument, or nothing"
    )


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)

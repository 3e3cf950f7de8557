"""Where copies of weights are looked for, and where not."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelSummary
from torch import nn

from lightning_madpipe.checkpoint.held_objects import inside, walk
from lightning_madpipe.compat.callback_patches import summarize_whole


def modules_in(holder: Any) -> list[nn.Module]:
    begin = ((f"holder.{name}", value) for name, value in vars(holder).items())
    return [value for _, value in walk(begin, set()) if isinstance(value, nn.Module)]


def test_the_model_that_a_summary_shows_is_no_copy():
    """Every run with a model summary and layers that are found was refused: its module was called a copy."""
    callback, whole = ModelSummary(), nn.Linear(2, 2)
    summarize_whole(object(), whole, callback, lambda *_, **__: None)
    assert modules_in(callback) == []


def test_a_module_in_a_partial_of_the_program_is_found():
    callback, teacher = ModelSummary(), nn.Linear(2, 2)
    callback.loss = functools.partial(F.cross_entropy, teacher)
    assert modules_in(callback) == [teacher]


def test_a_class_whose_module_is_no_text_ends_no_search():
    """In a notebook a search met the kernel's sockets, of classes that Cython made, and the run ended."""

    class Socket:
        __module__ = property(lambda self: "zmq")  # type: ignore[assignment]

    callback, teacher = ModelSummary(), nn.Linear(2, 2)
    callback.socket, callback.teacher = Socket(), teacher
    assert modules_in(callback) == [teacher]


class MadeWhenAsked(dict[str, Any]):
    def items(self) -> Any:
        raise ImportError("what a library makes of its keys is not there")


def test_installed_files_are_not_searched() -> None:
    """Through ``import torch`` beside a module the search came to all of the libraries, and to one's error."""
    assert inside(torch) == {} and inside(functools) == {}
    assert inside(sys.modules[__name__])["MadeWhenAsked"] is MadeWhenAsked
    assert inside(MadeWhenAsked(held=1)) == {"held": 1}


def test_a_container_that_makes_its_items_is_not_asked_for_them():
    """A notebook came to transformers' table of models, a dict that imports what is looked at: the run ended."""

    class Table(dict):
        def items(self):
            raise ValueError("could not import a model")

        values = __iter__ = __len__ = items

    callback, teacher = ModelSummary(), nn.Linear(2, 2)
    callback.table, callback.teacher = Table(model=nn.Linear(2, 2)), teacher
    assert modules_in(callback) == [teacher]


def test_attributes_are_read_without_code_of_their_class():
    class Lazy:
        __slots__ = ("__dict__", "empty", "teacher")

        def __getattr__(self, name: str) -> Any:
            raise ValueError(f"{name} could not be imported")

    callback, lazy, teacher = ModelSummary(), Lazy(), nn.Linear(2, 2)
    lazy.teacher, callback.lazy = teacher, lazy
    assert modules_in(callback) == [teacher]

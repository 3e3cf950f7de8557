"""Where copies of weights are looked for, and where not."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import torch.nn.functional as F
from pytorch_lightning.callbacks import ModelSummary
from torch import nn

from deepspeed_partition.capture.outside_layers import _hooks_of
from deepspeed_partition.module_hooks import MODULE_HOOKS
from deepspeed_partition.names_of_forward import names_of_forward
from lightning_madpipe.checkpoint.held_objects import inside, roots, walk
from lightning_madpipe.compat.callback_patches import summarize_whole
from lightning_madpipe.steps.beside_module import BesideModule


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


CODE = """
import pytorch_lightning as pl
from torch import nn

copies, counts = [nn.Linear(2, 2)], {"steps": 0}

def average(kept=[]):
    kept.append(counts["steps"])

average.times = 0
hook = lambda *_: average()

class Net(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        average()
        return copies[0](batch).sum()

    def forward(self, x):
        return x

Net.forward = lambda self, x: self.training_step(x, 0)
"""


def test_names_of_code_that_exec_has_made_in_a_dict_without_a_name_are_searched():
    """Functions of such code belong to no module: the run ended with an AttributeError of ours."""
    names: dict[str, Any] = {}
    exec(CODE, names)
    module = names["Net"]()
    module.child = nn.Linear(2, 2)
    module.child.register_forward_hook(names["hook"])
    assert module.forward.__module__ is None
    found = dict(roots(module, {"self": module}))
    assert found["exec().copies"] is names["copies"]
    assert names["average"] in BesideModule(module, [(names["average"], None)]).reached([]).values()
    assert "training_step" in names_of_forward(type(module)).read
    assert [kind for kind, _ in _hooks_of(module.child, MODULE_HOOKS)]

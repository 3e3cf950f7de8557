"""What is left out of a comparison of layers with ``forward``: hooks that count, and none that compute."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_madpipe.steps.layer_structure import Structure
from lightning_madpipe.steps.module_state import silenced

LIBRARY = """
from torch import nn

class Block(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.register_forward_hook(collect)
        self.collected = []

def collect(module, arguments, output):
    module.collected.append(output)
"""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package of models that seems to be installed."""
    module = ModuleType("library_of_models")
    module.__file__ = str(Path(sysconfig.get_path("purelib")) / "library_of_models" / "__init__.py")
    monkeypatch.setitem(sys.modules, "library_of_models", module)
    exec(LIBRARY, vars(module))
    return module


class Program(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.block, self.own = library.Block(), nn.utils.weight_norm(nn.Linear(2, 2))
        self.counted: list[Any] = []
        self.block.register_forward_hook(lambda *_: self.counted.append(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.own(self.block(x))
        return x + self.block.collected[-1]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_hooks_of_the_library_of_a_model_run_and_those_of_the_program_do_not(library: Any) -> None:
    """The forward() of Mixtral reads what hooks of transformers collect: an IndexError was told of it."""
    program = Program(library)
    program(torch.ones(1, 2))
    with silenced([program]):
        weight = program.own.weight
        assert program(torch.ones(1, 2)).shape == (1, 2)
    assert len(program.counted) == 1
    assert len(program.block.collected) == 2
    assert program.own.weight is not weight, "torch's hook has computed no weight"


def test_hooks_of_the_program_that_is_installed_with_its_model_do_not_run(library: Any) -> None:
    library.Block.training_step = lambda self, batch: self(batch)
    block = library.Block()
    with silenced([block]):
        block(torch.ones(1, 2))
    assert not block.collected


def test_what_the_pipeline_calls_its_own_parts_may_leave_a_rank():
    """Such as a tied weight, of which a plan puts both copies on another rank: it was "another module"."""
    tied, module = nn.Linear(2, 2), nn.Module()
    module.net, module.pipeline_module = nn.Linear(2, 2), nn.Module()
    module.pipeline_module.tied_modules = nn.ModuleDict({"embed": tied})
    layers = [(0, module.net), ("embed", tied)]
    call = SimpleNamespace(existing_modules=lambda: layers, captured=None)
    pipeline = SimpleNamespace(call_of_module=call, parameters=module.net.parameters, forward_funcs=[module.net])
    structure = Structure(module, pipeline, engine=None, wraps=False, refusal=ValueError)
    del module.pipeline_module.tied_modules["embed"]
    structure.check()
    module.net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"self\.net is another module than when this run began"):
        structure.check()

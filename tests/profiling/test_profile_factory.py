"""``madpipe profile MODULE:FACTORY``: what a factory may be, and what is said of one that cannot be used."""

from __future__ import annotations

import sys

import pytest
import torch

from deepspeed_partition.profiling import load_factory, profile_factory

SOURCE = """
import torch
from torch import nn
from neighbour_of_models import WIDTH

def by_size(micro_batch_size):
    return [nn.Linear(WIDTH, 8), nn.ReLU()], torch.zeros(micro_batch_size, WIDTH)

def alone():
    return nn.Sequential(nn.Linear(WIDTH, 8)), (torch.zeros(3, WIDTH), torch.zeros(3, 8)), nn.functional.mse_loss

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(9, 8), nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words, labels=None):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

def as_it_is(size):
    words = torch.zeros(size, 5, dtype=torch.long)
    return Tied(), (words,), {"labels": words}

class Family:
    @staticmethod
    def small(size):
        return by_size(size)

def two(a, b): ...
def fails(size): raise KeyError("no\\nsuch")
def leaves(size): raise SystemExit("bye")
def single(size): return [nn.Linear(8, 8)]
def too_many(size): return 1, 2, 3, 4
def no_loss(size): return [nn.Linear(WIDTH, 8)], (torch.zeros(3, WIDTH), None), 5
def misfit(size): return [nn.Linear(9, 8)], torch.zeros(size, WIDTH)
def one_thread(size): return [lambda x: x + torch.get_num_threads()], torch.zeros(size)
number = 5
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "user_models.py").write_text(SOURCE)
    (tmp_path / "neighbour_of_models.py").write_text("WIDTH = 8\n")
    (tmp_path / "broken_models.py").write_text("import no_such_module_anywhere\n")
    (tmp_path / "unreadable_models.py").write_text("def (:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("user_models", "neighbour_of_models", "broken_models", "unreadable_models"):
        sys.modules.pop(name, None)


QUICK = {"device": "cpu", "repeats": 1, "progress": False}


def test_a_model_as_it_is(models):
    chain = profile_factory("user_models:as_it_is", micro_batch_size=6, **QUICK)
    assert [layer.type for layer in chain.layers] == ["TiedLayer", *["Linear"] * 4, "TiedLayer"]
    assert chain.input_bytes == 2 * 6 * 5 * 8 and chain.layers[0].output_bytes == 6 * 5 * (8 * 4 + 8)


@pytest.mark.parametrize("where", ["user_models", "user_models.py", "./user_models.py"])
def test_a_factory_of_the_micro_batch_size(models, where):
    chain = profile_factory(f"{where}:by_size", micro_batch_size=6, **QUICK)
    assert (chain.num_layers, chain.micro_batch_size, chain.input_bytes) == (2, 6, 4 * 48)
    assert chain.name == f"{where}:by_size"


def test_a_file_elsewhere_finds_its_neighbours(models, monkeypatch):
    monkeypatch.chdir("/")
    assert profile_factory(f"{models}/user_models.py:by_size", micro_batch_size=6, **QUICK).num_layers == 2


def test_a_factory_of_nothing_with_a_loss(models):
    chain = profile_factory("user_models:alone", micro_batch_size=6, **QUICK)
    assert (chain.num_layers, chain.micro_batch_size) == (1, 3)


def test_a_dotted_name(models):
    assert load_factory("user_models:Family.small")(2)[1].shape == (2, 8)


def test_threads_are_those_asked_for_while_it_runs(models):
    before = torch.get_num_threads()
    chain = profile_factory("user_models:one_thread", micro_batch_size=2, threads=1, **QUICK)
    assert chain.hardware.endswith("1 thread")
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("user_models", "is not of the form MODULE:FACTORY"),
        ("user_models:", "is not of the form MODULE:FACTORY"),
        (":by_size", "is not of the form MODULE:FACTORY"),
        ("no_such_models:x", "no_such_models cannot be imported: ModuleNotFoundError"),
        ("no_such_models.py:x", "no_such_models.py cannot be imported: FileNotFoundError"),
        ("broken_models:x", "broken_models cannot be imported: ModuleNotFoundError.*no_such_module_anywhere"),
        ("unreadable_models:x", "unreadable_models cannot be imported: SyntaxError"),
        ("..:x", "cannot be imported"),
        ("user_models:missing", "user_models has no 'missing'"),
        ("user_models:Family.missing", "user_models has no 'Family.missing'"),
        ("user_models:number", "'number' is a int, not a function"),
        ("user_models:two", r"takes \(a, b\): it must take the micro-batch size as its only argument, or nothing"),
        ("user_models:fails", "failed: KeyError: 'no"),
        ("user_models:leaves", "failed: SystemExit: bye"),
        ("user_models:single", r"returned a list: it returns \(layers, sample\), \(layers, sample, loss_fn\) or"),
        ("user_models:too_many", "returned a tuple of 4: it returns"),
        ("user_models:no_loss", "returned a int for loss_fn"),
        ("user_models:misfit", r"layer '0\.Linear' cannot take its input \(6, 8\) float32"),
    ],
)
def test_one_sentence_for_each_mistake(models, spec, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        profile_factory(spec, micro_batch_size=6, **QUICK)
    assert "\n" not in str(caught.value)


def test_bad_threads(models):
    with pytest.raises(ValueError, match="threads is 0: at least 1 is needed"):
        profile_factory("user_models:by_size", micro_batch_size=6, threads=0, **QUICK)

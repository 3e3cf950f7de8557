"""Walks over modules do what torch's own do."""

import copy

import pytest
import torch
from torch import nn

from deepspeed_partition.engine.pipeline.module_walks import (
    clear_gradients,
    have_gradients_of,
    set_mode,
    walks_as_torch,
)


class Frozen(nn.Linear):
    """A layer that stays in the mode of an evaluation."""

    def train(self, mode=True):
        return super().train(False)


class Kept(nn.Module):
    """A layer that keeps its mode elsewhere."""

    @property
    def training(self):
        return self.__dict__.get("_mode", True)

    @training.setter
    def training(self, mode):
        self.__dict__["_mode"] = mode


def model():
    shared = nn.Linear(2, 2)
    made = nn.Sequential(
        shared,
        nn.Sequential(Frozen(2, 2), nn.Dropout(0.5), nn.Sequential(nn.BatchNorm1d(2), shared)),
        Kept(),
        torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))),
    )
    made[1].register_module("absent", None)
    made[1][1].train = lambda mode=True: None
    return made


def modes(module):
    return [(name, each.training) for name, each in module.named_modules()]


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_a_mode_is_set_as_torch_sets_it(before, mode):
    ours, torchs = model(), model()
    for each in (ours, torchs):
        each.train(before)
        each[1][2].train(not before)
        each[2].training = not mode
    set_mode(ours, mode)
    torchs.train(mode)
    assert modes(ours) == modes(torchs)


def test_all_weights_that_train_have_gradients_of_one_type():
    made = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Sequential(nn.Linear(2, 2))), nn.Embedding(3, 2))
    made[0].bias.requires_grad = False
    made.register_parameter("absent", None)
    weights = [each for each in made.parameters() if each.requires_grad]
    assert not have_gradients_of(made, torch.float32)
    for each in weights:
        each.grad = torch.zeros_like(each)
    assert have_gradients_of(made, torch.float32)
    assert not have_gradients_of(made, torch.float64)
    for each in weights:
        one = copy.copy(each.grad)
        each.grad = None
        assert not have_gradients_of(made, torch.float32)
        each.grad = one
    made[2].weight.grad = made[2].weight.grad.to_sparse()
    assert not have_gradients_of(made, torch.float32)
    clear_gradients(made)
    assert all(each.grad is None for each in made.parameters())


def test_a_class_with_a_walk_of_its_own_is_left_to_torch():
    class Own(nn.Sequential):
        def parameters(self, recurse=True):
            return iter(())

    assert walks_as_torch(nn.Sequential)
    assert not walks_as_torch(Own)

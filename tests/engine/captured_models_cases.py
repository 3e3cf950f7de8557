"""Cases: models of several kinds, captured and cut over all ranks, which must train as in one process.

Without dropout the model itself trains in one process. With dropout its layers do, one after the other, each with
the seed that ``seed_layers`` gives it; ``tests/capture`` compares those with the model.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import set_random_seed
from torch import nn

import deepspeed_partition
from deepspeed_partition.capture import layers_as_they_are
from tests.capture import networks
from tests.capture.comparing import tensors_in
from tests.engine.pipelines import BASE_SEED
from tests.engine.running import NUM_MICRO_BATCHES, all_tensors, same, start, train

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is loaded

WORDS, BATCH, NUM_STEPS = 40, 4, 3
TIES = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 3, "n_head": 2, "pad_token_id": 0}
ENCODER_DECODER = {"vocab_size": WORDS, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2,
                   "decoder_start_token_id": 0}  # fmt: skip
EXPERTS = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3,
           "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4,
           "output_router_logits": True, "attention_dropout": 0.1, "pad_token_id": 0}  # fmt: skip
Arguments = dict[str, torch.Tensor]


def hugging_face(name: str, head: str, **sizes: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    configuration = getattr(transformers, f"{name}Config")(**sizes)
    model: nn.Module = getattr(transformers, f"AutoModelFor{head}").from_config(configuration)
    return model.train()


def sentences(number: int, size: int = BATCH) -> Arguments:
    """A right-padded batch, whose length is another one from micro-batch to micro-batch."""
    generator = torch.Generator().manual_seed(number)
    length = 6 + number % 3
    mask = torch.ones(size, length, dtype=torch.long)
    mask[0, length - 2 :] = 0
    words = torch.randint(3, WORDS, mask.shape, generator=generator) * mask
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


def translations(number: int, size: int = BATCH) -> Arguments:
    arguments = sentences(number, size)
    return {**arguments, "labels": arguments["input_ids"].flip(1)[:, 1:].clamp(min=3)}


def images(number: int, size: int = BATCH) -> Arguments:
    generator = torch.Generator().manual_seed(number)
    return {"image": torch.randn(size, 3, 16, 16 + 8 * (number % 2), generator=generator)}


def words(number: int, size: int = BATCH) -> Arguments:
    return {"tokens": sentences(number, size)["input_ids"] % 20}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def loss_of(outputs: Any, _: Any = None) -> torch.Tensor:
    """The model's own loss, where it has one; else the squares of all that it returns."""
    found = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad or not torch.is_grad_enabled()]
    if found[0].dim() == 0:
        return found[0]
    return torch.stack([tensor.float().pow(2).mean() for tensor in found]).sum()


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.LSTM | nn.MultiheadAttention):
            module.dropout = 0.0
        for name in ("attention_dropout", "dropout_rate", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


class Alone:
    """What one process does: losses, and the gradients of each step by the model's names."""

    def __init__(self, model: nn.Module, forward: Callable[[Arguments, int], torch.Tensor]) -> None:
        self.model, self.forward = model, forward
        self.losses: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []

    def train(self, data: Sequence[Sequence[Arguments]]) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        number = 0
        for batch in data:
            optimizer.zero_grad()
            total = 0.0
            for arguments in batch:
                number += 1
                loss = self.forward(arguments, number) / len(batch)
                loss.backward()
                total += loss.item()
            self.losses.append(total)
            named = self.model.named_parameters()
            self.gradients.append({name: each.grad.clone() for name, each in named if each.grad is not None})
            optimizer.step()


def in_turn(layers: Any, arguments: Arguments, number: int) -> torch.Tensor:
    passed: Any = tuple(arguments.values())
    passed = passed if len(passed) > 1 else passed[0]
    for place, layer in enumerate(layers):
        set_random_seed(BASE_SEED * (number + 1) + place)
        passed = layer(passed)
    return loss_of(passed)


def trains_as_in_one_process(
    make: Callable[[], nn.Module], arguments: Callable[..., Arguments], more: dict[str, Any],
    dropout: Sequence[bool] = (False, True), folder: Path | None = None,
) -> None:  # fmt: skip
    data = [
        [arguments(NUM_MICRO_BATCHES * step + k) for k in range(NUM_MICRO_BATCHES)] for step in range(NUM_STEPS)
    ]
    for has_dropout in dropout:
        changed = nn.Module.train if has_dropout else without_dropout
        model = changed(make())
        layers = deepspeed_partition.layers_of(changed(make()), **arguments(0), **more)
        if has_dropout:
            alone = Alone(model, partial(in_turn, layers_as_they_are(model, (), {**arguments(0), **more})))
        else:
            alone = Alone(model, lambda given, _, model=model: loss_of(model(**given, **more)))
        alone.train(data)
        count = dist.get_world_size()
        cut = [round(stage * len(layers) / count) for stage in range(count + 1)]
        engine, _, _ = start(
            layers, cut, {"gradient_clipping": 0.0}, loss_fn=loss_of, seed_layers=has_dropout,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.05),
        )  # fmt: skip
        found: list[dict[str, torch.Tensor]] = []
        engine.before_optimizer_step = lambda e=engine, f=found, names=layers: f.append(gradients_of(e, names))
        batches = [[(given_to(each), torch.zeros(BATCH)) for each in batch] for batch in data]
        same(train(engine, batches), alone.losses)
        for step, (own_gradients, expected) in enumerate(zip(found, alone.gradients, strict=True)):
            assert own_gradients
            for name, gradient in own_gradients.items():
                assert_near(gradient, expected[name], f"step {step}, {name}")
        if folder is not None:
            loads_into_the_model_itself(engine, layers, model, folder)
        if not has_dropout:
            evaluated_alike(engine, alone.model, arguments, more)


def loads_into_the_model_itself(engine: Any, layers: Any, model: nn.Module, folder: Path) -> None:
    """The weights of all ranks are a checkpoint that ``from_pretrained`` takes."""
    own = copy.deepcopy(model)
    own.load_state_dict(layers.model_state_dict(all_tensors(engine)))
    if dist.get_rank():
        return  # Hugging Face saves on the first rank
    own.save_pretrained(folder)
    loaded = type(own).from_pretrained(folder)
    for (name, weight), expected in zip(loaded.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6, msg=name)


def given_to(arguments: Arguments) -> Any:
    """What the first layer takes: a tensor, or a tuple of tensors."""
    tensors = tuple(arguments.values())
    return tensors if len(tensors) > 1 else tensors[0]


def gradients_of(engine: Any, layers: Any) -> dict[str, torch.Tensor]:
    """This rank's gradients, by the model's names."""
    first_names = layers.captured.first_names
    return {
        first_names[layers.model_name(name)]: parameter.grad.detach().clone()
        for name, parameter in engine.module.named_parameters()
        if parameter.grad is not None
    }


def assert_near(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    difference = float((actual - expected).norm() / max(float(expected.norm()), 1e-4))
    assert difference < 1e-5, f"{what}: the gradient differs by {difference:.0e} of its norm"


def evaluated_alike(
    engine: Any, model: nn.Module, arguments: Callable[..., Arguments], more: dict[str, Any]
) -> None:
    """Evaluation with batches of another size, and of other lengths."""
    given = arguments(100, 3)
    model.eval()
    with torch.no_grad():
        expected = float(loss_of(model(**given, **more)))
    found = engine.eval_batch(iter([(given_to(given), torch.zeros(3))] * NUM_MICRO_BATCHES))
    same([float(found)], [expected])


NO_CACHE = {"use_cache": False}


def a_language_model_with_tied_embeddings(folder: Path) -> None:
    make = partial(hugging_face, "GPT2", "CausalLM", **TIES)
    trains_as_in_one_process(make, sentences, NO_CACHE, folder=folder)


def an_encoder_and_a_decoder(_: Path) -> None:
    make = partial(hugging_face, "T5", "Seq2SeqLM", **ENCODER_DECODER)
    trains_as_in_one_process(make, translations, NO_CACHE)


def experts_with_an_auxiliary_loss(_: Path) -> None:
    trains_as_in_one_process(partial(hugging_face, "Mixtral", "CausalLM", **EXPERTS), sentences, NO_CACHE)


def a_network_that_reaches_back(_: Path) -> None:
    trains_as_in_one_process(partial(seeded, networks.UNet), images, {}, dropout=[False])


def a_recurrent_network(_: Path) -> None:
    trains_as_in_one_process(partial(seeded, networks.RecurrentLanguageModel), words, {})


BOTH = [
    a_language_model_with_tied_embeddings, an_encoder_and_a_decoder, experts_with_an_auxiliary_loss,
    a_network_that_reaches_back, a_recurrent_network,
]  # fmt: skip

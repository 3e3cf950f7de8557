"""Cases: models as they are, captured by ``layers_of``, which must train as in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepspeed_partition
from tests.capture import networks
from tests.engine.pipelines import micro_batch
from tests.engine.running import NUM_MICRO_BATCHES, adam, all_tensors, raised, same, start, train

WORDS, WIDTH, LENGTH, BATCH = 12, 8, 6, 4


class LanguageModel(nn.Module):
    """Embedding and head have one weight; a mask is made from the sizes, and the loss is within."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)]
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, padding: Any = None, *, labels: Any = None) -> dict[str, Any]:
        x = self.embed(tokens)
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=x.device).triu(1)
        for block in self.blocks:
            x = block(x, src_mask=causal, src_key_padding_mask=padding)
        logits = self.head(self.norm(x))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel()


def arguments(number: int, length: int = LENGTH) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, WORDS, (BATCH, length), generator=generator)
    padding = torch.zeros(BATCH, length, dtype=torch.bool)
    padding[0, length - 2 :] = True
    return {"tokens": tokens, "padding": padding, "labels": tokens.masked_fill(padding, -100)}


def data(num_steps: int) -> list[list[Any]]:
    """Micro-batches of each step, whose sequences are longer from step to step."""
    numbers = iter(range(10**6))
    return [
        [
            (tuple(arguments(next(numbers), LENGTH + step).values()), torch.zeros(BATCH))
            for _ in range(NUM_MICRO_BATCHES)
        ]
        for step in range(num_steps)
    ]


def loss_of(outputs: tuple[torch.Tensor, ...], _: torch.Tensor) -> torch.Tensor:
    return outputs[0]


def trained_alone(
    batches: list[list[Any]], alone: LanguageModel | None = None, optimizer_of: Any = adam
) -> tuple[LanguageModel, list[float]]:
    alone = alone or model()
    optimizer, losses = optimizer_of(alone), []
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        for (tokens, padding, labels), _ in batch:
            loss = alone(tokens, padding, labels=labels)["loss"] / len(batch)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return alone, losses


def a_model_as_it_is(_: Path) -> None:
    """A tied language model, on sequences of other lengths than it was captured with, also in evaluation."""
    batches = data(4)
    alone, expected = trained_alone(batches)
    layers = deepspeed_partition.layers_of(model(), **arguments(0))
    assert layers.input_names == ["tokens", "padding", "labels"]
    assert layers.output_names == ["loss", "logits"]
    engine, _, _ = start(layers, [0, len(layers) // 2, len(layers)], optimizer=adam, loss_fn=loss_of,
                         seed_layers=False)  # fmt: skip
    same(train(engine, batches), expected)
    alone.eval()
    with torch.no_grad():
        tokens, padding, labels = batches[0][0][0]
        evaluated = float(alone(tokens, padding, labels=labels)["loss"])
    same([float(engine.eval_batch(iter(batches[0][:1] * NUM_MICRO_BATCHES)))], [evaluated])
    own = {name.split(".", 2)[-1] if "tied" in name else name.split(".", 1)[-1]: weight.detach()
           for name, weight in engine.module.named_parameters()}  # fmt: skip
    for name, weight in alone.named_parameters(remove_duplicate=False):
        if name in own and "in_proj_bias" not in name:  # whose gradient is noise, and Adam makes steps of it
            torch.testing.assert_close(own[name], weight.detach(), rtol=1e-4, atol=1e-5)
    assert own and own.keys() <= alone.state_dict().keys()


def a_model_as_it_is_plans_and_moves(_: Path) -> None:
    """The same, measured and planned, and moved in training."""
    batches = data(4)
    _, expected = trained_alone(batches)
    layers = deepspeed_partition.layers_of(model(), **arguments(0))
    engine, _, _ = start(copy.copy(layers), optimizer=adam, loss_fn=loss_of, seed_layers=False)
    same(train(engine, batches[:2]), expected[:2])
    other = [0, 2, len(layers)]
    engine.recut(other if engine.module.parts != other else [0, 3, len(layers)])
    same(train(engine, batches[2:]), expected[2:])


def groups_and_hooks_by_the_models_names(_: Path) -> None:
    """Weights without decay are chosen by the model's names; a hook of the user's runs for every micro-batch."""
    batches = data(3)

    def hooked() -> LanguageModel:
        made = model()
        made.blocks[1].register_forward_hook(lambda module, given, output: output * 1.5)
        return made

    def grouped(named: Any, name_of: Any) -> torch.optim.Optimizer:
        named = list(named)
        kept = [weight for name, weight in named if "norm" in name_of(name) or name_of(name).endswith("bias")]
        ids = {id(weight) for weight in kept}
        rest = [weight for _, weight in named if id(weight) not in ids]
        groups = [{"params": kept, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.5}]
        return torch.optim.SGD([group for group in groups if group["params"]], lr=0.1)

    alone, expected = trained_alone(batches, hooked(), lambda made: grouped(made.named_parameters(), str))
    layers = deepspeed_partition.layers_of(hooked(), **arguments(0))
    engine, _, _ = start(
        layers, [0, len(layers) // 2, len(layers)], loss_fn=loss_of, seed_layers=False,
        optimizer=lambda module: grouped(module.named_parameters(), layers.model_name),
    )  # fmt: skip
    same(train(engine, batches), expected)
    state = layers.model_state_dict(all_tensors(engine))
    torch.testing.assert_close(state, dict(alone.state_dict()), rtol=1e-4, atol=1e-6)


class Scaled(LanguageModel):
    """Multiplies its logits by a number that a program changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, tokens: torch.Tensor, padding: Any = None, *, labels: Any = None) -> dict[str, Any]:
        logits = super().forward(tokens, padding, labels=labels)["logits"] * self.scale
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def a_number_that_the_models_code_reads_changes(_: Path) -> None:
    """It stayed what it was in the capture; each rank records the code again, while weights train."""
    batches, models = data(4), []
    for _number in range(2):
        torch.manual_seed(0)
        models.append(Scaled())
    alone, piped = models

    def descent(module: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.1)

    layers = deepspeed_partition.layers_of(piped, **arguments(0))
    engine, _, _ = start(layers, [0, len(layers) // 2, len(layers)], optimizer=descent, loss_fn=loss_of,
                         seed_layers=False)  # fmt: skip
    for step, scale in enumerate((1.0, 0.5, 0.5, 2.0)):
        alone.scale = piped.scale = scale
        _, expected = trained_alone(batches[step : step + 1], alone, descent)
        same(train(engine, batches[step : step + 1]), expected)


def a_number_that_the_models_code_reads_differs(_: Path) -> None:
    """It was another one on each rank: their layers were of different models, in silence."""
    batches = data(3)
    piped = Scaled()
    layers = deepspeed_partition.layers_of(piped, **arguments(0))
    engine, _, _ = start(layers, [0, len(layers) // 2, len(layers)], optimizer=adam, loss_fn=loss_of,
                         seed_layers=False)  # fmt: skip
    train(engine, batches[:1])
    piped.scale = 1.0 + engine.global_rank
    with raised(RuntimeError, "self.scale is 2.0 on rank 1 and what it was before on rank 0"):
        train(engine, batches[1:2])
    piped.scale = 2.0
    train(engine, batches[2:])


def another_length_than_the_capture_holds_for(_: Path) -> None:
    """All ranks raise, with the line of the model's source, and the next batch trains as if nothing had been."""
    torch.manual_seed(0)
    unrolled = networks.Unrolled()
    alone = copy.deepcopy(unrolled)
    layers = deepspeed_partition.layers_of(unrolled, torch.randn(4, 4, 8))
    engine, _, _ = start(
        layers, [0, 1, len(layers)], {"gradient_clipping": 0.0}, loss_fn=lambda out, _: out.pow(2).mean(),
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1), seed_layers=False,
    )  # fmt: skip
    x, longer = torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(1)), torch.randn(4, 5, 8)
    try:
        engine.train_batch(iter([(longer, torch.zeros(4))] * NUM_MICRO_BATCHES))
    except Exception as error:
        said = f"{error} {error.__cause__}"
        assert "networks.py" in said and "5 and not 4" in said, said
    else:
        raise AssertionError("a capture for one length ran with another one")
    expected = float(alone(x).pow(2).mean().detach())
    same(train(engine, [[(x, torch.zeros(4))] * NUM_MICRO_BATCHES]), [expected])


class Entering(nn.Module):
    def __init__(self, whole: LanguageModel) -> None:
        super().__init__()
        self.embed = whole.embed

    def forward(self, inputs: Any) -> Any:
        tokens, padding, labels = inputs
        return self.embed(tokens), padding, labels


class Running(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, inputs: Any) -> Any:
        x, padding, labels = inputs
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.block(x, src_mask=causal, src_key_padding_mask=padding), padding, labels


class Leaving(nn.Module):
    def __init__(self, whole: LanguageModel) -> None:
        super().__init__()
        self.norm, self.head = whole.norm, whole.head

    def forward(self, inputs: Any) -> Any:
        x, _, labels = inputs
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits


def half_precision_is_that_of_layers_by_hand(_: Path) -> None:
    """Losses in bf16 were 1e-4 away from one process: DeepSpeed rounds so, whoever wrote the layers."""
    batches = data(3)

    def untied() -> LanguageModel:
        made = model()
        made.head.weight = nn.Parameter(made.head.weight.detach().clone())
        return made

    def by_hand() -> list[nn.Module]:
        made = untied()
        return [Entering(made), *map(Running, made.blocks), Leaving(made)]

    found = []
    for make in (by_hand, lambda: deepspeed_partition.layers_of(untied(), **arguments(0))):
        layers = make()
        engine, _, _ = start(
            layers, [0, len(layers) // 2, len(layers)], {"bf16": {"enabled": True}, "gradient_clipping": 0.0},
            loss_fn=loss_of, seed_layers=False,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.05),
        )  # fmt: skip
        found.append(train(engine, batches))
    assert found[0] == found[1], found
    half = untied().bfloat16()
    first = [float(half(*given[:2], labels=given[2])["loss"].detach()) for given, _ in batches[0]]
    same(found[1][:1], [sum(first) / len(first)], digits=2**-8)  # whose mean is taken in bf16


class Residual(nn.Module):
    """Blocks of which the first ones, and one in between, are frozen."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(8)]
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(8, 4)
        self.blocks[:4].requires_grad_(False)
        self.blocks[6].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Gated(Residual):
    """Hands on what is detached behind the frozen block, and what one computes without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[:4].requires_grad_(True)
        self.teacher = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        for place, block in enumerate(self.blocks):
            x = x + block(x)
            if place == 6:
                gate = x.detach()
        return self.head(x * gate.tanh() + target)


def weights_that_are_unfrozen_later(_: Path) -> None:
    """Layers that were captured when they were frozen send no gradients to them: they never trained."""
    batches = [[micro_batch(4 * step + number) for number in range(4)] for step in range(3)]

    def begin(layers: Any) -> Any:
        return start(layers, [0, 5, len(layers)], seed_layers=False, optimizer=adam)[0]

    words = "has a gradient now, and had none when layers_of() captured the model"
    net = Residual()
    layers = deepspeed_partition.layers_of(net, batches[0][0][0])
    net.requires_grad_(True)
    with raised(RuntimeError, words, "call layers_of() when all weights"):
        begin(layers)
    net = Residual()
    engine = begin(deepspeed_partition.layers_of(net, batches[0][0][0]))
    train(engine, batches[:1])
    net.blocks[6].requires_grad_(True)  # behind weights that are trained
    train(engine, batches[1:2])
    net.requires_grad_(True)
    with raised(RuntimeError, words):
        train(engine, batches[2:])
    net = Gated()
    layers = deepspeed_partition.layers_of(net, batches[0][0][0])
    net.requires_grad_(True)
    train(begin(layers), batches[:1])


CASES = [
    weights_that_are_unfrozen_later,
    a_number_that_the_models_code_reads_differs,
    a_model_as_it_is, a_model_as_it_is_plans_and_moves, groups_and_hooks_by_the_models_names,
    a_number_that_the_models_code_reads_changes, another_length_than_the_capture_holds_for,
    half_precision_is_that_of_layers_by_hand,
]  # fmt: skip

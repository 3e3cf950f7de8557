"""Plan captured layers, and layers of the same model that were written by hand: is the cut found as good?

Both lists run the same operations, so that both are told the same times: every operation is timed wherever it
runs, in both lists in turn, and the shortest time for these shapes counts wherever it stands. Sizes are measured
layer by layer.

    python examples/benchmarks/any_model/plans.py [MODEL ...] [--out results/plans.json]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[3]))

import torch
from models import import_torchvision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_partition import Chain, InfeasibleError, Platform, make_plan
from deepspeed_partition.capture import layers_as_they_are
from deepspeed_partition.capture.structure import flatten
from deepspeed_partition.profiling import profile_chain

DEVICES = (2, 4, 8)
MICRO_BATCHES_PER_DEVICE = 4
TRANSFER = 0.02
"""Share of a micro-batch's computation that the median boundary of the list by hand takes to be sent."""
TIGHT = 1.1
"""Memory of a device under which plans are tight, as a multiple of the least that the list by hand needs."""


@dataclass
class Model:
    """A model as it is, the same model as a list, and a micro-batch."""

    model: nn.Module
    by_hand: list[nn.Module]
    arguments: dict[str, Any]
    labels: torch.Tensor
    loss_fn: Callable[[Any, torch.Tensor], torch.Tensor]


# Layers written by hand


class Calls(nn.Module):
    """A layer that calls modules of a model as its author would have written it."""

    def __init__(self, call: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.call = call
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, inputs: Any) -> Any:
        return self.call(self, inputs)


def next_words(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    logits = logits[0] if isinstance(logits, tuple) else logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def classes(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, labels)


SIZES = {"vocab_size": 2048, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def gpt(num_layers: int = 12) -> Model:
    import transformers

    configuration = transformers.GPT2Config(**SIZES, n_embd=192, n_layer=num_layers, n_head=4)
    model = transformers.GPT2LMHeadModel(configuration).train()
    body = model.transformer

    def enter(layer: Any, words: torch.Tensor) -> torch.Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        return layer.drop(layer.wte(words) + layer.wpe(places))

    by_hand = [
        Calls(enter, wte=body.wte, wpe=body.wpe, drop=body.drop),
        *(Calls(lambda layer, x: layer.block(x), block=block) for block in body.h),
        Calls(lambda layer, x: layer.head(layer.norm(x)), norm=body.ln_f, head=model.lm_head),
    ]
    words = torch.randint(1, SIZES["vocab_size"], (4, 96))
    return Model(model, by_hand, {"input_ids": words, "use_cache": False}, words, next_words)


def llama(num_layers: int = 12) -> Model:
    import transformers

    configuration = transformers.LlamaConfig(
        **SIZES, hidden_size=192, intermediate_size=512, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(configuration).train()
    body = model.model

    def run(layer: Any, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)[None]
        return layer.block(x, position_embeddings=layer.rotary(x, places), position_ids=places)

    by_hand = [
        Calls(lambda layer, words: layer.embed(words), embed=body.embed_tokens),
        *(Calls(run, block=block, rotary=body.rotary_emb) for block in body.layers),
        Calls(lambda layer, x: layer.head(layer.norm(x)), norm=body.norm, head=model.lm_head),
    ]
    words = torch.randint(1, SIZES["vocab_size"], (4, 96))
    return Model(model, by_hand, {"input_ids": words, "use_cache": False}, words, next_words)


def resnet() -> Model:
    model = import_torchvision().models.resnet50(weights=None).train()
    blocks = [block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage]
    by_hand = [
        nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool),
        *blocks,
        nn.Sequential(model.avgpool, nn.Flatten(1), model.fc),
    ]
    images = torch.randn(2, 3, 96, 96)
    return Model(model, by_hand, {"x": images}, torch.randint(0, 1000, (2,)), classes)


def vision_transformer() -> Model:
    model = import_torchvision().models.VisionTransformer(
        image_size=64, patch_size=8, num_layers=12, num_heads=4, hidden_dim=192, mlp_dim=768
    )
    model.train()

    class Enter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.token = model.conv_proj, model.class_token
            self.places, self.drop = model.encoder.pos_embedding, model.encoder.dropout

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            x = self.project(images).flatten(2).permute(0, 2, 1)
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
            return self.drop(x + self.places)

    by_hand = [
        Enter(),
        *model.encoder.layers,
        Calls(lambda layer, x: layer.heads(layer.norm(x)[:, 0]), norm=model.encoder.ln, heads=model.heads),
    ]
    return Model(model, by_hand, {"x": torch.randn(4, 3, 64, 64)}, torch.randint(0, 1000, (4,)), classes)


MODELS: dict[str, Callable[[], Model]] = {
    "GPT-2, 12 blocks, tied": gpt, "Llama, 12 blocks": llama, "resnet50": resnet,
    "ViT, 12 blocks": vision_transformer,
}  # fmt: skip


# One time for each operation


def signature(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, tuple(leaf.stride())
    return repr(leaf)


class Clock(TorchDispatchMode):
    """Times every operation, and lists which ones ran."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: dict[Any, list[float]] = defaultdict(list)
        self.ran: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key = func, tuple(signature(leaf) for leaf in flatten((args, kwargs))[0])
        began = time.perf_counter()
        out = func(*args, **kwargs)
        self.samples[key].append(time.perf_counter() - began)
        self.ran.append(key)
        return out

    def seconds(self, ran: Sequence[Any]) -> float:
        return sum(min(self.samples[key]) for key in ran)


def copied(received: Any) -> Any:
    if isinstance(received, tuple):
        return tuple(tensor.clone() for tensor in received)
    return received.clone()


def run(layers: Sequence[nn.Module], given: Model, inputs: Any, clock: Clock) -> list[tuple[list[Any], list[Any]]]:
    """The operations of each layer's forward and backward, for one micro-batch."""
    passed, kept, forwards = inputs, [], []
    with clock:
        for number, layer in enumerate(layers):
            received = passed
            if number:
                leaves = passed if isinstance(passed, tuple) else (passed,)
                received = tuple(leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves)
                received = received if isinstance(passed, tuple) else received[0]
            given_on = copied(received)  # layers may write into what they are given
            clock.ran = []
            passed = layer(given_on)
            if number == len(layers) - 1:
                passed = given.loss_fn(passed, given.labels)
            forwards.append(clock.ran)
            kept.append((received, passed))
        gradients: dict[int, Any] = {}
        backwards = []
        for number, (received, returned) in reversed(list(enumerate(kept))):
            outs = [leaf for leaf in flatten(returned)[0] if isinstance(leaf, torch.Tensor)]
            pairs = [(out, gradients.get(place)) for place, out in enumerate(outs) if out.requires_grad]
            pairs = [(out, gradient) for out, gradient in pairs if gradient is not None or out.dim() == 0]
            clock.ran = []
            torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])
            backwards.append(clock.ran)
            leaves = received if isinstance(received, tuple) else (received,)
            gradients = {place: leaf.grad for place, leaf in enumerate(leaves) if number and leaf.grad is not None}
    return list(zip(forwards, reversed(backwards), strict=True))


def chains(given: Model, rounds: int) -> dict[str, Chain]:
    captured = layers_as_they_are(given.model, (), given.arguments)
    tensors = tuple(leaf for leaf in given.arguments.values() if isinstance(leaf, torch.Tensor))
    inputs: Any = tensors if len(tensors) > 1 else tensors[0]
    lists = {"by hand": given.by_hand, "captured": list(captured)}
    clock, ran = Clock(), {}
    for round_number in range(rounds + 1):
        for kind, layers in lists.items():
            ran[kind] = run(layers, given, inputs, clock)
        if not round_number:
            clock.samples.clear()  # there were no gradients to add to, and nothing was warm
    made = {}
    for kind, layers in lists.items():
        chain = profile_chain(
            layers, (inputs, given.labels), loss_fn=given.loss_fn, name=kind, warm_up=1, repeats=1, progress=False
        )
        timed = [
            replace(layer, forward_seconds=clock.seconds(forward), backward_seconds=clock.seconds(backward),
                    forward_spread_seconds=None, backward_spread_seconds=None)
            for layer, (forward, backward) in zip(chain.layers, ran[kind], strict=True)
        ]  # fmt: skip
        made[kind] = replace(chain, layers=tuple(timed))
    return made


# Plans


def least_memory(chain: Chain, num_devices: int, bandwidth: float) -> int:
    """The smallest memory of a device with which there is a plan, in bytes."""
    try:
        make_plan(chain, Platform(num_devices=num_devices, memory_bytes=1, bandwidth=bandwidth),
                  num_micro_batches=MICRO_BATCHES_PER_DEVICE * num_devices)  # fmt: skip
    except InfeasibleError as error:
        assert error.smallest_memory_bytes is not None
        return error.smallest_memory_bytes
    raise AssertionError("a plan fits into one byte")


def step_seconds(chain: Chain, num_devices: int, memory_bytes: int, bandwidth: float) -> float | None:
    platform = Platform(num_devices=num_devices, memory_bytes=memory_bytes, bandwidth=bandwidth)
    try:
        plan = make_plan(chain, platform, num_micro_batches=MICRO_BATCHES_PER_DEVICE * num_devices)
    except InfeasibleError:
        return None
    return plan.step_seconds


def compared(made: dict[str, Chain]) -> list[dict[str, Any]]:
    hand = made["by hand"]
    sent = statistics.median(layer.output_bytes for layer in hand.layers[:-1])
    bandwidth = sent / (TRANSFER * hand.compute_seconds)
    rows = []
    for num_devices in DEVICES:
        least = {kind: least_memory(chain, num_devices, bandwidth) for kind, chain in made.items()}
        row: dict[str, Any] = {"devices": num_devices, "least_memory_bytes": least}
        for name, memory in (("ample", 2**50), ("tight", int(TIGHT * least["by hand"]))):
            row[f"{name}_step_seconds"] = {
                kind: step_seconds(chain, num_devices, memory, bandwidth) for kind, chain in made.items()
            }
        rows.append(row)
    return rows


def ratio(values: dict[str, float | None]) -> str:
    if values["captured"] is None:
        return "does not fit"
    return f"{values['captured'] / values['by hand']:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with suppress(ImportError):
        import_torchvision()  # Hugging Face's code imports it where it is there
    print("| model | layers by hand, captured | devices | step | step, tight memory | least memory |")
    print("|---|---|---|---|---|---|")
    rows = []
    for name, make in MODELS.items():
        if arguments.models and name not in arguments.models:
            continue
        torch.manual_seed(0)
        made = chains(make(), arguments.rounds)
        for row in compared(made):
            counts = {kind: chain.num_layers for kind, chain in made.items()}
            rows.append({"model": name, "layers": counts, **row})
            print(
                f"| {name} | {counts['by hand']}, {counts['captured']} | {row['devices']} "
                f"| {ratio(row['ample_step_seconds'])} | {ratio(row['tight_step_seconds'])} "
                f"| {ratio(row['least_memory_bytes'])} |",
                flush=True,
            )
        if arguments.out:
            arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

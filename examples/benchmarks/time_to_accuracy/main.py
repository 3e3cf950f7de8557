"""How many updates, and how many seconds, to the same accuracy, with each rule for versions of the weights?

    torchrun --nproc_per_node=4 examples/benchmarks/time_to_accuracy/main.py [--models digits gpt]
        [--seeds 5] [--save]

A pipeline that never drains loses no time at its updates, but trains with weights that are some updates old. Which
of the two counts for more is PipeDream's question (SOSP 2019, section 5): time to accuracy, not time per update.

- ``flush``: the pipeline drains before each update, as in one process.
- ``none``: it never drains, and forward and backward of a micro-batch use the newest weights of their time, so not
  always the same ones. No plan has it; it shows what weight stashing is for.
- ``stashing``, ``2bw``, ``vertical-sync``: the modes of the option ``weight_versions``.

Each model is trained to its target with each rule from the same starts and on the same batches: ``digits`` to an
accuracy on the digits that it was not trained on, looked at after each epoch, where the pipeline comes to rest;
``gpt`` to a mean loss over the last updates. That tells the updates. The seconds of an update are measured beside
each other, with layers that sleep besides they compute, so that each of the ranks has a device of its own: a step
of each rule in turn, several times, first without and then with a rest at the end of an epoch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from deepspeed_partition import Chain, LayerProfile, Plan, Platform, make_plan
from deepspeed_partition.engine import MadPipeEngine, PipelineModule
from deepspeed_partition.engine.engine import initialize_with
from deepspeed_partition.engine.runtime.collectives import from_rank_0

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from interleaved import environment
from train_deepspeed import WIDTH, Block, tokens_of_the_standard_library

RULES = ("flush", "none", "stashing", "2bw", "vertical-sync")
LAYERS_PER_RANK = 2
MICRO_BATCHES = 4
"""Micro-batches of an update: with so few the pipeline is empty for nearly half of a step that drains."""
FORWARD_SECONDS, BACKWARD_SECONDS = 0.01, 0.02
"""What a layer sleeps, beside what it computes, where seconds are measured."""
UPDATES_PER_RUN = 10
"""Updates between two rests where seconds are measured, and of which the first ones fill the pipeline."""


class _Nap(torch.autograd.Function):
    """Hands on what it gets; its backward, the first of its layer's, sleeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Slow(nn.Module):
    """A layer that sleeps as it runs, where ``seconds`` are given."""

    def __init__(self, layer: nn.Module, seconds: tuple[float, float] | None) -> None:
        super().__init__()
        self.layer, self.seconds = layer, seconds

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        if self.seconds is None:
            return output
        time.sleep(self.seconds[0])
        return _Nap.apply(output, self.seconds[1])


@dataclass(frozen=True)
class Task:
    """A model, its data, and when it is trained well enough."""

    layers: Callable[[], Sequence[nn.Module]]
    """Function that makes the layers, two for each of four ranks."""
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer]
    micro_batches: Callable[[int], Iterator[tuple[Tensor, Tensor]]]
    """Function that gives the micro-batches of a seed, without an end."""
    updates_per_epoch: int
    target: float
    most_epochs: int
    test: tuple[Tensor, Tensor] | None = None
    """What the accuracy is taken on after each epoch; None: the target is a loss of training."""


def convolution(inputs: int, outputs: int, *more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), *more)


def digits() -> Task:
    """A convolutional network on scikit-learn's digits, to 97 % of those that it does not see."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    size = 16

    def layers() -> list[nn.Module]:
        made = [
            convolution(1, 16), convolution(16, 32, nn.MaxPool2d(2)), convolution(32, 32),
            convolution(32, 64, nn.MaxPool2d(2)),
            nn.Sequential(nn.Flatten(), nn.Linear(256, 128), nn.ReLU()),
            nn.Sequential(nn.Linear(128, 128), nn.ReLU()), nn.Sequential(nn.Linear(128, 64), nn.ReLU()),
            nn.Linear(64, 10),
        ]  # fmt: skip
        for weight in nn.Sequential(*made).parameters():
            if weight.dim() > 1:  # else eight layers without a normalization hardly begin to learn
                nn.init.kaiming_normal_(weight, nonlinearity="relu")
        return made

    def micro_batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        per_epoch = len(train) // (size * MICRO_BATCHES) * size * MICRO_BATCHES
        while True:
            shuffled = train[torch.randperm(len(train), generator=generator)[:per_epoch]]
            for each in shuffled.split(size):
                yield images[each], labels[each]

    return Task(
        layers, F.cross_entropy, lambda weights: torch.optim.SGD(weights, lr=0.01, momentum=0.9), micro_batches,
        updates_per_epoch=len(train) // (size * MICRO_BATCHES), target=0.97, most_epochs=40,
        test=(images[test], labels[test]),
    )  # fmt: skip


VOCABULARY, CONTEXT = 512, 32


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.zeros(CONTEXT, WIDTH))

    def forward(self, text: Tensor) -> Tensor:
        return self.tokens(text) + self.positions


def gpt() -> Task:
    """The blocks of an example on the source text of Python's standard library, to a mean loss of 50 updates."""
    tokens = tokens_of_the_standard_library() % VOCABULARY

    def micro_batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(tokens) - CONTEXT - 1, (8,), generator=generator)
            windows = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts.tolist()])
            yield windows[:, :-1], windows[:, 1:]

    return Task(
        lambda: [
            Embedding(), *(Block() for _ in range(6)),
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)),
        ],
        lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        lambda weights: torch.optim.AdamW(weights, lr=3e-3),
        micro_batches, updates_per_epoch=25, target=3.0, most_epochs=40,
    )  # fmt: skip


TASKS = {"digits": digits, "gpt": gpt}


def plan_for(rule: str, num_ranks: int) -> Plan:
    """Plan equal layers, two for each rank."""
    layer = LayerProfile(
        name="layer", forward_seconds=FORWARD_SECONDS, backward_seconds=BACKWARD_SECONDS, weight_bytes=4,
        output_bytes=4,
    )  # fmt: skip
    chain = Chain(name="even", input_bytes=4, layers=(layer,) * (LAYERS_PER_RANK * num_ranks))
    platform = Platform(num_devices=num_ranks, memory_bytes=10**12, bandwidth=1e9, comm_buffers=8)
    ends = [LAYERS_PER_RANK * rank for rank in range(num_ranks + 1)]
    if rule == "flush":
        return make_plan(chain, platform, ends, num_micro_batches=MICRO_BATCHES, recompute="never")
    # A little longer than the work of a stage, so that no stage has more in flight for its messages.
    period = 1.001 * LAYERS_PER_RANK * (FORWARD_SECONDS + BACKWARD_SECONDS)
    return replace(
        make_plan(chain, platform, ends, recompute="never", period_seconds=period),
        weight_versions="stashing" if rule == "none" else rule, micro_batches_per_update=MICRO_BATCHES,
    )  # fmt: skip


def engine_for(task: Task, rule: str, seed: int, seconds: tuple[float, float] | None = None) -> MadPipeEngine:
    """Make the engine of a rule; all ranks and rules begin with the same weights of a seed."""
    plan = from_rank_0(lambda: plan_for(rule, dist.get_world_size()))
    torch.manual_seed(seed)
    layers = [Slow(layer, seconds) for layer in task.layers()]
    module = PipelineModule(layers, num_stages=dist.get_world_size(), plan=plan, loss_fn=task.loss)
    parameters = [each for each in module.parameters() if each.requires_grad]
    engine: MadPipeEngine = initialize_with(
        type("Engine", (MadPipeEngine,), {"_mode_for_benchmarks": "none" if rule == "none" else None}),
        model=module, model_parameters=parameters, optimizer=task.optimizer(parameters),
        config={
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": MICRO_BATCHES,
            "steps_per_print": 10**9, "gradient_clipping": 0.0,
        },
    )[0]  # fmt: skip
    return engine


def accuracy_of(engine: MadPipeEngine, test: tuple[Tensor, Tensor]) -> float:
    """The share of ``test`` that is told right; the pipeline comes to rest for it."""
    labels = test[1]
    _, outputs = engine.eval_batch(iter([test]), num_micro_batches=1, return_logits=True)
    right = from_owner(engine, lambda: float((outputs.argmax(-1) == labels).float().mean()))
    return right


def from_owner(engine: MadPipeEngine, compute: Callable[[], float]) -> float:
    """What the rank of the last stage computes, on all ranks."""
    found = torch.tensor([compute() if engine.is_last_stage() else 0.0])
    dist.all_reduce(found)
    return float(found)


def updates_to_target(task: Task, rule: str, seed: int) -> int | None:
    """Train until the target is met; return after how many updates, None where it never is."""
    engine = engine_for(task, rule, seed)
    data = task.micro_batches(seed)
    recent: deque[float] = deque(maxlen=50)
    done = 0
    met = None
    while met is None and done < task.most_epochs * task.updates_per_epoch:
        for _ in range(task.updates_per_epoch):
            recent.append(float(engine.train_batch(data)))
            done += 1
        if task.test is None:
            reached = len(recent) == recent.maxlen and statistics.mean(recent) <= task.target
        else:
            reached = accuracy_of(engine, task.test) >= task.target
        if reached:
            met = done
        elif not statistics.mean(recent) < float("inf"):
            break
    engine.come_to_rest()
    engine.destroy()
    return met


def seconds_per_update(task: Task, rounds: int) -> dict[str, list[float]]:
    """Return for each rule the seconds of an update in the run and of coming to rest, the median of the rounds."""
    engines = {rule: engine_for(task, rule, 0, (FORWARD_SECONDS, BACKWARD_SECONDS)) for rule in RULES}
    data = {rule: task.micro_batches(0) for rule in RULES}
    found: dict[str, list[tuple[float, float]]] = {rule: [] for rule in RULES}
    for round_ in range(rounds + 1):
        for rule, engine in engines.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(UPDATES_PER_RUN):
                engine.train_batch(data[rule])
            trained = time.perf_counter()
            engine.come_to_rest()
            dist.barrier()
            if round_:
                rested = time.perf_counter() - trained
                found[rule].append(((trained - began) / UPDATES_PER_RUN, rested))
    medians = {
        rule: [statistics.median(column) for column in zip(*rows, strict=True)] for rule, rows in found.items()
    }
    for engine in engines.values():
        engine.destroy()
    return from_rank_0(lambda: medians)


class Found:
    """Lines of what was found, in a file where there is one: what is there is not run again.

    Args:
        path: of the file, which rank 0 reads and writes; None: nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path if dist.get_rank() == 0 else None
        text = from_rank_0(lambda: path.read_text() if path is not None and path.exists() else "")
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
        if not self.lines:
            self._add({"environment": environment()})

    def get(self, key: dict[str, Any], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the line that begins with ``key``, computed now where it is not there."""
        for line in self.lines:
            if key.items() <= line.items():
                return line
        found = key | compute()
        tell(json.dumps(found))
        self._add(found)
        return found

    def _add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if self._path is not None:
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def rows_of(name: str, seeds: int, rounds: int, found: Found) -> list[dict[str, Any]]:
    """Return a row for each rule: updates of each seed, seconds of an update, seconds to the target."""
    task = TASKS[name]()
    seconds = found.get(
        {"model": name, "layer_seconds": [FORWARD_SECONDS, BACKWARD_SECONDS]},
        lambda: {"seconds_of_update_and_rest": seconds_per_update(task, rounds)},
    )["seconds_of_update_and_rest"]
    updates: dict[str, list[int | None]] = {rule: [] for rule in RULES}
    for seed in range(seeds):  # so that what is there after an end in the middle is of whole seeds
        for rule in RULES:
            key = {"model": name, "target": task.target, "weight_versions": rule, "seed": seed}
            line = found.get(key, lambda rule=rule, seed=seed: {"updates": updates_to_target(task, rule, seed)})
            updates[rule].append(line["updates"])
    rows = []
    for rule in RULES:
        met = [each for each in updates[rule] if each is not None]
        per_update, per_rest = seconds[rule]
        to_target = None
        if seeds and len(met) == seeds:
            typical = statistics.median(met)
            rests = typical / task.updates_per_epoch if task.test is not None else 1
            to_target = typical * per_update + rests * per_rest
        rows.append({
            "model": name, "weight_versions": rule, "updates": updates[rule], "update_seconds": per_update,
            "rest_seconds": per_rest, "target_seconds": to_target,
        })  # fmt: skip
    return rows


def tell(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title="to the same accuracy")
    for title in ("model", "weights", "updates, by seed", "an update", "a rest", "to target", "of flush"):
        table.add_column(title)
    flush = {row["model"]: row["target_seconds"] for row in rows if row["weight_versions"] == "flush"}
    for row in rows:
        all_of_it, of_flush = row["target_seconds"], flush[row["model"]]
        table.add_row(
            row["model"], row["weight_versions"],
            ", ".join("never" if each is None else str(each) for each in row["updates"]),
            f"{row['update_seconds'] * 1e3:.0f} ms", f"{row['rest_seconds'] * 1e3:.0f} ms",
            f"{all_of_it:.1f} s" if all_of_it else "never",
            f"{all_of_it / of_flush:.2f}" if all_of_it and of_flush else "-",
        )  # fmt: skip
    Console(width=118).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5, help="0: the seconds of an update alone")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the measured seconds")
    parser.add_argument(
        "--save", action="store_true",
        help="write each line to results/ as it is found; a later run of the month does what is not there",
    )  # fmt: skip
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed()
    path = Path(__file__).parent / "results" / f"{dist.get_world_size()}_ranks_{date.today():%Y%m}.jsonl"
    found = Found(path if arguments.save else None)
    rows = [row for name in arguments.models for row in rows_of(name, arguments.seeds, arguments.rounds, found)]
    if dist.get_rank() == 0:
        show(rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

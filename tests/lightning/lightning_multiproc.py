"""Runs the cases, in one start per number of processes, and writes what each rank saw as JSON.

python lightning_multiproc.py reference 2 FOLDER     one process, Lightning alone
torchrun --nproc_per_node=2 lightning_multiproc.py pipeline 2 FOLDER
python lightning_multiproc.py launcher 2 FOLDER      Lightning starts the second process
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

torch.set_num_threads(1)

import pytorch_lightning as pl  # noqa: E402
from pytorch_lightning.utilities.exceptions import MisconfigurationException  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from deepspeed_partition import InfeasibleError, PlanMismatchError  # noqa: E402
from tests.choice import is_chosen  # noqa: E402
from tests.engine.harness import forget_engines, share_groups  # noqa: E402
from tests.lightning import (  # noqa: E402
    after_fit_cases,
    asynchronous_cases,
    beside_cases,
    call_state_cases,
    callback_cases,
    captured_cases,
    epoch_cases,
    gradient_cases,
    hook_cases,
    in_place_cases,
    kept_state_cases,
    kept_weights_cases,
    layer_writes_cases,
    loss_cases,
    map_cases,
    naming_cases,
    object_cases,
    same_data_cases,
    step_cases,
    writing_cases,
)
from tests.lightning import lightning_cases as cases  # noqa: E402


def refused(run: Callable[[], Any]) -> str:
    """The sentence with which ``run`` is refused; it takes place on every rank."""
    try:
        run()
    except (MisconfigurationException, InfeasibleError, PlanMismatchError, ValueError) as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return "not refused"


def fit_changed(host: cases.Host, module: pl.LightningModule, **arguments: Any) -> None:
    host.trainer(max_epochs=1, **arguments).fit(module, cases.loader(16))


class OutsideParameter(cases.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class OneLayer(cases.Classifier):
    """Told to use at most one stage, its user found no option of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.embed, *self.blocks, nn.Tanh(), self.head)

    def pipeline_layers(self) -> list[Any]:
        return [self.net]


class OneTrained(cases.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks.requires_grad_(False)


class TwoOptimizers(cases.Classifier):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.embed.parameters(), 0.1), torch.optim.SGD(self.head.parameters(), 0.1)]


class Manual(cases.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(cases.Classifier):
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class Shared(cases.Classifier):
    def pipeline_layers(self) -> list[Any]:
        return [self.embed, *self.blocks, self.blocks[0], self.head]


class Keywords(cases.Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(x=batch[0]).sum()


class NoForward(cases.Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.embed(batch[0]).sum()


class Parts(cases.SequentialClassifier):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.net:
            x = layer(x)
        return x


class Renormalized(cases.TiedLanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.embed.max_norm = 1.0


class Penalized(cases.Classifier):
    """Each rank would add its own stage's share, and that of the first stage would have no gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * sum(w.abs().sum() for w in self.parameters())


class PenalizedEmbedding(cases.Classifier):
    """The last stage has initial weights of this layer."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * self.embed.weight.square().sum()


class PenalizedSequential(cases.SequentialClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * sum(w.abs().sum() for w in self.net.parameters())


class Sampling(cases.Classifier):
    """Weights of the other stages would be the initial ones, on each rank those of other layers."""

    def on_train_epoch_end(self) -> None:
        self.log("sample", self(torch.ones(1, cases.NUM_FEATURES)).sum())


class SamplingSequential(cases.SequentialClassifier):
    def on_train_epoch_end(self) -> None:
        self.log("sample", self(torch.ones(1, cases.NUM_FEATURES)).sum())


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError("no backward here")


class FailsInBackward(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Failing.apply(super().forward(x))


class WithFailingBlock(cases.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = FailsInBackward(cases.WIDTH, cases.WIDTH)


def _unstacked(items: list[Any]) -> list[Any]:
    return [[x for [x] in items], [x[:, 0].long() for [x] in items]]


def refusals(host: cases.Host) -> dict[str, Any]:
    sequences = DataLoader(TensorDataset(torch.zeros(16, 6, 8)), batch_size=4, collate_fn=_unstacked)
    lonely = DataLoader(TensorDataset(torch.zeros(16, 8)), batch_size=16, collate_fn=lambda items: {"size": 16})
    return {
        "outside": refused(lambda: fit_changed(host, OutsideParameter())),
        "one layer": refused(lambda: fit_changed(host, OneLayer())),
        "one trained layer": refused(lambda: fit_changed(host, OneTrained())),
        "optimizers": refused(lambda: fit_changed(host, TwoOptimizers())),
        "manual": refused(lambda: fit_changed(host, Manual())),
        "backward": refused(lambda: fit_changed(host, OwnBackward())),
        "shared": refused(lambda: fit_changed(host, Shared())),
        "keywords": refused(lambda: fit_changed(host, Keywords())),
        "no forward": refused(lambda: fit_changed(host, NoForward())),
        "parts": refused(lambda: fit_changed(host, Parts())),
        "tied max_norm": refused(lambda: fit_changed(host, Renormalized())),
        "penalty": refused(lambda: fit_changed(host, Penalized())),
        "penalty on a layer": refused(lambda: fit_changed(host, PenalizedEmbedding())),
        "penalty on parts": refused(lambda: fit_changed(host, PenalizedSequential())),
        "forward in a hook": refused(lambda: fit_changed(host, Sampling())),
        "net in a hook": refused(lambda: fit_changed(host, SamplingSequential())),
        "value clipping": refused(
            lambda: fit_changed(
                host,
                cases.Classifier(),
                gradient_clip_val=1.0,
                gradient_clip_algorithm="value",
                strategy={"stage": 1},
            )
        ),
        "fp16": refused(lambda: fit_changed(host, cases.Classifier(), precision="16-mixed")),
        "stages": refused(lambda: fit_changed(host, cases.Classifier(), strategy={"num_stages": 3})),
        "unstacked": refused(lambda: host.trainer().fit(cases.Classifier(), sequences)),
        "no tensors": refused(lambda: host.trainer().fit(cases.Classifier(), lonely)),
        "data": refused(lambda: host.trainer().fit(cases.Classifier(), shuffled_by_rank())),
        "memory": refused(lambda: fit_changed(host, cases.Classifier(), strategy={"memory": "1kB"})),
        "failing": refused(lambda: fit_changed(host, WithFailingBlock(), strategy={"warmup_epochs": 0})),
    }


def shuffled_by_rank() -> DataLoader:
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    return DataLoader(cases.samples(32), batch_size=16, shuffle=True, generator=generator)


def same_draws(host: cases.Host) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    torch.manual_seed(int(os.environ["RANK"]))  # as dropout leaves it: another state on each rank
    trainer = host.trainer(max_epochs=1)
    trainer.fit(cases.Mixing(), cases.loader(32))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class FromSpecs(cases.Steps):
    """Nothing is built before a rank knows its layers."""

    def pipeline_layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec

        return [
            LayerSpec(nn.Linear, cases.NUM_FEATURES, cases.WIDTH),
            *(LayerSpec(cases.Block) for _ in range(4)),
            LayerSpec(nn.Linear, cases.WIDTH, cases.NUM_CLASSES),
        ]


def layer_specs(host: cases.Host) -> dict[str, Any]:
    """The same weights on every cut, and the random numbers of the program as if there were none."""
    records = []
    for num_stages in (1, 2):
        strategy = {"num_stages": num_stages}
        record = cases.fit(host, FromSpecs, cases.loader(32), max_epochs=1, strategy=strategy)
        records.append({"rows": record["rows"], "next": float(torch.rand(1))})
    return {"records": records}


def collected_engine(host: cases.Host) -> dict[str, Any]:
    """The engine of an earlier Trainer goes while a later one trains the same model."""
    rows = []
    for keep in (True, False):
        pl.seed_everything(0, verbose=False)
        module, recorder = cases.Classifier(), cases.Recorder()
        earlier = host.trainer(max_epochs=1, precision="bf16-mixed")
        earlier.fit(module, cases.loader(54))
        goes = End([] if keep else [earlier.strategy.deepspeed_engine])
        later = host.trainer(recorder, goes, precision="bf16-mixed")
        later.fit(module, cases.loader(54))
        rows.append(recorder.rows)
    return {"kept": rows[0], "collected": rows[1], "linked": goes.linked}


class End(pl.Callback):
    """Does in the second epoch what Python does when it collects an engine, whenever that is."""

    def __init__(self, engines: list[Any]) -> None:
        self.engines = engines

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            for engine in self.engines:
                engine.destroy()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        from deepspeed.utils import safe_get_full_fp32_param

        # Without a link the values are zeros.
        self.linked = [
            torch.equal(safe_get_full_fp32_param(weight).bfloat16(), weight) for weight in module.parameters()
        ]


def plan_files(host: cases.Host) -> dict[str, Any]:
    """The plan that the case ``plain`` saved is run as it is: nothing is measured."""
    path = host.folder / "plan.json"
    module = cases.Classifier()
    trainer = host.trainer(max_epochs=1, strategy={"plan": str(path)})
    trainer.fit(module, cases.loader(16))
    from deepspeed_partition import Plan

    strategy = trainer.strategy
    return {
        "same plan": strategy.plan == Plan.load(path),
        "boundaries": list(strategy.pipeline.parts),
        "planned": Plan.load(path).boundaries,
        "measured": strategy.deepspeed_engine.chain is not None,
        "wrong": refused(lambda: fit_changed(host, cases.SequentialClassifier(), strategy={"plan": str(path)})),
    }


class Gradients(pl.Callback):
    """Counts the parameters with a gradient when Lightning says that all of them are there."""

    num_with, num_without, num_elements = 0, 0, 0

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = [weight.grad for weight in module.parameters()]
        self.num_elements = sum(weight.numel() for weight in module.parameters())
        self.num_with += sum(gradient is not None for gradient in gradients)
        self.num_without += sum(gradient is None for gradient in gradients)


def own_layers_only(host: cases.Host) -> dict[str, Any]:
    """A rank's parameters are those of its stage; the user's attributes can still be read."""
    module = cases.Classifier()
    num_parameters = sum(weight.numel() for weight in module.parameters())
    gradients = Gradients()
    trainer = host.trainer(gradients, max_epochs=1, strategy={"algorithm": [0, 2, 8]})
    trainer.fit(module, cases.loader(16))
    return {
        "model is the module": trainer.model is module,
        "local": gradients.num_elements,
        "after fit": sum(weight.numel() for weight in module.parameters()),
        "all": num_parameters,
        "gradients": [gradients.num_with, gradients.num_without],
        "readable": isinstance(module.head, nn.Linear),
        "children": [name for name, _ in module.named_children()],
    }


def saved_after_fit(host: cases.Host) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    trainer = host.trainer(max_epochs=1)
    trainer.fit(cases.Classifier(), cases.loader(54))
    [before] = trainer.test(trainer.lightning_module, cases.loader(21, seed=3), verbose=False)
    trainer.save_checkpoint(host.folder / "final.ckpt")
    [after] = host.trainer().test(
        cases.Classifier(), cases.loader(21, seed=3), ckpt_path=str(host.folder / "final.ckpt"), verbose=False
    )
    return {"before": before, "after": after}


ONLY_PIPELINE: dict[int, list[Callable[[cases.Host], dict[str, Any]]]] = {
    2: [refusals, same_draws, layer_specs, collected_engine, plan_files, own_layers_only, saved_after_fit],
    4: [],
}


class Loops:
    """The cases of ``lightning_cases.py``, and those of this file."""

    SAME_AS_SINGLE, ONLY_PIPELINE = cases.SAME_AS_SINGLE, ONLY_PIPELINE


KINDS: dict[str, list[Any]] = {
    "loops": [Loops, epoch_cases, map_cases, asynchronous_cases],
    "steps": [step_cases, gradient_cases],
    "losses": [loss_cases],
    "callbacks": [callback_cases, kept_weights_cases, same_data_cases],
    "names": [naming_cases, hook_cases, beside_cases, object_cases, call_state_cases],
    "writing": [writing_cases, in_place_cases, kept_state_cases, layer_writes_cases],
    "after": [after_fit_cases],
    "captured": [captured_cases],
}
"""The modules with the cases of a kind, which a start of processes runs one after the other."""


READ_BY = {"plain": ["plan_files"]}
"""Cases that read what the first one wrote."""


def run(mode: str, num_processes: int, folder: Path) -> None:
    """Write the records beside ``folder``, where the cases keep their files."""
    folder.mkdir(exist_ok=True)
    pipelined = mode != "reference"
    if pipelined:
        share_groups()
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: False  # as DeepSpeed says of most CPUs, and not of the newest
    host = cases.Host(folder, num_processes if pipelined else 1, pipelined)
    kind = KINDS[os.environ.get("CASES_OF", "loops")]
    chosen = [case for module in kind for case in module.SAME_AS_SINGLE[num_processes]]
    if mode == "launcher":
        chosen = [cases.plain]
    if mode == "pipeline":
        chosen += [case for module in kind for case in module.ONLY_PIPELINE[num_processes]]
    results = {}
    for case in chosen:
        if is_chosen(case.__name__) or any(map(is_chosen, READ_BY.get(case.__name__, ()))):
            try:
                results[case.__name__] = case(host)
                if dist.is_initialized():
                    forget_engines()
                gc.collect()
                gc.freeze()  # what a case has left, mostly of libraries: each later fit would go through it
            except Exception:
                # The other ranks may wait for this one: the job ends here, and says where.
                print(f"case {case.__name__} failed on rank {os.environ.get('RANK', 0)}", file=sys.stderr)
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
    rank = int(os.environ.get("RANK", 0)) if pipelined else 0
    (folder.parent / f"{mode}-{num_processes}-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))

"""Pipelines from public repositories, built tiny by their own code. Each function takes the checkout's folder.

A function returns the pipeline module and a list of micro-batches as DeepSpeed's engine reads them, or a function
that makes of the engine what it trains on in each step. What a model only imports and never calls here, such as
tokenizers and fused kernels, need not be installed: ``allow_missing`` stands in.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

VOCABULARY, HIDDEN, LENGTH, HEADS, NUM_LAYERS = 64, 32, 16, 4, 4
SAMPLES_PER_MICRO_BATCH, NUM_MICRO_BATCHES = 2, 4

Built = tuple[PipelineModule, list[Any] | Callable[[Any], Iterator[Any]]]


class _Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages that are not installed, as modules in which every name is a mock."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = set(names)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in self._names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        class StandIn(ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name == "__version__":
                    return "2.5.0"
                if name.startswith("__"):
                    raise AttributeError(name)
                return MagicMock()

        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


def allow_missing(*names: str) -> None:
    sys.meta_path.append(_Missing(names))


def tokens(num_steps: int) -> list[torch.Tensor]:
    """Draw token numbers for all micro-batches of ``num_steps`` steps: int64[samples, LENGTH + 1] each."""
    random = torch.Generator().manual_seed(1)
    shape = (SAMPLES_PER_MICRO_BATCH, LENGTH + 1)
    count = num_steps * NUM_MICRO_BATCHES
    # Later tokens follow from earlier ones, so that there is something to learn.
    starts = [torch.randint(0, VOCABULARY, shape, generator=random) for _ in range(count)]
    return [(start[:, :1] + 3 * torch.arange(LENGTH + 1)) % VOCABULARY for start in starts]


def causal_mask() -> torch.Tensor:
    """True where a token may not look: bool[1, 1, LENGTH, LENGTH]."""
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1).view(1, 1, LENGTH, LENGTH)


def _llama_config() -> Any:
    from transformers.models.llama.modeling_llama import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        pad_token_id=0,
    )


def transpeeder(folder: Path, num_steps: int) -> Built:
    """HuangLK/transpeeder: LLaMA in which position and mask travel with the activations (Apache-2.0)."""
    sys.path.insert(0, str(folder / "src"))
    from transpeeder.models.llama_pipeline_model import get_model

    world = torch.distributed.get_world_size()
    arguments = SimpleNamespace(pipe_parallel_size=world, model_parallel_size=1, world_size=world, seed=3)
    module = get_model(_llama_config(), arguments)
    positions = torch.arange(LENGTH).expand(SAMPLES_PER_MICRO_BATCH, -1)
    mask = causal_mask().expand(SAMPLES_PER_MICRO_BATCH, -1, -1, -1)
    return module, [((text[:, :-1], positions, mask), text[:, 1:].contiguous()) for text in tokens(num_steps)]


def gdgpt(folder: Path, num_steps: int) -> Built:
    """CoinCheung/gdGPT: LLaMA; two classes share one embedding, without a ``forward_fn`` (Apache-2.0)."""
    # Beside its models the repository has a copy of an old DeepSpeed, which must not be found.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    specification = importlib.util.spec_from_file_location("gdgpt_llama", folder / "models" / "llama.py")
    assert specification is not None and specification.loader is not None
    llama = importlib.util.module_from_spec(specification)
    sys.modules["gdgpt_llama"] = llama
    specification.loader.exec_module(llama)
    config = _llama_config()
    config._attn_implementation = "eager"
    layers = llama.get_llama_causal_lm_specs(config, load_path="", tie_emb=True, from_scratch=True)
    world = torch.distributed.get_world_size()
    module = PipelineModule(layers, loss_fn=_next_token_loss, num_stages=world)
    data = [
        (torch.stack([text[:, :-1], torch.ones_like(text[:, :-1])], -1), text[:, 1:]) for text in tokens(num_steps)
    ]
    return module, data


def _next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


def neox(folder: Path, num_steps: int) -> Built:
    """EleutherAI/gpt-neox: ``GPT2ModelPipe``, the embedding tied to the head (Apache-2.0)."""
    allow_missing(
        "apex", "boto3", "best_download", "causal_conv1d", "flash_attn", "ftfy", "hf_transfer", "lm_dataformat",
        "mamba_ssm", "sentencepiece", "tiktoken", "wandb", "zstandard",
    )  # fmt: skip
    sys.path.insert(0, str(folder))
    _keep_on_cpu()
    from megatron import NeoXArgs, mpu
    from megatron.model.gpt2_model import GPT2ModelPipe

    world = torch.distributed.get_world_size()
    settings = {
        "num_layers": NUM_LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "seq_length": LENGTH,
        "max_position_embeddings": LENGTH,
        "pos_emb": "rotary",
        "no_weight_tying": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "pipe_parallel_size": world,
        "model_parallel_size": 1,
        "train_iters": num_steps,
        "train_micro_batch_size_per_gpu": SAMPLES_PER_MICRO_BATCH,
        "gradient_accumulation_steps": NUM_MICRO_BATCHES,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "lr_decay_iters": num_steps,
        "global_num_gpus": world,
        "precision": "fp32",
        "tokenizer_type": "CharLevelTokenizer",
        "scaled_upper_triang_masked_softmax_fusion": False,
        "bias_gelu_fusion": False,
        "use_cpu_initialization": True,
    }
    neox_args = NeoXArgs.from_dict(settings)
    neox_args.padded_vocab_size = VOCABULARY
    neox_args.rank = torch.distributed.get_rank()
    topology = PipeModelDataParallelTopology(num_pp=world, num_mp=1, num_dp=1)
    mpu.initialize_model_parallel(1, topology=topology)
    deepspeed.checkpointing.configure(mpu)
    mpu.model_parallel_cuda_manual_seed(3)
    module = GPT2ModelPipe(neox_args, topology=topology)
    positions = torch.arange(LENGTH).expand(SAMPLES_PER_MICRO_BATCH, -1)
    weights = torch.ones(SAMPLES_PER_MICRO_BATCH, LENGTH)
    data = [((text[:, :-1], positions, causal_mask()), (text[:, 1:], weights)) for text in tokens(num_steps)]
    return module, data


def megatron(folder: Path, num_steps: int) -> Built:
    """deepspeedai/Megatron-DeepSpeed: ``GPTModelPipe``, cut by ``type:transformer`` (Apache-2.0)."""
    allow_missing(
        "amp_C", "apex", "einops", "flash_attn", "nltk", "sentencepiece", "six", "tiktoken", "transformer_engine",
        "wandb",
    )  # fmt: skip
    sys.path.insert(0, str(folder))
    _keep_on_cpu()
    world = torch.distributed.get_world_size()
    sys.argv[1:] = [
        *("--num-layers", str(NUM_LAYERS), "--hidden-size", str(HIDDEN), "--num-attention-heads", str(HEADS)),
        *("--seq-length", str(LENGTH), "--max-position-embeddings", str(LENGTH), "--lr", "1e-3"),
        *("--micro-batch-size", "1", "--train-iters", str(num_steps)),
        *("--global-batch-size", str(NUM_MICRO_BATCHES)),
        *("--pipeline-model-parallel-size", str(world), "--hidden-dropout", "0", "--attention-dropout", "0"),
        *("--use-cpu-initialization", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--deepspeed"),
        *("--distributed-backend", "gloo", "--no-gradient-accumulation-fusion", "--no-bias-dropout-fusion"),
        *(
            "--tokenizer-type",
            "NullTokenizer",
            "--vocab-size",
            str(VOCABULARY - 1),
            "--make-vocab-size-divisible-by",
            "1",
        ),
    ]
    from megatron.arguments import core_transformer_config_from_args, parse_args, validate_args
    from megatron.core import mpu, tensor_parallel
    from megatron.global_vars import set_args

    arguments = parse_args()
    arguments.deepspeed_config_dict = {}
    arguments.padded_vocab_size = VOCABULARY
    validate_args(arguments)
    arguments.attn_mask = causal_mask()  # as its pretrain_gpt.py does: the mask does not travel
    set_args(arguments)
    mpu.initialize_model_parallel(1, world)
    torch.manual_seed(3)
    tensor_parallel.model_parallel_cuda_manual_seed(3)
    from megatron.model.gpt_model import GPTModelPipe

    module = GPTModelPipe(core_transformer_config_from_args(arguments))
    # Its attention without fused kernels takes one sample at a time: a view asks for what a slice is not.
    positions, weights = torch.arange(LENGTH).expand(1, -1), torch.ones(1, LENGTH)
    data = [((text[:1, :-1], positions), (text[:1, 1:], weights)) for text in tokens(num_steps)]
    return module, data


class _Denoising(torch.nn.Module):
    """A residual block that also hands on the time."""

    def __init__(self, first: int = HIDDEN, last: int = HIDDEN) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(first, last)

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, time = both
        if not time.requires_grad:
            time.requires_grad_(True)  # as its first layers do: a gradient comes for every float that travels
        return torch.tanh(self.linear(x)) + time, time


class _Diffusion:
    """What diffusion-pipe asks of a model: inputs and a target from noise that each process draws for itself."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(torch.distributed.get_rank())

    def prepare_inputs(self, batch: torch.Tensor, timestep_quantile: float | None = None) -> Any:
        noise = torch.randn(batch.shape, generator=self.random)
        time = torch.rand(len(batch), 1, generator=self.random)
        return ((1 - time) * batch + time * noise, time), (noise - batch, None)


def diffusion_pipe(folder: Path, num_steps: int) -> Built:
    """tdrussell/diffusion-pipe: its module, loader, schedule and reduction on a toy model (MIT)."""
    allow_missing(
        "PIL", "comfy", "comfy_api", "datasets", "diskcache", "hyvideo", "imageio", "multiprocess", "peft", "tqdm",
        "transformers",
    )  # fmt: skip
    sys.path.insert(0, str(folder))
    stock_to = torch.Tensor.to
    torch.Tensor.to = lambda self, *to, **named: self if to[:1] == ("cuda",) else stock_to(self, *to, **named)  # type: ignore[method-assign, assignment]
    from deepspeed.runtime.pipe import schedule
    from utils.dataset import PipelineDataLoader
    from utils.patches import train_schedule_steps
    from utils.pipeline import ManualPipelineModule

    schedule.TrainSchedule.steps = train_schedule_steps
    layers = [_Denoising() for _ in range(2 * NUM_LAYERS)]
    module = ManualPipelineModule(
        layers=layers,
        num_stages=torch.distributed.get_world_size(),
        partition_method=os.environ.get("PEERS_METHOD", "parameters"),
        loss_fn=lambda outputs, label: torch.nn.functional.mse_loss(outputs[0], label[0]),
        dynamic_shape=True,
    )
    random = torch.Generator().manual_seed(1)
    shape = (SAMPLES_PER_MICRO_BATCH * NUM_MICRO_BATCHES, HIDDEN)
    pictures = [torch.randn(shape, generator=random) for _ in range(num_steps)]
    source = (folder / "train.py").read_text()
    names: dict[str, Any] = {}
    for node in ast.parse(source).body:  # what it does with arguments and files is not run
        if isinstance(node, ast.FunctionDef) and node.name == "get_data_iterator_for_step":
            exec(ast.get_source_segment(source, node) or "", names)

    def steps(engine: Any) -> Iterator[Any]:
        if not engine.zero_optimization():  # as its gradient release does
            deepspeed.PipelineEngine._INSTRUCTION_MAP[schedule.ReduceGrads] = lambda engine: None
        loader = PipelineDataLoader(pictures, engine, NUM_MICRO_BATCHES, _Diffusion(), num_dataloader_workers=0)
        while True:
            engine.reset_activation_shape()
            yield names["get_data_iterator_for_step"](loader, engine)
            loader.sync_epoch()

    return module, steps


def gpt_lite(folder: Path, num_steps: int) -> Built:
    """brunomaga/brunomaga.github.io: its GPT in DeepSpeed's pipeline, of modules that are built already."""
    places = {
        "real": folder / "assets/GPTlite/gptlite.py",
        "pipe": folder / "assets/GPTlite-distributed/gptlite_ds.py",
    }

    def load(name: str) -> ModuleType:
        specification = importlib.util.spec_from_file_location(f"gptlite_{name}", places[name])
        assert specification is not None and specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        return module

    real = load("real")

    class Block(real.Block):  # type: ignore[name-defined, misc]
        """Takes the arguments that the pipeline's file has for it."""

        def __init__(self, width: int, num_heads: int) -> None:
            super().__init__(width, num_heads, width // num_heads, 0.0)

    # The pipeline's file imports these from an earlier version of the other one.
    settings = {"n_layer": NUM_LAYERS, "n_embd": HIDDEN, "n_head": HEADS, "block_size": LENGTH, "Block": Block}
    sys.modules["gptlite"] = SimpleNamespace(**settings)  # type: ignore[assignment]
    pipe = load("pipe")
    criterion = pipe.CrossEntropyLoss_FlatView()
    module = pipe.get_model(VOCABULARY, criterion, pipeline_num_stages=torch.distributed.get_world_size())
    return module, [(text[:, :-1], text[:, 1:].contiguous()) for text in tokens(num_steps)]


def alexnet(folder: Path, num_steps: int) -> Built:
    """deepspeedai/DeepSpeedExamples: its tutorial's pipeline, AlexNet by modules and a function (Apache-2.0)."""
    folder = folder / "training" / "pipeline_parallelism"
    sys.path.insert(0, str(folder))
    allow_missing("torchvision")
    from alexnet import AlexNet  # type: ignore[import-not-found]
    from train import join_layers  # type: ignore[import-not-found]

    net = AlexNet(num_classes=10)
    for layer in net.classifier:
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0  # drawn by the process that has the layer
    loss = torch.nn.CrossEntropyLoss()
    module = PipelineModule(join_layers(net), loss_fn=loss, num_stages=torch.distributed.get_world_size())
    random = torch.Generator().manual_seed(1)
    shape = (SAMPLES_PER_MICRO_BATCH, 3, 64, 64)
    pictures = [torch.randn(shape, generator=random) for _ in range(num_steps * NUM_MICRO_BATCHES)]
    return module, [(each, each.mean((2, 3)).argmax(1)) for each in pictures]


def _keep_on_cpu() -> None:
    """Let code that names CUDA where it means its accelerator run on the one that DeepSpeed found."""
    torch.cuda.current_device = lambda: get_accelerator().current_device_name()  # type: ignore[assignment, return-value]


def draw_weights(module: PipelineModule) -> None:
    """Draw every weight from its name, which no cut changes. Layers that are built by rank draw as the cut is."""
    for name, parameter in module.named_parameters():
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if parameter.dim() > 1:
            wide = max(1.0, parameter[0].numel() / 128)  # AlexNet's would overflow
            parameter.data = 0.2 / wide**0.5 * torch.randn(parameter.shape, generator=random)


STRANGERS: dict[str, Callable[[Path, int], Built]] = {
    "gpt-neox": neox,
    "megatron-deepspeed": megatron,
    "transpeeder": transpeeder,
    "gdgpt": gdgpt,
    "diffusion-pipe": diffusion_pipe,
    "gpt-lite": gpt_lite,
    "alexnet": alexnet,
}

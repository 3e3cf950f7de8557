"""Pipelines from public repositories, built tiny by their own code. Each function takes the checkout's folder.

A function returns the pipeline module and a list of micro-batches as DeepSpeed's engine reads them, or a function
that makes of the engine what it trains on in each step. What a model only imports and never calls here, such as
tokenizers and fused kernels, need not be installed: ``allow_missing`` stands in.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
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
from deepspeed.pipe import LayerSpec, PipelineModule
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


def _loaded(name: str, path: Path) -> ModuleType:
    """One file of a repository, where what stands beside it must not be found."""
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


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
    llama = _loaded("gdgpt_llama", folder / "models" / "llama.py")
    config = _llama_config()
    config._attn_implementation = "eager"
    layers = llama.get_llama_causal_lm_specs(config, load_path="", tie_emb=True, from_scratch=True)
    world = torch.distributed.get_world_size()
    module = PipelineModule(layers, loss_fn=_next_token_loss, num_stages=world)
    data = [
        (torch.stack([text[:, :-1], torch.ones_like(text[:, :-1])], -1), text[:, 1:]) for text in tokens(num_steps)
    ]
    return module, data


def gdgpt_bloom(folder: Path, num_steps: int) -> Built:
    """CoinCheung/gdGPT: BLOOM; layers that are compiled, a ``forward`` that is set in each, ties (Apache-2.0)."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    bloom = _loaded("gdgpt_bloom", folder / "models" / "bloom.py")
    config = bloom.BloomConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, n_layer=NUM_LAYERS, n_head=HEADS)
    layers = bloom.get_bloom_causal_lm_specs(config, load_path="", tie_emb=True, from_scratch=True)
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

    # A method, where DeepSpeed 0.19.8 saves an attribute of this name: a checkpoint would pickle the whole module.
    GPTModelPipe.universal_checkpoint_info = None
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
    real = _loaded("gptlite_real", folder / "assets/GPTlite/gptlite.py")

    class Block(real.Block):  # type: ignore[name-defined, misc]
        """Takes the arguments that the pipeline's file has for it."""

        def __init__(self, width: int, num_heads: int) -> None:
            super().__init__(width, num_heads, width // num_heads, 0.0)

    # The pipeline's file imports these from an earlier version of the other one.
    settings = {"n_layer": NUM_LAYERS, "n_embd": HIDDEN, "n_head": HEADS, "block_size": LENGTH, "Block": Block}
    sys.modules["gptlite"] = SimpleNamespace(**settings)  # type: ignore[assignment]
    pipe = _loaded("gptlite_pipe", folder / "assets/GPTlite-distributed/gptlite_ds.py")
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


class _Qwen(torch.nn.Module):
    """A block with the arguments of Qwen's, whose own code is not in the repository."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.linear = torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Any, rotary_pos_emb_list: Any, attention_mask: Any, head_mask: Any) -> tuple[Any]:
        turn = rotary_pos_emb_list[0][0] + rotary_pos_emb_list[0][1]
        scores = self.attend(hidden) @ (hidden * turn).transpose(1, 2) / HIDDEN**0.5
        hidden = hidden + (scores + attention_mask[:, 0]).softmax(-1) @ hidden
        return (hidden + torch.tanh(self.linear(hidden)),)


def mpp_llava(folder: Path, num_steps: int) -> Built:
    """Coobiw/MPP-LLaVA: all but a projection is frozen; labels travel, and the last layers give the loss."""
    stock_tensor = torch.tensor
    torch.tensor = lambda *values, device=None, **named: stock_tensor(*values, **named)  # it names CUDA
    # Beside it stands the whole model, which asks for weights that a download gives.
    sys.modules["mpp"], sys.modules["mpp.minigpt4qwen"] = ModuleType("mpp"), SimpleNamespace(Minigpt4Qwen=Any)  # type: ignore[assignment]
    pipe = _loaded("mpp.minigpt4qwen_pipe", folder / "lavis/models/minigpt4qwen_models/minigpt4qwen_pipe.py")
    num_pictures, pixels = 4, 3 * 8 * 8
    seen = [torch.nn.Flatten(), torch.nn.Linear(pixels, HIDDEN), torch.nn.Unflatten(1, (1, HIDDEN))]
    former = torch.nn.Module()
    former.bert = lambda query_embeds, encoder_hidden_states, **_: SimpleNamespace(
        last_hidden_state=query_embeds + encoder_hidden_states
    )
    transformer = torch.nn.Module()
    transformer.wte = torch.nn.Embedding(VOCABULARY, HIDDEN)
    transformer.drop = torch.nn.Identity()
    transformer.config = SimpleNamespace(num_hidden_layers=NUM_LAYERS)
    transformer.use_dynamic_ntk = False
    transformer.h = torch.nn.ModuleList(_Qwen() for _ in range(NUM_LAYERS))
    transformer.ln_f = torch.nn.LayerNorm(HIDDEN)
    transformer.get_ntk_alpha = None
    rotary = torch.nn.Module()
    angles = torch.outer(torch.arange(LENGTH), 0.5 ** torch.arange(HIDDEN))[None]
    rotary.forward = lambda length, ntk_alpha: [angles[:, :length].cos(), angles[:, :length].sin()]  # type: ignore[method-assign]
    transformer.rotary_emb = rotary
    model = torch.nn.Module()
    model.llm_model = torch.nn.Module()
    model.llm_model.transformer = transformer
    model.llm_model.lm_head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
    model.visual_encoder, model.ln_vision, model.Qformer = (
        torch.nn.Sequential(*seen),
        torch.nn.LayerNorm(HIDDEN),
        former,
    )
    model.query_tokens = torch.nn.Parameter(torch.zeros(1, num_pictures, HIDDEN))
    model.requires_grad_(False)  # and then its projection to the language model alone is trained
    model.llm_proj = torch.nn.Linear(HIDDEN, HIDDEN)
    model.replace_image_token_id, model.freeze_llm, model.enable_autocast = 0, True, False
    model.maybe_autocast = lambda: None
    layers = pipe.get_model(model, freeze_llm=True, llm_grad_ckpt=False)
    # As its script has it: the last layer keeps weights that nothing uses, for a stage must have some.
    module = PipelineModule(layers, num_stages=torch.distributed.get_world_size(), partition_method="uniform")
    random = torch.Generator().manual_seed(1)
    data = []
    for text in tokens(num_steps):
        words = text[:, :-1].clamp(min=1)
        words[:, :num_pictures] = 0
        labels = words.masked_fill(words == 0, -100)
        picture = torch.randn(len(words), 3, 8, 8, generator=random)
        data.append(((picture, words, labels, torch.ones_like(words)), labels))
    return module, data


def llama_pipeline_parallel(folder: Path, num_steps: int) -> Built:
    """SparkJiao/llama-pipeline-parallel: layers that share a model which is built already, two classes tied."""
    wrapped = _loaded("llama_ds_mp_wrap", folder / "models" / "llama_ds_mp_wrap.py")
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    world = torch.distributed.get_world_size()
    layers = wrapped.get_model(LlamaForCausalLM(_llama_config()))
    module = PipelineModule(layers, num_stages=world, loss_fn=wrapped.loss_fn)
    positions = torch.arange(LENGTH).expand(SAMPLES_PER_MICRO_BATCH, -1)
    # Of booleans: for one of floats plain DeepSpeed wants a gradient, unless it recomputes activations.
    mask = causal_mask().expand(SAMPLES_PER_MICRO_BATCH, -1, -1, -1)
    texts = [text[:, :-1] for text in tokens(num_steps)]
    return module, [((text, mask, positions), text) for text in texts]


def chatglm_finetuning(folder: Path, num_steps: int) -> Built:
    """liucongg/ChatGLM-Finetuning at 710e6e6: two classes tied, the loss is a layer, the last one."""
    sys.path.insert(0, str(folder))
    allow_missing("icetk", "sentencepiece", "tensorboard")
    from configuration_chatglm import ChatGLMConfig  # type: ignore[import-not-found]
    from modeling_chatglm import ChatGLMForConditionalGeneration  # type: ignore[import-not-found]
    from train_pipeline import get_model  # type: ignore[import-not-found]

    begin, mask = 150004, 150001  # which its layers look for
    config = ChatGLMConfig(
        vocab_size=150005, hidden_size=HIDDEN, num_layers=NUM_LAYERS, num_attention_heads=HEADS,
        inner_hidden_size=2 * HIDDEN, max_sequence_length=LENGTH,
    )  # fmt: skip
    model = ChatGLMForConditionalGeneration(config).float()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()  # a checkpoint would give them: its layers are made without values
    module = PipelineModule(layers=get_model(model), num_stages=torch.distributed.get_world_size())
    data = []
    for text in tokens(num_steps):
        words = text[:, :-1].clone()
        words[:, 4], words[:, 5] = mask, begin
        data.append(((words, words.masked_fill(torch.arange(LENGTH) < 6, -100)), words))
    return module, data


def huggingface_utils(folder: Path, num_steps: int) -> Built:
    """drunkcoding/huggingface-utils: T5, encoder and decoder, whose boundaries differ in number and shapes."""
    sys.path.insert(0, str(folder))
    from hfutils.pipe.t5 import T5DeepSpeedPipe  # type: ignore[import-not-found]
    from transformers.models.t5.configuration_t5 import T5Config

    config = T5Config(
        vocab_size=VOCABULARY, d_model=HIDDEN, d_kv=HIDDEN // HEADS, d_ff=2 * HIDDEN, num_layers=NUM_LAYERS // 2,
        num_heads=HEADS, dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[:, 0], labels)

    module = T5DeepSpeedPipe(config, num_stages=torch.distributed.get_world_size(), loss_fn=loss)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)  # it draws those of norms, too, and another cut draws others
    return module, [((text[:, :-1], torch.ones_like(text[:, :-1])), text[:, -1]) for text in tokens(num_steps)]


def huggingface_utils_vit(folder: Path, num_steps: int) -> Built:
    """drunkcoding/huggingface-utils: the vision transformer, whose boundaries are tuples of one tensor."""
    sys.path.insert(0, str(folder))
    allow_missing("turtle")  # which it imports by mistake
    from hfutils.pipe.vit import (  # type: ignore[import-not-found]
        ViTClassifierPipe,
        ViTEmbeddingsPipe,
        ViTLayerPipe,
    )
    from transformers.models.vit.configuration_vit import ViTConfig

    config = ViTConfig(
        hidden_size=HIDDEN, num_hidden_layers=NUM_LAYERS, num_attention_heads=HEADS, intermediate_size=2 * HIDDEN,
        image_size=16, patch_size=4, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    layers = [
        LayerSpec(ViTEmbeddingsPipe, config),
        *(LayerSpec(ViTLayerPipe, config) for _ in range(NUM_LAYERS)),
        LayerSpec(ViTClassifierPipe, config),
    ]
    loss = torch.nn.functional.cross_entropy
    module = PipelineModule(layers, num_stages=torch.distributed.get_world_size(), loss_fn=loss)
    random = torch.Generator().manual_seed(1)
    shape = (SAMPLES_PER_MICRO_BATCH, 3, 16, 16)
    texts = tokens(num_steps)
    return module, [((torch.randn(shape, generator=random),), text[:, 0] % 10) for text in texts]


def qlora_pipe(folder: Path, num_steps: int) -> Built:
    """tdrussell/qlora-pipe: its module, which cuts by sizes of its own, on toy layers (MIT)."""
    sys.path.insert(0, str(folder))
    allow_missing("accelerate", "axolotl", "bitsandbytes", "hqq", "peft", "datasets")
    deepspeed.PipelineEngine.mem_status = lambda *_, **__: None  # DeepSpeed 0.19.8 has it no longer
    from utils.engine import CustomPipelineEngine, CustomPipelineModule  # type: ignore[import-not-found]

    deepspeed.PipelineEngine = CustomPipelineEngine  # which its own ``initialize`` makes
    layers = [_Denoising() for _ in range(2 * NUM_LAYERS)]
    module = CustomPipelineModule(
        layers=layers,
        use_column_major_topology=True,
        model=SimpleNamespace(config=SimpleNamespace(eos_token_id=None)),
        num_stages=torch.distributed.get_world_size(),
        partition_method="parameters",
        loss_fn=lambda outputs, label: torch.nn.functional.mse_loss(outputs[0], label),
    )
    random = torch.Generator().manual_seed(1)
    count, shape = num_steps * NUM_MICRO_BATCHES, (SAMPLES_PER_MICRO_BATCH, HIDDEN)
    pictures = iter([torch.randn(shape, generator=random) for _ in range(count)])
    micro_batches = (((each, each[:, :1]), each.flip(1)) for each in pictures)

    def steps(engine: Any) -> Iterator[Any]:
        train, evaluate, engine.total_steps = engine.train_batch, engine.eval_batch, num_steps

        def train_batch(iterator: Any) -> torch.Tensor:
            engine.set_dataiterator(iterator)
            return train()[0].mean()

        engine.train_batch, engine.eval_batch = train_batch, lambda iterator: evaluate(iterator)[0].mean()
        return itertools.repeat(micro_batches)

    return module, steps


def decentralized(folder: Path, num_steps: int) -> Built:
    """DS3Lab/Decentralized_FM_alpha: GPT whose blocks checkpoint themselves, as layers that are built."""
    sys.path.insert(0, str(folder))
    allow_missing("cupy", "icetk", "sentencepiece")
    from modules.dist_gpt_ds_module import GlueSeqClassificationPipeModel  # type: ignore[import-not-found]

    arguments = SimpleNamespace(embedding_dim=HIDDEN, seq_length=LENGTH, num_layers=NUM_LAYERS, num_heads=HEADS)
    model = GlueSeqClassificationPipeModel(arguments, VOCABULARY, 2)
    module = PipelineModule(
        layers=model.to_layers_for_deepspeed_pipeline(),
        loss_fn=torch.nn.CrossEntropyLoss(),
        num_stages=torch.distributed.get_world_size(),
        partition_method="uniform",
    )
    return module, [(text[:, :-1], text[:, 0] % 2) for text in tokens(num_steps)]


def fmengine(folder: Path, num_steps: int) -> Built:
    """eth-easl/fmengine: GPT-NeoX of Hugging Face's layers; tuples travel, of one tensor at the end."""
    sys.path.insert(0, str(folder))
    engine = ModuleType("transformer_engine")
    engine.pytorch = ModuleType("transformer_engine.pytorch")  # type: ignore[attr-defined]
    engine.pytorch.Linear = torch.nn.Linear  # type: ignore[attr-defined]
    sys.modules |= {"transformer_engine": engine, "transformer_engine.pytorch": engine.pytorch}  # type: ignore[attr-defined]
    allow_missing("apex", "flash_attn", "loguru", "wandb")
    from fmengine.modeling.neox.neox_model import NeoxModelPipe  # type: ignore[import-not-found]
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXConfig

    config = GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=NUM_LAYERS, num_attention_heads=HEADS,
        intermediate_size=2 * HIDDEN, max_position_embeddings=LENGTH, use_parallel_residual=True,
    )  # fmt: skip
    module = NeoxModelPipe(
        SimpleNamespace(),
        config,
        None,
        loss_fn=lambda outputs, labels: _next_token_loss(outputs[0], labels),
        num_stages=torch.distributed.get_world_size(),
    )
    positions = torch.arange(LENGTH).expand(SAMPLES_PER_MICRO_BATCH, -1)
    mask = causal_mask().expand(SAMPLES_PER_MICRO_BATCH, -1, -1, -1)
    return module, [((text[:, :-1], positions, mask), text[:, 1:].contiguous()) for text in tokens(num_steps)]


def bigscience(folder: Path, num_steps: int) -> Built:
    """bigscience-workshop/Megatron-DeepSpeed: ``GPTModelPipe`` of BLOOM, ALiBi, a norm behind the embedding."""
    allow_missing("amp_C", "apex", "flash_attn", "nltk", "sentencepiece", "six", "tensorboard", "wandb")
    norm = ModuleType("megatron.model.fused_layer_norm")  # a kernel for CUDA
    norm.MixedFusedLayerNorm = torch.nn.LayerNorm  # type: ignore[attr-defined]
    sys.modules[norm.__name__] = norm
    sys.path.insert(0, str(folder))
    _keep_on_cpu()
    world = torch.distributed.get_world_size()
    sys.argv[1:] = [
        *("--num-layers", str(NUM_LAYERS), "--hidden-size", str(HIDDEN), "--num-attention-heads", str(HEADS)),
        *("--seq-length", str(LENGTH), "--lr", "1e-3", "--micro-batch-size", str(SAMPLES_PER_MICRO_BATCH)),
        *("--max-position-embeddings", str(LENGTH), "--train-iters", str(num_steps)),
        *("--global-batch-size", str(NUM_MICRO_BATCHES * SAMPLES_PER_MICRO_BATCH)),
        *("--pipeline-model-parallel-size", str(world), "--hidden-dropout", "0", "--attention-dropout", "0"),
        *("--use-cpu-initialization", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--deepspeed"),
        *("--distributed-backend", "gloo", "--no-bias-dropout-fusion", "--embed-layernorm"),
        *("--position-embedding-type", "alibi", "--tokenizer-type", "GPT2BPETokenizer"),
    ]
    importlib.import_module("megatron.model.glu_activations")  # which its arguments ask for, and do not import
    from megatron import global_vars, mpu
    from megatron.arguments import parse_args  # type: ignore[attr-defined]

    arguments = parse_args()
    arguments.padded_vocab_size, arguments.deepspeed_config_dict = VOCABULARY, {}
    arguments.pretrain_causal_attention = True  # as its pretrain_gpt.py does: the mask does not travel
    global_vars._GLOBAL_ARGS = arguments
    mpu.initialize_model_parallel(1, world)
    mpu.random._set_cuda_rng_state = lambda *_, **__: None
    torch.cuda.get_rng_state = torch.get_rng_state  # type: ignore[assignment]
    mpu.model_parallel_cuda_manual_seed(3)
    from megatron.model.gpt_model import GPTModelPipe

    module = GPTModelPipe(parallel_output=True)
    positions = torch.arange(LENGTH).expand(SAMPLES_PER_MICRO_BATCH, -1)
    mask = causal_mask().expand(SAMPLES_PER_MICRO_BATCH, -1, -1, -1)
    weights = torch.ones(SAMPLES_PER_MICRO_BATCH, LENGTH)
    data = [((text[:, :-1], positions, mask), (text[:, 1:].contiguous(), weights)) for text in tokens(num_steps)]
    return module, data


def minimal_llama(folder: Path, num_steps: int) -> Built:
    """zphang/minimal-llama: LLaMA whose blocks cut and convert what they keep beside their weights."""
    sys.path.insert(0, str(folder))
    from minimal_llama.deepspeed_pipeline_model import PipelineLLaMA
    from minimal_llama.model import ModelArgs

    sizes = ModelArgs(
        dim=HIDDEN, n_layers=NUM_LAYERS, n_heads=HEADS, vocab_size=VOCABULARY, max_seq_length=2 * LENGTH
    )
    module = PipelineLLaMA(sizes, num_stages=torch.distributed.get_world_size())
    return module, [(text[:, :-1], text[:, 1:].contiguous()) for text in tokens(num_steps)]


def _keep_on_cpu() -> None:
    """Let code that names CUDA where it means its accelerator run on the one that DeepSpeed found."""
    torch.cuda.current_device = lambda: get_accelerator().current_device_name()  # type: ignore[assignment, return-value]


def easyllm(folder: Path, num_steps: int, dropout: float = 0.0) -> Built:
    """ModelTC/EasyLLM: ``LlamaModelPipe``, with functions between its layers and a loss that is an object.

    Its attention drops by numbers of a state that DeepSpeed's tracker holds.
    """
    allow_missing("flash_attn", "peft", "petrel_client", "sentencepiece", "tiktoken", "torchvision")
    sys.path.insert(0, str(folder))
    _keep_on_cpu()
    from llm.utils.env import dist_env, setup_deepspeed_random_and_activation_checkpointing

    dist_env.initialize_model_parallel(1, torch.distributed.get_world_size())
    setup_deepspeed_random_and_activation_checkpointing(NUM_LAYERS, 1)
    deepspeed.checkpointing._set_cuda_rng_state = torch.set_rng_state
    dist_env.model_parallel_cuda_manual_seed(3)
    from llm.models.mg_models.llama import transformer
    from llm.models.mg_models.llama.llama import llama_custom

    # The one for other types than bf16 takes no positions, which are given.
    transformer.apply_rotary_pos_emb = transformer.apply_rotary_pos_emb_torch
    module = llama_custom(
        num_layers=NUM_LAYERS,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_attention_heads=HEADS,
        vocab_size=VOCABULARY,
        seq_length=LENGTH,
        micro_batch_size=SAMPLES_PER_MICRO_BATCH,
        use_flash_attn=False,
        checkpoint_activations=dropout > 0,
        sync_tp_duplicated_parameters=False,  # a mean that gloo does not have
        transformer_layer_params={
            "masked_softmax_fusion": False,
            "bias_dropout_fusion": False,
            "attention_dropout": dropout,
        },
    )
    positions = torch.arange(LENGTH).expand(SAMPLES_PER_MICRO_BATCH, -1)
    mask = causal_mask().expand(SAMPLES_PER_MICRO_BATCH, -1, -1, -1)
    weights = torch.ones(SAMPLES_PER_MICRO_BATCH, LENGTH)
    data = [((text[:, :-1], positions, mask), (text[:, 1:].contiguous(), weights)) for text in tokens(num_steps)]
    return module, data


def gpt_x(folder: Path, num_steps: int) -> Built:
    """nawnoes/pytorch-gpt-x: a GPT of modules that are built, with ReZero, whose loss shifts the labels."""
    sys.path[:0] = [str(folder), str(folder / "train_deepspeed")]
    allow_missing("wandb", "ds_util")
    train = _loaded("gptx_train", folder / "train_deepspeed/train_rezero_sparsetopk.py")
    config = SimpleNamespace(
        vocab_size=VOCABULARY, dim=HIDDEN, depth=NUM_LAYERS, n_head=HEADS, max_seq_len=LENGTH + 1,
        num_stages=torch.distributed.get_world_size(),
    )  # fmt: skip

    module = train.get_model(config)
    for part in module.modules():  # of this rank alone: a plan must take it along
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    return module, [(text, text) for text in tokens(num_steps)]


def ml815(folder: Path, num_steps: int) -> Built:
    """Yaxin9Luo/ml815_final_project: targets travel through all layers, and the loss is given no labels."""
    sys.path.insert(0, str(folder))
    names = _definitions(folder / "train_deepspeed.py")
    config = names["GPTConfig"](
        block_size=LENGTH, vocab_size=VOCABULARY, n_layer=NUM_LAYERS, n_head=HEADS, n_embd=HIDDEN, bias=False
    )
    config.dropout = 0.0
    layers, loss = names["build_pipeline_layers"](config), names["GPTPipelineLoss"]()
    module = PipelineModule(
        layers, loss_fn=loss, num_stages=torch.distributed.get_world_size(), partition_method="uniform"
    )
    return module, [((text[:, :-1], text[:, 1:].contiguous()), None) for text in tokens(num_steps)]


def _definitions(file: Path) -> dict[str, Any]:
    """The classes and functions of a script that trains when it is imported."""
    names: dict[str, Any] = {"__name__": file.stem}
    tree = ast.parse(file.read_text())
    wanted = (ast.ClassDef, ast.FunctionDef, ast.Import, ast.ImportFrom)
    kept = [node for node in tree.body if isinstance(node, wanted)]
    exec(compile(ast.Module(kept, []), str(file), "exec"), names)
    return names


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
    "mpp-llava": mpp_llava,
    "llama-pipeline-parallel": llama_pipeline_parallel,
    "chatglm-finetuning": chatglm_finetuning,
    "huggingface-utils": huggingface_utils,
    "qlora-pipe": qlora_pipe,
    "huggingface-utils-vit": huggingface_utils_vit,
    "gdgpt-bloom": gdgpt_bloom,
    "decentralized-fm": decentralized,
    "fmengine": fmengine,
    "bigscience-megatron": bigscience,
    "minimal-llama": minimal_llama,
    "easyllm": easyllm,
    "gpt-x": gpt_x,
    "ml815": ml815,
    "easyllm-dropout": functools.partial(easyllm, dropout=0.2),
}

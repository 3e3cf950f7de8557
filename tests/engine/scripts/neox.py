"""A training script in the manner of GPT-NeoX: everything comes from a file, the partition method included.

It knows nothing of MadPipe: ``test_scripts.py`` runs it as it is, and again with one line and one word changed.
"""

import argparse
import json
import zlib
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import torch
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import RepeatingLoader

from tests.engine import language

# install here
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo alone serves; the extension needs a compiler


def initialize_by_name(model: torch.nn.Module) -> None:
    """The same weights on every cut. DeepSpeed's ``seed_layers`` fails here: its cut holds integers of numpy."""
    for name, weight in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        torch.nn.init.normal_(weight, 1.0 if "norm.weight" in name else 0.0, 0.2, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--conf_file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    neox_args = SimpleNamespace(**json.loads(Path(args.conf_file).read_text()))

    deepspeed.init_distributed("gloo")
    world, num_pp = torch.distributed.get_world_size(), neox_args.pipe_parallel_size
    topology = PipeModelDataParallelTopology(num_pp=num_pp, num_mp=1, num_dp=world // num_pp)
    model = language.GPT2ModelPipe(neox_args, topology=topology)
    initialize_by_name(model)
    optimizer = torch.optim.AdamW(language.parameters_for_weight_decay(model), lr=1e-2)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        args=args,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        dist_init_required=False,
        model_parameters=None,
        config_params=neox_args.deepspeed_config,
        mpu=None,
    )
    engine.set_has_attention_mask(True)
    engine.set_batch_fn(language.batch_of)

    replica, num_replicas = engine.mpu.get_data_parallel_rank(), engine.mpu.get_data_parallel_world_size()
    loader = RepeatingLoader([language.text(number) for number in range(replica, 64, num_replicas)])
    data_iterator = iter(loader) if engine.is_first_stage() or engine.is_last_stage() else None
    losses = [engine.train_batch(data_iter=data_iterator).item() for _ in range(neox_args.train_iters)]
    if engine.global_rank == 0:
        print("RESULT", json.dumps({"losses": losses, "parts": [int(cut) for cut in engine.module.parts]}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

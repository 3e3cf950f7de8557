"""A pipeline script in the manner of DeepSpeed's tutorial: a small AlexNet on scikit-learn's digits.

It knows nothing of MadPipe: ``test_scripts.py`` runs it as it is, and again with one line and one word changed.
"""

import argparse
import json

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.utils import set_random_seed
from sklearn.datasets import load_digits
from torch import nn

# install here
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo alone serves; the extension needs a compiler


class AlexNet(nn.Module):
    """Without dropout, whose random numbers depend on the rank that draws them."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, kernel_size=3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, kernel_size=3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(16, 16, kernel_size=3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, num_classes))


def join_layers(vision_model: AlexNet) -> list:
    return [
        *vision_model.features,
        vision_model.avgpool,
        lambda x: torch.flatten(x, 1),
        *vision_model.classifier,
    ]


def get_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="digits")
    parser.add_argument("--local_rank", type=int, default=-1, help="local rank passed from distributed launcher")
    parser.add_argument("-s", "--steps", type=int, default=4)
    parser.add_argument("-p", "--pipeline-parallel-size", type=int, default=2)
    parser.add_argument("--backend", type=str, default="gloo")
    parser.add_argument("--seed", type=int, default=1138)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def train_pipe(args: argparse.Namespace, part: str = "parameters") -> None:
    set_random_seed(args.seed)
    net = PipelineModule(
        layers=join_layers(AlexNet()),
        loss_fn=nn.CrossEntropyLoss(),
        num_stages=args.pipeline_parallel_size,
        partition_method=part,
        activation_checkpoint_interval=0,
    )
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    trainset = torch.utils.data.TensorDataset(images, torch.tensor(digits.target))
    engine, _, _, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=[parameter for parameter in net.parameters() if parameter.requires_grad],
        training_data=trainset,
    )
    losses = [engine.train_batch().item() for _ in range(args.steps)]
    if engine.global_rank == 0:
        print("RESULT", json.dumps({"losses": losses, "parts": [int(cut) for cut in engine.module.parts]}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    args = get_args()
    deepspeed.init_distributed(dist_backend=args.backend)
    train_pipe(args)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()

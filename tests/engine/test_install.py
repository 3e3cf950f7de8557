"""``install()`` leaves models that are no pipeline alone."""

import os
import socket
import subprocess
import sys

import pytest

pytest.importorskip("torch")

PROGRAM = """
import deepspeed, torch
initialize, engine_class = deepspeed.initialize, deepspeed.PipelineEngine
import deepspeed_partition
deepspeed_partition.install()
deepspeed_partition.install()
assert deepspeed.initialize is initialize and deepspeed.PipelineEngine is engine_class
engine, *_ = deepspeed.initialize(
    model=torch.nn.Linear(2, 2),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "gradient_clipping": 0.0,
        "pipeline": {"partition_method": "madpipe"},
    },
)
assert type(engine) is deepspeed.DeepSpeedEngine
before = engine.module.bias.detach().clone()
engine.backward(engine(torch.ones(1, 2)).sum())
engine.step()
assert torch.allclose(engine.module.bias, before - 0.5)
layers = [torch.nn.Linear(2, 2) for _ in range(3)]
for method in ("madpipe", "uniform"):
    print("built with", method)
    deepspeed.pipe.PipelineModule(layers, num_stages=1, loss_fn=torch.nn.MSELoss(), partition_method=method)
"""


def test_other_models_are_untouched():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, **place, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    planned, stock = done.stdout.partition("built with madpipe")[2].split("built with uniform")
    assert "SEED_LAYERS" not in planned and "topology" not in planned, "lines that nobody can use"
    assert "SEED_LAYERS" in stock, "DeepSpeed's own stays as it is"

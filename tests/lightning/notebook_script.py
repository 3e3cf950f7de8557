"""The cells of a notebook, in one process that says of itself that it is one: ranks are forked from it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytorch_lightning as pl
import pytorch_lightning.trainer.connectors.accelerator_connector as connector
import torch
from pytorch_lightning.utilities.exceptions import MisconfigurationException

import lightning_madpipe
from tests.lightning.lightning_cases import Classifier, loader

connector._IS_INTERACTIVE = True  # as in IPython and in python -i
# A forked thread that has computed on several threads waits for ever for those that helped it.
torch.set_num_threads(4)
(torch.randn(700, 700) @ torch.randn(700, 700)).exp().sum()


SHOWN: list[tuple[Any, ...]] = []
"""What the kernel of this notebook was given to send, with the process that sent it."""


class Session:
    """Of a kernel: it drops messages of processes that are forked from it."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def send(self, stream: Any, message: Any, content: Any = None, *others: Any, **options: Any) -> None:
        if os.getpid() == self._process:
            SHOWN.append((stream, message, content, options.get("buffers"), options.get("ident")))


KERNEL = SimpleNamespace(session=Session(), iopub_socket="iopub")
sys.modules["IPython"] = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=KERNEL))  # type: ignore[assignment]


class Model(Classifier):
    fails_at = interrupts_at = -1

    def on_train_start(self) -> None:
        """Shows a picture, as matplotlib and progress bars do."""
        content, buffers = {"rank": self.global_rank}, [memoryview(b"pixels")]
        KERNEL.session.send("iopub", "display_data", content, ident=b"display", buffers=buffers)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.interrupts_at == batch_idx:
            os.kill(os.getppid(), signal.SIGINT)  # somebody interrupts the kernel
        if self.fails_at == batch_idx:
            raise ValueError("a step of mine fails")
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        # More than the buffer of a pipe holds.
        return self(batch[0]).repeat(1, 3000)


def model() -> Model:
    torch.manual_seed(0)
    return Model(optimizer="sgd")


def trainer(folder: str, **settings: Any) -> Any:
    return pl.Trainer(
        accelerator="cpu", max_epochs=2, enable_progress_bar=False, enable_model_summary=False, logger=False,
        default_root_dir=folder, num_sanity_val_steps=0, **settings,
    )  # fmt: skip


def told(act: Any, *arguments: Any, kind: type[BaseException] = MisconfigurationException) -> str:
    try:
        act(*arguments)
    except kind as error:
        return f"{error} {error.__cause__}"
    raise AssertionError(f"no {kind.__name__}")


def main(folder: str) -> None:
    data, trained = loader(64), model()
    strategy = lightning_madpipe.MadPipeStrategy(num_micro_batches=4, warmup_steps=2)
    fitting = trainer(folder, strategy=strategy, devices=2)
    fitting.fit(trained, data)
    assert sorted(SHOWN, key=lambda each: each[2]["rank"]) == [
        ("iopub", "display_data", {"rank": rank}, [b"pixels"], b"display") for rank in range(2)
    ]

    expected = model()
    alone = trainer(f"{folder}/alone", devices=1)
    connector._IS_INTERACTIVE = False
    alone.fit(expected, data)
    connector._IS_INTERACTIVE = True
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    assert (fitting.global_step, fitting.current_epoch) == (alone.global_step, alone.current_epoch)
    assert fitting.state.finished
    for metrics, others in (
        (fitting.callback_metrics, alone.callback_metrics),
        (fitting.logged_metrics, alone.logged_metrics),
    ):
        assert metrics.keys() == others.keys() and len(metrics)
        for name in metrics:
            torch.testing.assert_close(metrics[name].cpu(), others[name], rtol=1e-4, atol=1e-5)
    assert Path(fitting.checkpoint_callback.best_model_path).exists()
    assert strategy.plan is not None and "<svg" in strategy.plan._repr_html_()
    strategy.gather_model()
    assert "ModelCheckpoint in fit" in told(fitting.save_checkpoint, f"{folder}/saved.ckpt")
    assert "make a new Trainer" in told(fitting.fit, trained, data)

    predicted = fitting.predict(trained, data)
    torch.testing.assert_close(
        torch.cat(predicted)[:, :4], torch.cat([trained(x) for x, _ in data]), rtol=1e-4, atol=1e-5
    )

    before = {name: value.clone() for name, value in trained.state_dict().items()}
    trained.interrupts_at = 1
    told(trainer(folder, strategy="madpipe", devices=2).fit, trained, data, kind=SystemExit)  # by Lightning
    assert not multiprocessing.active_children()
    for name, value in before.items():
        torch.testing.assert_close(trained.state_dict()[name], value, rtol=0, atol=0)

    trained.interrupts_at, trained.fails_at = -1, 3
    said = told(trainer(folder, strategy="madpipe", devices=2).fit, trained, data, kind=ValueError)
    assert "a step of mine fails" in said and "in training_step" in said
    trained.fails_at, trained.pipeline_layers = -1, lambda: [trained.head]
    said = told(trainer(folder, strategy="madpipe", devices=2).fit, trained, data)
    assert "parameters outside its pipeline layers" in said and "Traceback" not in said
    assert not multiprocessing.active_children()
    del trained.pipeline_layers

    assert "several machines" in told(
        lambda: pl.Trainer(strategy="madpipe", devices=2, num_nodes=2, accelerator="cpu")
    )
    kept = lightning_madpipe.MadPipeStrategy(whole_model="none")
    assert "in a notebook leave it out" in told(trainer(folder, strategy=kept, devices=2).fit, trained, data)
    here = model()
    trainer(folder, strategy="madpipe", devices=1).fit(here, data)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(here.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    assert "restart the kernel" in told(lambda: trainer(folder, strategy="madpipe", devices=2))
    print("done")


signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
main(sys.argv[1])

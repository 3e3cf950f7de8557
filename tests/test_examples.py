"""The examples of the README run, and print what they say they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.terminal import output_in_a_terminal

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def run(*command: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def on_a_screen(text: str) -> list[str]:
    """Return the lines that stay on a terminal: progress bars are written again and again on their own lines."""
    lines, row, column = [""], 0, 0
    for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)", text):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
        elif part.startswith("\x1b["):
            number = int(part[2:-1]) if part[2:-1].isdecimal() else 1
            if part[-1] == "A":
                row -= number
            elif part == "\x1b[2K":
                lines[row] = ""
        elif part:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines]


def in_a_terminal(*command: str, columns: int = 80) -> list[str]:
    """Return the lines that a command leaves on a terminal."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm"}
    text = output_in_a_terminal(command, environment, columns=columns, folder=EXAMPLES.parent)
    return on_a_screen(text.replace("\r\n", "\n\r"))


EXPECTED = (
    "planned against measured",
    "live tensor bytes of rank 1",
    "on DeepSpeed's default cut ('parameters')",
)


def test_the_main_example_prints_25_lines_at_most_on_a_noisy_machine():
    """It filled 125 lines of 80 columns once, and 28 where a line said that times vary."""
    example = str(EXAMPLES / "train_lightning.py")
    lines = in_a_terminal(sys.executable, "-m", "tests.noisy_example", example, "--epochs", "2")
    text = "\n".join(lines)
    for expected in (*EXPECTED, "device 1 |", " of 24 times vary by over half"):
        assert expected in text, text
    said = [line for line in lines if line]
    # A plan with several stages on a device names the devices, which may take a line more.
    most = 25 + (" on devices [" in text)
    assert len(said) <= most and max(map(len, said)) <= 80, text


def test_training_with_deepspeed_prints_plan_and_measurements():
    output = run(*TORCHRUN, str(EXAMPLES / "train_deepspeed.py"), "--steps", "6")
    in_one_line = " ".join(output.split())  # a terminal's width, and the lengths of numbers, say where lines end
    for expected in EXPECTED:
        assert expected in output
    assert " if transfers overlap, lower bound " in in_one_line


def test_a_hugging_face_model_is_fine_tuned():
    pytest.importorskip("transformers")
    output = run(sys.executable, str(EXAMPLES / "finetune_huggingface.py"), "--epochs", "1")
    assert "after 1 epochs" in output and "the plan (madpipe) cuts" in output


@pytest.mark.parametrize("factory", ["digits", "gpt"])
def test_factories_can_be_profiled_and_planned(tmp_path, factory):
    madpipe = [sys.executable, "-m", "deepspeed_partition"]
    chain, plan = str(tmp_path / "chain.json"), str(tmp_path / "plan.json")
    model = f"{EXAMPLES / 'factories.py'}:{factory}"
    run(*madpipe, "profile", model, "--micro-batch", "2", "-o", chain, "--threads", "1", "--repeats", "2")
    run(*madpipe, "plan", chain, "--devices", "2", "--memory", "1GB", "--bandwidth", "1GB/s", "-o", plan)
    assert "ok. Replayed" in run(*madpipe, "check", plan, chain)

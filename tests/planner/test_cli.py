"""The command line: results, exit statuses, and one sentence for what goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_partition import Chain, Plan, Platform, cli, make_plan
from tests.planner.test_files import CHAIN, changed

PLATFORM = ["--devices", "2", "--memory", "500MB", "--bandwidth", "12GB/s"]


def test_plan_check_show(tmp_path, chain, capsys):
    out = str(tmp_path / "plan.json")
    assert cli.run(["plan", chain, *PLATFORM, "--micro-batches", "4", "-o", out]) == 0
    text = capsys.readouterr().out
    assert "madpipe: step of 4 micro-batches: " in text and "steady state of the step: period 60 ms" in text
    assert "in DeepSpeed's engine" in text
    assert Plan.load(out).num_micro_batches == 4
    assert cli.run(["check", out, chain]) == 0
    assert "ok. Replayed: step " in capsys.readouterr().out
    assert cli.run(["show", out]) == 0
    shown = capsys.readouterr().out
    assert "F0===" in shown
    assert "SB0" in shown
    assert "F0.0 F0.1 F0.2 B0.0" in shown  # one more than DeepSpeed begins with, which hides the transfers


def test_a_step_that_is_not_shown_whole_says_where_it_is(tmp_path, chain, capsys):
    """It ended in "and 21 more", and the README said that no figure is lost."""
    out = str(tmp_path / "plan.json")
    for number in (4, 14, 60):
        assert cli.run(["plan", chain, *PLATFORM, "--micro-batches", str(number), "-o", out]) == 0
        capsys.readouterr()
        assert cli.run(["show", out]) == 0
        shown = capsys.readouterr().out
        assert ("order of one step:" in shown) is (number < 60)
        assert ("more\n" in shown) is (number == 14)
        assert ('the whole order of a step is "order" in the file of the plan\n' in shown) is (number > 4)
    assert len(json.loads(Path(out).read_text())["order"][0]) == 120


def test_the_readme_names_the_commands_without_json():
    text = (Path(cli.__file__).parent / "planner" / "README.md").read_text()
    without = sorted(
        name
        for name, command in cli.cli.commands.items()
        if not any("--json" in option.opts for option in command.params)
    )
    assert without == ["report", "trace"]
    assert "but `report` and `trace` takes `--json`" in " ".join(text.split())


def test_json_is_the_plan_and_nothing_else(chain, capsys):
    assert cli.run(["plan", chain, *PLATFORM, "--json"]) == 0
    captured = capsys.readouterr()
    expected = make_plan(Chain.from_dict(CHAIN), Platform(num_devices=2, memory_bytes=500e6, bandwidth=12e9))
    printed = Plan.from_dict(json.loads(captured.out)).to_dict()
    assert printed | {"planning_seconds": 0} == expected.to_dict() | {"planning_seconds": 0}
    assert captured.err == ""


def test_a_broken_plan_fails_the_check(tmp_path, chain, capsys):
    plan = make_plan(Chain.from_dict(CHAIN), Platform(num_devices=2, memory_bytes=500e6, bandwidth=12e9)).to_dict()
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(changed("peak_memory_bytes.0", 5, plan)))
    assert cli.run(["check", str(broken), chain]) == 1
    assert "and the plan says 5" in capsys.readouterr().out


def test_nothing_fits(chain, capsys):
    assert cli.run(["plan", chain, "--devices", "2", "--memory", "1MB", "--bandwidth", "1GB/s"]) == 3
    sentence = capsys.readouterr().err
    assert "layer 'b' alone" in sentence
    assert "the smallest memory that would do is" in sentence
    assert sentence.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "Missing argument 'CHAIN'"),
        (["fly"], "No such command 'fly'"),
        (["plan", "CHAIN", "--devices", "0", "--memory", "1GB", "--bandwidth", "1"], "0 is not in the range"),
        (["plan", "CHAIN", "--devices", "2", "--memory", "huge", "--bandwidth", "1"], "'huge' is not a size"),
        (["plan", "CHAIN", "--devices", "2", "--memory", "0", "--bandwidth", "1"], "more than 0"),
        (["plan", "CHAIN", "--devices", "2", "--memory", "1GB", "--bandwidth", "0"], "more than zero"),
        (["plan", "CHAIN", *PLATFORM, "--weight-copies", "nan"], "weight_copies is nan"),
        (["plan", "CHAIN", *PLATFORM, "--algorithm", "best"], "unknown algorithm 'best': known are madpipe"),
        (["plan", "CHAIN", *PLATFORM, "--algorithm", "0,9"], "do not rise from 0 to 2"),
        (["plan", "CHAIN", *PLATFORM, "--micro-batches", "100000"], "from 1 to 10000"),
        (["plan", "CHAIN", *PLATFORM, "-o", "/no/such/folder/plan.json"], "/no/such/folder"),
        (["plan", "/no/such/chain.json", *PLATFORM], "/no/such/chain.json: cannot be read"),
        (["check", "CHAIN", "CHAIN"], "format is 'madpipe-chain/1', not 'madpipe-plan/1'"),
        (["show", "CHAIN"], "format is 'madpipe-chain/1', not 'madpipe-plan/1'"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(chain, capsys, arguments, message):
    assert cli.run([chain if each == "CHAIN" else each for each in arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") <= 2, "at most a usage line and one sentence"
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_a_plan_of_another_chain_is_refused(tmp_path, chain, capsys):
    other = tmp_path / "other.json"
    other.write_text(json.dumps(changed("layers.0.forward_seconds", 0.5)))
    plan = str(tmp_path / "plan.json")
    assert cli.run(["plan", chain, *PLATFORM, "-o", plan]) == 0
    capsys.readouterr()
    assert cli.run(["check", plan, str(other)]) == 2
    assert "plan again" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(tmp_path, chain, capsys):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    assert cli.run(["plan", chain, *PLATFORM, "-o", str(folder / "plan.json")]) == 2
    assert "no permission" in capsys.readouterr().err


def test_devices_and_pipes_are_written_in_folders_without_permission(tmp_path, chain, capsys, monkeypatch):
    """They were refused to all but root, who may write to ``/dev``."""
    fifo, file = tmp_path / "fifo", tmp_path / "file"
    os.mkfifo(fifo)
    file.touch()
    locked = {"/dev", str(tmp_path)}
    monkeypatch.setattr("os.access", lambda path, mode: str(path) not in locked)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert cli.run(["convert", chain, "-o", str(fifo)]) == 0
        assert json.loads(os.read(reader, 10**5)) == Chain.load(chain).to_dict()
        assert cli.run(["convert", chain, "-o", "/dev/null"]) == 0
        locked.add(str(fifo))
        for refused in (fifo, file, tmp_path / "new"):
            capsys.readouterr()
            assert cli.run(["convert", chain, "-o", str(refused)]) == 2
            assert "no permission" in capsys.readouterr().err
    finally:
        os.close(reader)


def test_the_installed_command(chain):
    """Through the real entry point: --version, a pipe that closes early, and no torch for planning."""

    def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "deepspeed_partition", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)

    assert run("--version").stdout == "madpipe 0.1.0\n"
    assert run("plan", chain, *PLATFORM).returncode == 0
    script = f"{sys.executable} -m deepspeed_partition plan {chain} {' '.join(PLATFORM)} --json | head -1"
    piped = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert (piped.stdout, piped.stderr) == ("{\n", "")


def test_importing_and_planning_costs_no_torch(chain):
    code = (
        "import sys, deepspeed_partition; from deepspeed_partition import cli; "
        f"assert cli.run(['plan', {chain!r}, *{PLATFORM!r}, '--json']) == 0; "
        f"assert cli.run(['compare', {chain!r}, *{PLATFORM!r}]) == cli.run(['convert', {chain!r}]) == 0; "
        "assert not {'torch', 'deepspeed', 'pytorch_lightning'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

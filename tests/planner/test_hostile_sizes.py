"""Files that are far too large are refused in one sentence, in less processor time than a user notices."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

NODE = (
    "node{} -- Linear -- "
    "forward_compute_time=1.0, backward_compute_time=1.0, activation_size=1.0, parameter_size=1.0\n"
)
LAYER = {"name": "a", "forward_seconds": 1.0, "backward_seconds": 1.0, "weight_bytes": 1, "output_bytes": 1}
HEAD = {"format": "madpipe-chain/1", "input_bytes": 1}


def layers(number: int, **more: object) -> str:
    return json.dumps({**HEAD, "layers": [{**LAYER, **more}] * number})


# Each took from 4 s to more than 90 s of the processor, or as many gigabytes.
FILES = {
    "200,000 layers": (lambda: layers(200_000), "values, and at most 1000000 are read"),
    "too many layers": (lambda: layers(10_001), "layers has 10001 entries, and at most 10000 are read"),
    "34 MB of objects": (lambda: "[" + "{}," * 11_300_000 + "{}]", "larger than 33554432 bytes"),
    "15 MB of objects": (lambda: "[" + "{}," * 5_000_000 + "{}]", "values, and at most 1000000 are read"),
    "a name of 10 MB": (lambda: layers(1, name="n" * 10**7), "layers[0].name is a text of 10000000 characters"),
    "a key of 1 MB": (lambda: layers(1, **{"k" * 10**6: 1}), "a key of more than 65536 characters"),
    "the last layer": (lambda: layers(9_999)[:-2] + ", {}]}", "layers[9999].name is missing"),
    "deep lists": (lambda: "[" * 900_000, "nested too deeply"),
    "a graph": (lambda: "".join(map(NODE.format, range(200_000))), "the graph has 200000 nodes"),
    "edges": (lambda: NODE.format(1) + "\tnode1 -- node1\n" * 10**6, "1000001 lines, and at most 20000 are read"),
    "a long line": (lambda: NODE.format("a" * 10**7), "line 1 has more than 65536 characters"),
}
GROUP, LEVEL = {"count": 1, "memory_bytes": 1}, {"bandwidth": 1.0}


def machines(**more: object) -> str:
    return json.dumps({"format": "madpipe-machines/1", "devices": [GROUP], "links": [LEVEL], **more})


MACHINES = {
    "400,000 entries": (lambda: machines(devices=[GROUP] * 400_000), "values, and at most 1000000 are read"),
    "too many entries": (lambda: machines(devices=[GROUP] * 4097), "with more than 4096 entries"),
    "too many devices": (lambda: machines(devices=[{**GROUP, "count": 4096}] * 4096), "at most 4096"),
    "too many levels": (lambda: machines(links=[LEVEL] * 100_000), "with more than 16 entries"),
    "prices": (lambda: machines(price_per_device_hour=[1.0] * 900_000), "with more than 4096 entries"),
    "34 MB of objects": (lambda: "[" + "{}," * 11_300_000 + "{}]", "larger than 33554432 bytes"),
    "a name of 10 MB": (lambda: machines(devices=[{**GROUP, "name": "n" * 10**7}]), "is a text of 10000000 char"),
    "deep lists": (lambda: "[" * 900_000, "nested too deeply"),
}
PROGRAM = """
import sys, time
from deepspeed_partition import cli
began = time.process_time()
status = cli.run(sys.argv[1:])
print(status, time.process_time() - began)
"""


def refusal(*arguments: str) -> str:
    """What a command says that ends in less than 2 s of the processor, with one sentence."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    status, seconds = done.stdout.split()[-2:]
    assert status == "2" and float(seconds) < 2, (status, seconds)
    assert done.stderr.count("\n") <= 2 and "Traceback" not in done.stderr, done.stderr[-2000:]
    return done.stderr


@pytest.mark.parametrize("name", FILES)
def test_what_is_far_too_large_is_refused_soon(tmp_path, name):
    make, sentence = FILES[name]
    path = tmp_path / "file"
    path.write_text(make())
    told = refusal("plan", str(path), "--devices", "2", "--memory", "16GB", "--bandwidth", "12GB/s")
    assert sentence in told, told[:500]
    if path.read_bytes()[:4] != b"node":
        refusal("show", str(path))


@pytest.mark.parametrize("name", MACHINES)
def test_far_too_many_machines_are_refused_soon(tmp_path, name):
    make, sentence = MACHINES[name]
    chain, path = tmp_path / "chain.json", tmp_path / "machines.json"
    chain.write_text(layers(2))
    path.write_text(make())
    told = refusal("plan", str(chain), "--machines", str(path))
    assert sentence in told and "machines.json" in told, told[:500]

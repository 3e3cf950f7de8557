"""Imports go one way: each room of the house imports rooms that stand before it, and none behind."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("deepspeed_partition", "lightning_madpipe")
PLANNER, SOLVERS = "deepspeed_partition.planner", "deepspeed_partition.planner.solvers"
ENGINE, LIGHTNING = "deepspeed_partition.engine", "lightning_madpipe"
ROOMS = [
    f"{PLANNER}.errors", f"{PLANNER}.units", f"{PLANNER}.io", f"{PLANNER}.deadline",
    f"{PLANNER}.warm_up_report", f"{PLANNER}.mcap_profile", f"{PLANNER}.machines",
    f"{PLANNER}.problem", f"{PLANNER}.graphs",
    f"{PLANNER}.allocation", f"{PLANNER}.schedule", f"{PLANNER}.clock", f"{PLANNER}.step",
    f"{PLANNER}.schemes", f"{PLANNER}.weight_versions", f"{PLANNER}.plan",
    f"{PLANNER}.renumbering", f"{PLANNER}.training_bytes", f"{PLANNER}.memory", f"{PLANNER}.recomputation",
    f"{PLANNER}.data_parallel", SOLVERS, f"{SOLVERS}.pattern",
    f"{SOLVERS}.contiguous", f"{SOLVERS}.non_contiguous", f"{SOLVERS}.step", f"{PLANNER}.simulate",
    f"{PLANNER}.assembly", f"{PLANNER}.infeasible", f"{PLANNER}.machine_planning",
    "deepspeed_partition.schedule", f"{PLANNER}.planning", f"{PLANNER}.buffers",
    f"{PLANNER}.operation_costs", f"{PLANNER}.remedies",
    f"{PLANNER}.replication",
    f"{PLANNER}.cluster", f"{PLANNER}.report", "deepspeed_partition.quiet",
    "deepspeed_partition.versions",
    "deepspeed_partition.layer_calls", "deepspeed_partition", "deepspeed_partition.options",
    "deepspeed_partition.code_names", "deepspeed_partition.names_of_forward",
    "deepspeed_partition.generators", "deepspeed_partition.hidden_modules",
    "deepspeed_partition.pipeline_attributes", "deepspeed_partition.capture",
    "deepspeed_partition.raw_states", "deepspeed_partition.kept_values", "deepspeed_partition.dropped_writing",
    "deepspeed_partition.profiling",
    "deepspeed_partition.cli_options", "deepspeed_partition.cli", "deepspeed_partition.__main__",
    f"{ENGINE}.runtime", f"{ENGINE}.repairs",
    f"{ENGINE}.pipeline", f"{ENGINE}.repartition", f"{ENGINE}.checkpoint", f"{ENGINE}.warmup",
    f"{ENGINE}.engine", f"{ENGINE}.install", f"{ENGINE}.captured_model",
    ENGINE, f"{ENGINE}.incremental",
    f"{LIGHTNING}.settings",
    f"{LIGHTNING}.finding", f"{LIGHTNING}.module",
    f"{LIGHTNING}.compat", f"{LIGHTNING}.steps", f"{LIGHTNING}.checkpoint", f"{LIGHTNING}.groups",
    f"{LIGHTNING}.captured_layers", f"{LIGHTNING}.planning", f"{LIGHTNING}.spread_model",
    f"{LIGHTNING}.preflight", f"{LIGHTNING}.notebook_messages", f"{LIGHTNING}.forked_ranks",
    f"{LIGHTNING}.progress", f"{LIGHTNING}.strategy",
    LIGHTNING,
]  # fmt: skip
"""In the order in which they may be imported; a module belongs to the longest name that it begins with."""
WITHOUT_TORCH = ("deepspeed_partition.planner", "deepspeed_partition.schedule", "deepspeed_partition.options")
LAZY = {
    (f"{PLANNER}.plan", f"{PLANNER}.report"): "Plan.summary() is drawn where it is asked for",
    (f"{PLANNER}.problem", f"{PLANNER}.graphs"): "Chain.load() reads PipeDream's files, too",
    ("deepspeed_partition.cli", f"{ENGINE}.incremental"): "profile --mcap trains; nothing else needs a host",
}
"""Imports within functions that go against the order, and why."""


def modules() -> dict[str, Path]:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files
    }


MODULES = modules()


def room_of(module: str) -> str:
    return max((room for room in ROOMS if f"{module}.".startswith(f"{room}.")), key=len)


def imports(module: str) -> Iterator[tuple[str, bool]]:
    """Modules of the project that a module imports, and whether it does when it is imported itself."""
    tree = ast.parse(MODULES[module].read_text())
    only_for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in only_for_types:
            for name in node.names:
                for found in (f"{node.module}.{name.name}", node.module):
                    if found in MODULES:
                        yield found, node in tree.body
                        break


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_one_way(module):
    place = ROOMS.index(room_of(module))
    for imported, at_once in imports(module):
        if ROOMS.index(room_of(imported)) <= place or module in PACKAGES:
            continue
        assert not at_once and (module, room_of(imported)) in LAZY, f"{module} imports {imported}"


def test_every_room_is_there():
    assert {room_of(module) for module in MODULES} >= set(ROOMS)


@pytest.mark.parametrize("module", [each for each in sorted(MODULES) if each.startswith(WITHOUT_TORCH)])
def test_planner_and_schedule_need_no_host(module):
    names = {
        (alias.name if isinstance(node, ast.Import) else node.module or "").partition(".")[0]
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert names.isdisjoint({"torch", "deepspeed", "lightning", "pytorch_lightning"})


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_name_twice(package):
    names = Counter(file.name for module, file in MODULES.items() if module.startswith(package))
    assert [name for name, count in names.items() if count > 1 and name != "__init__.py"] == []


def test_every_folder_says_what_it_is_for():
    for module, file in MODULES.items():
        if file.name == "__init__.py":
            text = ast.get_docstring(ast.parse(file.read_text()))
            assert text, module


SENDING = re.compile(
    r"barrier|monitored_barrier|(all_|reduce_)?(reduce|gather|scatter|broadcast|to_all)\w*|i?(send|recv)\w*"
)
"""Functions of ``torch.distributed`` by which ranks communicate."""


def calls_of_distributed(file: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("dist"), attr=name)) if SENDING.fullmatch(name):
                yield node


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_sent_over_the_default_group(package):
    """What else communicates there, as a signal's handler of Lightning, comes between two of our messages."""
    found, num_calls = [], 0
    for module, file in MODULES.items():
        for call in calls_of_distributed(file) if module.startswith(package) else ():
            num_calls += 1
            keywords = {keyword.arg for keyword in call.keywords}
            # None stands for **options.
            if not keywords & {"group", None} and "group" not in map(ast.unparse, call.args):
                found.append(f"{module}:{call.lineno}: {ast.unparse(call)}")
    assert not found and num_calls

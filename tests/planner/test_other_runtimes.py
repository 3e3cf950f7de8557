"""Plans in the files of other runtimes: what they say is the plan, and the rest is refused."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from deepspeed_partition import Chain, LayerProfile, Plan, Platform, cli, make_plan
from deepspeed_partition.schedule.other_runtimes import ConversionError, megatron_layout, torch_csv

GPT = ["Embedding", *["Block"] * 9, "LayerNorm", "Linear"]


def chain_of(kinds: Sequence[str], *, named: bool = True) -> Chain:
    layers = tuple(
        LayerProfile(
            name=f"{index}.{kind}" if named else kind,
            forward_seconds=0.01 * (1 + index % 3),
            backward_seconds=0.02,
            weight_bytes=10**6,
            output_bytes=10**5,
            stash_bytes=10**6,
        )
        for index, kind in enumerate(kinds)
    )
    return Chain(input_bytes=10**5, layers=layers, name="gpt")


def planned(
    kinds: Sequence[str] = GPT, *, devices: int = 3, micro_batches: int | None = 4, cuts: str = ""
) -> Plan:
    platform = Platform(num_devices=devices, memory_bytes=10**9, bandwidth=1e9)
    return make_plan(chain_of(kinds), platform, algorithm=cuts or "contiguous", num_micro_batches=micro_batches)


def on_devices(plan: Plan, devices: Sequence[int]) -> Plan:
    """The stages of ``plan`` on other devices, without what it says of them."""
    number = max(devices) + 1
    return replace(
        plan,
        platform=replace(plan.platform, num_devices=number),
        stages=tuple(replace(stage, device=device) for stage, device in zip(plan.stages, devices, strict=True)),
        operations=(),
        memory=plan.memory[:number],
        peak_memory_bytes=plan.peak_memory_bytes[:number],
        step=None,
    )


def read_layout(text: str) -> list[str]:
    """The stages of a layout, as its grammar says: ``x*n`` is n times x, stages stand between bars."""
    stages = text.split("|")
    return [
        "".join(letter * int(count or 1) for letter, count in re.findall(r"(.)(?:\*(\d+))?", s)) for s in stages
    ]


def test_a_schedule_file_has_each_operation_in_the_plans_order() -> None:
    plan = planned()
    assert plan.step is not None
    rows = [row.split(",") for row in torch_csv(plan).splitlines()]
    for row, order in zip(rows, plan.step.order, strict=True):
        assert row == [f"{name[1:]}{name[0]}{micro_batch}" for name, micro_batch in order]
    assert sorted(itertools.chain(*rows)) == sorted(
        f"{stage}{kind}{number}" for stage in range(3) for kind in "FB" for number in range(4)
    )


def test_a_steady_state_is_unrolled_for_so_many_micro_batches() -> None:
    plan = planned(micro_batches=None)
    with pytest.raises(ConversionError, match="names no number of micro-batches"):
        torch_csv(plan)
    rows = [row.split(",") for row in torch_csv(plan, 7).splitlines()]
    assert [len(row) for row in rows] == [14] * 3
    for row in rows:
        for kind in "FB":
            numbers = [int(each.partition(kind)[2]) for each in row if kind in each]
            assert numbers == list(range(7))


def test_another_number_of_micro_batches_is_refused() -> None:
    with pytest.raises(
        ConversionError, match="for a step of 4 micro-batches, not of 5: plan with --micro-batches 5"
    ):
        torch_csv(planned(), 5)


@pytest.mark.parametrize("convert", [torch_csv, megatron_layout])
def test_recomputation_is_refused(convert) -> None:
    plan = planned()
    first, *others = plan.stages
    recomputed = replace(plan, stages=(replace(first, rematerialize=True), *others))
    with pytest.raises(ConversionError, match=r"recomputes layers of stage 0, which a .* cannot say"):
        convert(recomputed)


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_a_layout_has_the_stages_of_the_plan(devices: int) -> None:
    plan = planned(devices=devices)
    stages = read_layout(megatron_layout(plan))
    assert "".join(stages) == "E" + "t" * 9 + "L" and len(stages) == len(plan.stages)
    for text, stage in zip(stages, plan.stages, strict=True):
        assert text.count("t") == sum(GPT[layer] == "Block" for layer in range(*stage.layers))


def test_interleaved_stages_are_those_of_virtual_pipelines() -> None:
    plan = planned(devices=4, cuts="0,3,5,8,12")
    assert megatron_layout(on_devices(plan, [0, 1, 0, 1])) == "Et*2|t*2|t*3|t*2L"
    with pytest.raises(
        ConversionError, match="stage 2 of the plan is on device 1, and Megatron-LM puts it on device 0"
    ):
        megatron_layout(on_devices(plan, [0, 1, 1, 0]))
    with pytest.raises(ConversionError, match="4 stages on 3 devices"):
        megatron_layout(on_devices(plan, [0, 1, 2, 0]))


@pytest.mark.parametrize(
    ("kinds", "cuts", "sentence"),
    [
        (["Block"] * 6 + ["Linear"], "0,3,7", "layer 0 is a Block like those after it"),
        (["Embedding", "Block", "Block", "Pool", "Block", "Linear"], "0,3,6", "are no embedding, one run of"),
        (["Conv2d", "ReLU", "Linear"], "0,1,3", "are no embedding, one run of"),
        (["Embedding", "Dropout", "Block", "Block", "Linear"], "0,1,5", "the plan cuts them at 1"),
        (["Embedding", "Block", "Block", "LayerNorm", "Linear"], "0,4,5", "the plan cuts them at 4"),
    ],
)  # fmt: skip
def test_what_a_layout_cannot_say_is_refused(kinds: list[str], cuts: str, sentence: str) -> None:
    with pytest.raises(ConversionError, match=sentence):
        megatron_layout(planned(kinds, devices=2, cuts=cuts))


def test_a_layout_needs_names() -> None:
    plan = planned()
    nameless = replace(plan, stages=tuple(replace(stage, layer_names=()) for stage in plan.stages))
    with pytest.raises(ConversionError, match="no names for layers 0 to"):
        megatron_layout(nameless)


def test_the_command_writes_a_file_or_prints(tmp_path, capsys) -> None:
    source, out = tmp_path / "plan.json", tmp_path / "layout"
    plan = planned()
    plan.save(source)
    assert cli.run(["convert", str(source), "--to", "megatron-layout", "-o", str(out)]) == 0
    assert out.read_text() == f"{megatron_layout(plan)}\n" and "saved" in capsys.readouterr().out
    assert cli.run(["convert", str(source), "--to", "torch-csv"]) == 0
    assert capsys.readouterr().out == torch_csv(plan)
    for arguments in (
        ["--to", "torch-csv", "--json"], ["--to", "megatron-layout", "--micro-batches", "4"],
        ["--to", "torch-csv", "--micro-batches", "5"], ["--to", "chain"],
    ):  # fmt: skip
        assert cli.run(["convert", str(source), *arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") <= 3 and "Traceback" not in printed.err


def test_stages_are_written_as_short_as_they_are() -> None:
    """A stage with one layer, and ends that stand alone."""
    plan = planned(["Embedding", "Block", "Block", "Block", "Linear"], devices=4, cuts="0,1,2,4,5")
    assert megatron_layout(plan) == "E|t|t*2|L"

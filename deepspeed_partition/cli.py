"""The command line: ``madpipe profile``, ``plan``, ``schemes``, ``frontier``, ``compare``, ``check``, ``show``,
``report``, ``trace``, ``convert``.

Exit status: 0 done; 1 the check failed; 2 bad usage or bad input, one sentence; 3 no plan fits in memory; 130
interrupted before there was a plan.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Any

import click
from click.core import ParameterSource
from tqdm import tqdm

import deepspeed_partition
from deepspeed_partition.cli_options import (
    BANDWIDTH,
    DURATION,
    algorithm_option,
    chain_option,
    complete_algorithm,
    data_parallel_option,
    input_file,
    json_flag,
    measured_option,
    output_file,
    platform_options,
    plot_file,
    whole_numbers,
    zero_option,
)
from deepspeed_partition.planner import units
from deepspeed_partition.planner.cluster.scheme_choice import rank_schemes, strategy_of
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.errors import FormatError, InfeasibleError, MadPipeError
from deepspeed_partition.planner.io.files import parse_json, read_text, write_json, write_text
from deepspeed_partition.planner.machines import Machines
from deepspeed_partition.planner.mcap_profile import McapProfile
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.planning.make_plan import make_plan
from deepspeed_partition.planner.problem import LARGEST_MEMORY_BYTES, Chain, Platform
from deepspeed_partition.planner.remedies import with_remedies
from deepspeed_partition.planner.replication import Replicated, plan_replicated
from deepspeed_partition.planner.report import draw, draw_timelines
from deepspeed_partition.planner.report.comparison import COMPARED, compare
from deepspeed_partition.planner.report.frontier import frontier
from deepspeed_partition.planner.report.memory_report import explain_memory, memory_text
from deepspeed_partition.planner.report.page import plan_page
from deepspeed_partition.planner.report.pictures import comparison_svg, frontier_svg
from deepspeed_partition.planner.report.planned_run import planned_run, repeats_pattern
from deepspeed_partition.planner.report.terminal import as_text
from deepspeed_partition.planner.report.timeline import MeasuredTimeline
from deepspeed_partition.planner.report.trace import PLUGIN_SUFFIX, chrome_trace
from deepspeed_partition.planner.simulate.replay import replay
from deepspeed_partition.planner.solvers.contiguous.replicated import REPLICATED
from deepspeed_partition.planner.solvers.non_contiguous.madpipe import MadPipe
from deepspeed_partition.planner.weight_versions import FLUSH
from deepspeed_partition.schedule.other_runtimes import megatron_layout, torch_csv
from deepspeed_partition.schedule.shared_ports import shared_step_seconds
from deepspeed_partition.versions import HostError

TIMELINE_LABEL = len("device 100 ||") + draw_timelines.BUSY
"""Columns beside those of a timeline."""
DONE, CHECK_FAILED, BAD_INPUT, NO_PLAN_FITS, INTERRUPTED = 0, 1, 2, 3, 130


class Commands(click.Group):
    """Group of commands that suggests a command for a mistyped one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = get_close_matches(args[0], self.list_commands(ctx), n=1)
            known = f"did you mean {near[0]}?" if near else f"there are {', '.join(self.list_commands(ctx))}"
            raise click.UsageError(f"No such command {args[0]!r}: {known}", ctx) from error


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog='For completion in bash: eval "$(_MADPIPE_COMPLETE=bash_source madpipe)"; zsh and fish likewise.',
)
@click.version_option(deepspeed_partition.__version__, prog_name="madpipe", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Memory-aware pipeline parallelism: measure the layers, plan the cut, check the plan."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@cli.command()
@click.argument("factory", metavar="MODULE:FACTORY")
@click.option("--micro-batch", type=click.IntRange(min=1), required=True, help="Samples per micro-batch.")
@output_file("chain")
@click.option("--device", help="cpu, cuda, cuda:1; left out: a GPU if there is one.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Timed runs of a layer.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads; left out: torch's default.")
@click.option(
    "--mcap",
    is_flag=True,
    help="Measure the statistics of --algorithm mcap, too: about as many short training runs as layers.",
)
@click.option(
    "--config", type=click.Path(), help="DeepSpeed configuration with the optimizer and precision for --mcap."
)
@json_flag("the chain")
def profile(
    factory: str,
    micro_batch: int,
    output: str | None,
    device: str | None,
    repeats: int,
    threads: int | None,
    mcap: bool,
    config: str | None,
    as_json: bool,
) -> None:
    """Measure time and memory of each layer.

    FACTORY is called with the micro-batch size and returns the layers and one micro-batch, and with a third
    value the loss function. MODULE is a module or a file: package.models:gpt, models.py:gpt.
    """
    output, as_json = _result(output, as_json, factory.rpartition(":")[0])
    if not mcap:
        _refuse({"--config": config}, "has an effect only with --mcap")
    training = None if config is None else _json_object(config)
    # What the user's own code prints is no part of the JSON.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        from deepspeed_partition.profiling.factory import profile_factory  # torch

        chain = profile_factory(
            factory, micro_batch_size=micro_batch, device=device, repeats=repeats, threads=threads, progress=True
        )
        if mcap:
            chain = replace(chain, mcap=_incremental_profile(factory, micro_batch, training))
    _hand_over(chain, output, as_json, lambda: draw.chain_text(chain, _width(), colour=_colour()))


@cli.command()
@input_file("chain")
@platform_options(memory_is_required=True)
@data_parallel_option
@zero_option
@algorithm_option
@click.option(
    "--period",
    metavar="TIME",
    callback=DURATION,
    help="Plan for this period, such as 12ms, in as little memory as possible; left out: for the shortest.",
)
@click.option(
    "--start",
    "starts",
    metavar="PLAN",
    multiple=True,
    type=click.Path(),
    help="A plan for less memory, devices or bandwidth, which madpipe tries first; may be repeated.",
)
@click.option(
    "--machine-devices",
    type=click.IntRange(min=1),
    help=f"Devices in each machine, only for {REPLICATED}; left out: all are in one.",
)
@click.option(
    "--machine-bandwidth",
    metavar="SIZE/s",
    callback=BANDWIDTH,
    help=f"Bandwidth between two machines, only for {REPLICATED}.",
)
@output_file("plan")
@json_flag("the plan")
def plan(
    chain: str,
    algorithm: str,
    micro_batches: int | None,
    data_parallel: int | str | None,
    zero: str | None,
    period: float | None,
    starts: tuple[str, ...],
    machine_devices: int | None,
    machine_bandwidth: float | None,
    recompute: str,
    split_backward: bool,
    weight_versions: str,
    time_limit: float,
    output: str | None,
    as_json: bool,
    **platform: Any,
) -> None:
    """Decide where and when every layer of CHAIN runs.

    CHAIN is what profile wrote, or PipeDream's graph.txt; - reads standard input. Ctrl-C ends a search and gives
    the best plan so far. madpipe-paper takes seconds to minutes. Where pipedream-replicated gives its stages
    different numbers of replicas or has several machines, it has a table and no plan to save.
    """
    output, as_json = _result(output, as_json, chain)
    layers = _planned_chain(chain)
    no_effect: dict[str, object]
    if algorithm.strip() == REPLICATED:
        no_effect = {"--micro-batches": micro_batches, "--data-parallel": data_parallel, "--period": period}
        no_effect["--start"], no_effect["--zero"] = starts or None, zero
        no_effect["--machines"] = platform["machines"]
        no_effect["--recompute"] = None if recompute == "auto" else recompute
        no_effect["--split-backward"] = split_backward or None
        no_effect["--weight-versions"] = None if weight_versions == FLUSH else weight_versions
        no_effect["--duplex"] = None if platform["duplex"] == "half" else platform["duplex"]
        no_effect["--port-bandwidth"] = platform["port_bandwidth"]
        no_effect["--operation-seconds"] = platform["operation_seconds"] or None
        no_effect["--copy-bandwidth"] = platform["copy_bandwidth"]
        _refuse(no_effect, f"has no effect with {REPLICATED}, which chooses the replicas itself and plans no step")
        found = _plan_replicated(layers, _platform(**platform), machine_devices, machine_bandwidth, time_limit)
        _hand_over_replicated(found, output, as_json)
        return
    no_effect = {"--machine-devices": machine_devices, "--machine-bandwidth": machine_bandwidth}
    _refuse(no_effect, f"has an effect only with --algorithm {REPLICATED}")
    solver: str | MadPipe = algorithm
    if algorithm.strip() == "madpipe" and period is None:
        solver = MadPipe(start=tuple(_start(path, layers) for path in starts))
    elif starts:
        raise click.UsageError(
            "--start is only for --algorithm madpipe without --period", click.get_current_context()
        )
    devices = _platform(**platform)
    how: dict[str, Any] = {
        "algorithm": solver,
        "num_micro_batches": micro_batches,
        "data_parallel": data_parallel,
        "zero_stage": _zero_stage(zero, data_parallel),
        "period_seconds": period,
        "recompute": recompute,
        "split_backward": split_backward,
        "weight_versions": weight_versions,
    }
    with _watched_search() as deadline:
        try:
            made = make_plan(layers, devices, time_limit_seconds=time_limit, deadline=deadline, **how)
        except InfeasibleError as error:
            raise with_remedies(error, make_plan, layers, devices, deadline, time_limit, **how) from None
    _hand_over(made, output, as_json, lambda: _summary(made, _width()))


def _summary(made: Plan, width: int) -> str:
    return draw.summary(made, width, colour=_colour(), shared_seconds=shared_step_seconds(made))


@cli.command(name="compare")
@input_file("chain")
@platform_options(memory_is_required=True)
@data_parallel_option
@zero_option
@click.option(
    "--algorithm",
    "more",
    metavar="NAME",
    multiple=True,
    shell_complete=complete_algorithm,
    help="One more besides the usual ones, such as type:REGEX, 0,3,8 or madpipe-paper, which is slow; "
    "may be repeated.",
)
@plot_file("of the table")
@json_flag("the table")
def compare_command(
    chain: str,
    more: tuple[str, ...],
    micro_batches: int | None,
    data_parallel: int | str | None,
    zero: str | None,
    recompute: str,
    split_backward: bool,
    weight_versions: str,
    time_limit: float,
    plot: str | None,
    as_json: bool,
    **platform: Any,
) -> None:
    """Every algorithm on CHAIN, side by side.

    The best is that of the shortest period, with --micro-batches that of the shortest step, transfers
    overlapped. The gap is to the lower bound, which no schedule of any allocation beats. Exit 3 if nothing fits.
    """
    layers = _planned_chain(chain)
    _check_plot(plot)
    with _watched_search() as deadline:
        comparison = compare(
            layers,
            _platform(**platform),
            (*COMPARED, *more),
            num_micro_batches=micro_batches,
            data_parallel=data_parallel,
            zero_stage=_zero_stage(zero, data_parallel),
            time_limit_seconds=time_limit,
            deadline=deadline,
            recompute=recompute,
            split_backward=split_backward,
            weight_versions=weight_versions,
        )
        if not comparison.fitting and deadline.stopped:
            raise comparison.nothing_fits()  # perhaps only because nothing was found yet
    if as_json:
        _print_json(comparison.to_dict())
    else:
        click.echo(draw.comparison_text(comparison, _width(), colour=_colour()), nl=False)
    _save_plot(plot, lambda: comparison_svg(comparison), as_json)
    if not comparison.fitting:
        raise comparison.nothing_fits()


@cli.command(name="schemes")
@input_file("chain")
@platform_options(memory_is_required=True)
@click.option(
    "--numbers",
    metavar="N,N,...",
    callback=whole_numbers,
    help="Numbers of devices to compare, such as 4,8,16: the first so many; left out: all.",
)
@output_file("plan or strategy")
@json_flag("the table")
def schemes_command(
    chain: str,
    micro_batches: int | None,
    numbers: tuple[int, ...] | None,
    recompute: str,
    time_limit: float,
    output: str | None,
    as_json: bool,
    split_backward: bool,
    weight_versions: str,
    **platform: Any,
) -> None:
    """Every scheme of parallel training for CHAIN, the best first.

    Data parallel, ZeRO 1 to 3, pipelines and hybrids: seconds, memory per device, bytes sent, price. A step has 4
    micro-batches per device where --micro-batches is left out. --output writes the best that runs: a plan, or a
    DeepSpeed configuration, which also says what Lightning calls it. Exit 3 if nothing fits.
    """
    output, as_json = _result(output, as_json, chain)
    _refuse({"--split-backward": split_backward or None}, "is for plan and compare: schemes run whole backwards")
    asked = None if weight_versions == FLUSH else weight_versions
    _refuse({"--weight-versions": asked}, "is for plan, compare and frontier: schemes drain at every step")
    layers, whole = _planned_chain(chain), _platform(**platform)
    platforms = [_first_devices(whole, number) for number in sorted(set(numbers or [whole.num_devices]))]
    count = micro_batches or 4 * platforms[-1].num_devices
    with _watched_search() as deadline:
        ranking = rank_schemes(
            layers, platforms, count, recompute=recompute, time_limit_seconds=time_limit, deadline=deadline
        )
    best = ranking.best
    if output is not None and best is not None:
        if best.plan is not None:
            best.plan.save(output)
        else:
            write_json(output, strategy_of(best, layers, count))
    if as_json:
        _print_json(ranking.to_dict())
    else:
        click.echo(draw.schemes_text(ranking, max(120, _width())), nl=False)
        if output is not None and best is not None:
            click.echo(f"saved {units.printable(output)}")
    if ranking.refusal is not None:
        raise click.UsageError(ranking.refusal, click.get_current_context())
    if best is None:
        raise InfeasibleError("nothing that runs fits: give more devices, more memory, or a smaller micro-batch")


@cli.command(name="frontier")
@input_file("chain")
@platform_options(memory_is_required=False, takes_machines=False)
@algorithm_option
@plot_file("of time over memory")
@json_flag("the plans")
def frontier_command(
    chain: str,
    algorithm: str,
    micro_batches: int | None,
    recompute: str,
    split_backward: bool,
    weight_versions: str,
    time_limit: float,
    memory: int | None,
    plot: str | None,
    as_json: bool,
    **platform: Any,
) -> None:
    """The trade-off of time against memory per device for CHAIN.

    From the fastest plan down to the smallest memory that any plan fits into, in steps of 2 % of the memory. Less
    memory is always possible at the price of time; nothing is faster in the memory that a row shows, if proved.
    """
    layers = _planned_chain(chain)
    _check_plot(plot)
    with _watched_search() as deadline:
        found = frontier(
            layers,
            _platform(memory=LARGEST_MEMORY_BYTES if memory is None else memory, **platform),
            algorithm,
            num_micro_batches=micro_batches,
            time_limit_seconds=time_limit,
            deadline=deadline,
            recompute=recompute,
            split_backward=split_backward,
            weight_versions=weight_versions,
        )
    if as_json:
        _print_json(found.to_dict())
    else:
        click.echo(draw.frontier_text(found, _width(), colour=_colour()), nl=False)
    _save_plot(plot, lambda: frontier_svg(found), as_json)


@cli.command(short_help="Replay PLAN on CHAIN; exit 1 where it breaks.")
@input_file("plan")
@input_file("chain")
@json_flag("what was found")
@click.pass_context
def check(ctx: click.Context, plan: str, chain: str, as_json: bool) -> None:
    """Replay PLAN on CHAIN and compare it with what it promises; exit 1 where it breaks.

    What is replayed: every operation, dependency, device, link and byte, event by event.
    """
    made = Plan.load(plan)
    found = replay(made, Chain.load(chain))
    peaks = [use.total for use in found.memory]
    if as_json:
        _print_json({
            "ok": not found.violations,
            "violations": list(found.violations),
            "period_seconds": made.period_seconds,
            "in_flight": list(found.in_flight),
            "peak_memory_bytes": peaks,
            "memory": [use.to_dict() for use in found.memory],
            "step_seconds": found.step_seconds,
        })  # fmt: skip
    elif found.violations:
        for violation in found.violations:
            click.echo(units.printable(violation))
        click.echo(units.printable(f"{plan}: {len(found.violations)} violations"))
    else:
        what, seconds = "step", found.step_seconds
        if seconds is None:
            what, seconds = "period", made.period_seconds
        click.echo(
            f"{units.printable(plan)}: ok. Replayed: {what} {units.format_seconds(seconds)}, "
            f"in flight {', '.join(map(str, found.in_flight))}, peaks {', '.join(map(units.format_bytes, peaks))}"
        )
    if found.violations:
        ctx.exit(CHECK_FAILED)


@cli.command()
@input_file("plan")
@click.option(
    "--memory", is_flag=True, help="What the peak of each device consists of, when it comes, what would lower it."
)
@click.option(
    "--chain",
    "chain_file",
    metavar="FILE",
    type=click.Path(),
    help="The chain of the plan, for --memory; left out: PLAN with .chain.json, as a run saves it.",
)
@json_flag("the plan, or what --memory says,")
def show(plan: str, memory: bool, chain_file: str | None, as_json: bool) -> None:
    """The table of stages and the timeline of PLAN."""
    made = Plan.load(plan)
    if memory:
        beside = Path(plan).with_suffix(".chain.json")
        if chain_file is None and not beside.is_file():
            raise click.UsageError(f"--memory needs the chain of the plan: give it with --chain, or as {beside}")
        peaks = explain_memory(made, Chain.load(chain_file or beside))
        if as_json:
            _print_json([peak.to_dict() for peak in peaks])
        else:
            click.echo(memory_text(peaks), nl=False)
        return
    if chain_file is not None:
        raise click.UsageError("--chain is for --memory")
    if as_json:
        _print_json(made.to_dict())
        return
    width, colour = _width(), _colour()
    click.echo(_summary(made, width))
    room = max(40, width - TIMELINE_LABEL)
    parts = [draw_timelines.timeline(made, room, colour=colour)] if repeats_pattern(made) else []
    if made.step is not None:
        run = planned_run(made)
        parts += [draw_timelines.planned_timeline(run, made.platform, room, colour=colour)] if run.is_step else []
        parts += [draw_timelines.step_order(made, width)]
    click.echo("\n".join(parts), nl=False)


@cli.command(short_help="PLAN as one page for a browser.")
@input_file("plan")
@chain_option("for its layers, memory over time and other algorithms")
@measured_option
@click.option(
    "--time-limit",
    metavar="TIME",
    callback=DURATION,
    default="10",
    show_default=True,
    help="Processor time for the other algorithms: one that needs more is left out; 0 leaves out all.",
)
@output_file("HTML", required=True)
def report(plan: str, chain_file: str | None, measured: str | None, time_limit: float, output: str) -> None:
    """PLAN as one page for a browser, which needs no network and no other file.

    It has the timeline of a step (or of the pattern, from fill to drain), memory over time, layers with the cuts,
    the algorithms compared, and what was measured beside the plan.
    """
    made = Plan.load(plan)
    _result(output, False, plan)
    layers = _chain_beside(plan, chain_file)
    timeline = None if measured is None else MeasuredTimeline.load(measured)
    compared = None
    if layers is not None and time_limit and made.data_parallel is None:
        made.check_chain(layers)
        with _watched_search() as deadline:
            compared = compare(
                layers,
                made.platform,
                num_micro_batches=made.micro_batches_per_update
                if made.is_asynchronous
                else made.num_micro_batches,
                time_limit_seconds=time_limit,
                deadline=deadline,
                weight_versions=made.weight_versions,
                may_leave_out=True,
                planned=made,
            )
    elif made.data_parallel is not None and layers is not None and time_limit:
        click.echo("madpipe: a plan of several pipelines is not compared: see madpipe compare", err=True)
    text = plan_page(made, layers, timeline, compared)
    if output == "-":
        click.echo(text, nl=False)
        return
    write_text(output, text)
    click.echo(f"saved {units.printable(output)}")


@cli.command(short_help="PLAN as a trace for Perfetto and chrome://tracing.")
@input_file("plan")
@chain_option("for the instants of its step, where the plan alone does not tell them")
@measured_option
@output_file("trace", required=True)
def trace(plan: str, chain_file: str | None, measured: str | None, output: str) -> None:
    """PLAN as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing, and what was measured beside it.

    Each device and each direction of a link is a track; planned and measured are two processes of one file. A name
    that ends in .pt.trace.json makes a file for TensorBoard's PyTorch plugin (torch-tb-profiler).
    """
    made = Plan.load(plan)
    _result(output, False, plan)
    timeline = None if measured is None else MeasuredTimeline.load(measured)
    for_plugin = output.endswith(PLUGIN_SUFFIX)
    events = chrome_trace(made, _chain_beside(plan, chain_file), timeline, for_plugin=for_plugin)
    if output == "-":
        _print_json(events)
        return
    write_json(output, events)
    click.echo(f"saved {units.printable(output)}")


def _chain_beside(plan: str, chain_file: str | None) -> Chain | None:
    """Return the chain that is named, else that which a run saved beside the plan; None where there is none."""
    beside = Path(plan).with_suffix(".chain.json")
    if chain_file is None and not beside.is_file():
        return None
    return Chain.load(chain_file or beside)


@cli.command(short_help="A chain of PipeDream's graph.txt, or a plan for others.")
@input_file("graph", metavar="GRAPH|PLAN")
@click.option(
    "--to",
    "target",
    type=click.Choice(("chain", "torch-csv", "megatron-layout")),
    default="chain",
    show_default=True,
    help="What to make: of a graph a chain, of a plan a file of another runtime.",
)
@click.option(
    "--micro-batches", type=click.IntRange(min=1), help="Of a step, for torch-csv; left out: the plan's."
)
@output_file("resulting")
@json_flag("the chain")
def convert(graph: str, target: str, micro_batches: int | None, output: str | None, as_json: bool) -> None:
    """Make a chain of PipeDream's profile (graph.txt), or a file of another runtime of a plan.

    chain: the nodes of a graph are put in an order in which few bytes cross the cuts; a layer's output is all that
    crosses the cut after it. The other commands read graph.txt files, too: this is to see and to change the chain.

    torch-csv: the plan's forwards and backwards as a schedule file of torch.distributed.pipelining.

    megatron-layout: the plan's stages as Megatron-LM's --pipeline-model-parallel-layout.
    """
    if target != "torch-csv" and micro_batches is not None:
        raise click.UsageError(f"--micro-batches is for --to torch-csv, not for {target}")
    if target == "chain":
        output, as_json = _result(output, as_json, graph)
        chain = Chain.load(graph)
        _hand_over(chain, output, as_json, lambda: draw.chain_text(chain, _width(), colour=_colour()))
        return
    if as_json:
        raise click.UsageError(f"--json is for --to chain: {target} is not JSON")
    text = _for_other_runtime(Plan.load(graph), target, micro_batches)
    if output in (None, "-"):
        click.echo(text, nl=False)
        return
    _result(output, False, graph)
    write_text(output, text)
    click.echo(f"saved {units.printable(output)}")


def _for_other_runtime(plan: Plan, target: str, micro_batches: int | None) -> str:
    return torch_csv(plan, micro_batches) if target == "torch-csv" else f"{megatron_layout(plan)}\n"


def _json_object(path: str) -> dict[str, Any]:
    data = parse_json(read_text(path, error=FormatError), where=path, error=FormatError)
    if not isinstance(data, dict):
        raise click.BadParameter(f"{path} is not a JSON object", param_hint="--config")
    return data


def _incremental_profile(factory: str, micro_batch: int, config: dict[str, Any] | None) -> McapProfile:
    """Return mCAP's statistics, and show how far the runs are, on a terminal only."""
    from deepspeed_partition.engine.incremental import profile_incrementally  # DeepSpeed

    with tqdm(desc="training runs of mcap", leave=False, disable=None) as bar:

        def tell(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return profile_incrementally(factory, micro_batch_size=micro_batch, config=config, on_run=tell)


def _platform(
    *,
    devices: int | None,
    memory: int | None,
    bandwidth: float | None,
    latency: float,
    weight_copies: float,
    duplex: str,
    port_bandwidth: float | None,
    devices_per_port: int,
    operation_seconds: float,
    copy_bandwidth: float | None,
    machines: str | None = None,
) -> Platform:
    if machines is not None:
        of_machines = {"--devices": devices, "--memory": memory, "--bandwidth": bandwidth}
        others = {"--latency": latency or None, "--port-bandwidth": port_bandwidth}
        others["--devices-per-port"] = devices_per_port if devices_per_port != 1 else None
        _refuse(of_machines | others, "cannot be used with --machines, which describes every device and link")
        return Platform.on(
            Machines.load(machines),
            weight_copies=weight_copies,
            duplex=duplex,
            operation_seconds=operation_seconds,
            copy_bandwidth=copy_bandwidth,
        )
    for name, value in {"--devices": devices, "--memory": memory, "--bandwidth": bandwidth}.items():
        if value is None:
            raise click.UsageError(f"Missing option {name!r}, or --machines.", click.get_current_context())
    assert devices is not None and memory is not None and bandwidth is not None
    return Platform(
        num_devices=devices,
        memory_bytes=memory,
        bandwidth=bandwidth,
        latency_seconds=latency,
        weight_copies=weight_copies,
        duplex=duplex,
        port_bandwidth=port_bandwidth,
        devices_per_port=devices_per_port,
        operation_seconds=operation_seconds,
        copy_bandwidth=copy_bandwidth,
    )


def _first_devices(platform: Platform, number: int) -> Platform:
    """Return the platform of the first devices."""
    if platform.machines is None:
        if number > platform.num_devices:
            raise click.UsageError(
                f"--numbers has {number} and there are {platform.num_devices} devices", click.get_current_context()
            )
        return replace(platform, num_devices=number)
    try:
        first = platform.machines.first(number)
    except ValueError as error:
        raise click.UsageError(f"--numbers: {error}", click.get_current_context()) from None
    return Platform.on(
        first,
        weight_copies=platform.weight_copies,
        duplex=platform.duplex,
        operation_seconds=platform.operation_seconds,
        copy_bandwidth=platform.copy_bandwidth,
    )


def _start(path: str, chain: Chain) -> Plan:
    made = Plan.load(path)
    names = [name for stage in made.stages for name in stage.layer_names]
    if made.chain.num_layers != chain.num_layers or (names and names != [layer.name for layer in chain.layers]):
        raise click.BadParameter(
            f"{path} is for the layers of {made.chain.name!r}, which are not those of {chain.name!r}",
            param_hint="--start",
        )
    return made


def _zero_stage(zero: str | None, data_parallel: int | str | None) -> int | None:
    if zero == "1" and data_parallel is None:
        click.echo("madpipe: --zero 1 shares nothing in a single pipeline: see --data-parallel", err=True)
    return None if zero is None else int(zero)


def _planned_chain(path: str) -> Chain:
    """Return the chain of a file; refuse --weight-copies where a run has said what it kept for the weights."""
    chain, ctx = Chain.load(path), click.get_current_context()
    if ctx.get_parameter_source("weight_copies") is ParameterSource.DEFAULT:
        return chain
    with_weights = [layer for layer in chain.layers if layer.weight_bytes]
    measured = sum(1 for layer in with_weights if layer.training_bytes is not None)
    if measured and measured == len(with_weights):
        raise click.UsageError(
            f"--weight-copies has no effect on chain {units.shown(chain.name)}: its {measured} layers with "
            "weights have training_bytes, what a run kept for each; leave --weight-copies out, or drop "
            "training_bytes",
            ctx,
        )
    if measured:
        click.echo(
            f"madpipe: --weight-copies has no effect on {measured} of {len(with_weights)} layers with weights, "
            "which have training_bytes",
            err=True,
        )
    return chain


def _refuse(options: Mapping[str, object], why: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise click.UsageError(f"{name} {why}", click.get_current_context())


def _plan_replicated(
    chain: Chain,
    platform: Platform,
    machine_devices: int | None,
    machine_bandwidth: float | None,
    time_limit: float,
) -> Plan | Replicated:
    if (machine_devices is None) != (machine_bandwidth is None):
        raise click.UsageError(
            "--machine-devices and --machine-bandwidth go together", click.get_current_context()
        )
    num_devices = platform.num_devices
    if machine_devices is not None and (num_devices % machine_devices or machine_devices == num_devices):
        raise click.UsageError(
            f"--machine-devices is {machine_devices}: it must divide the {num_devices} devices into several equal "
            "machines",
            click.get_current_context(),
        )
    num_machines = 1 if machine_devices is None else num_devices // machine_devices
    with _watched_search() as deadline:
        return plan_replicated(
            chain,
            platform,
            num_machines,
            machine_bandwidth or 0.0,
            time_limit_seconds=time_limit,
            deadline=deadline,
        )


def _hand_over_replicated(found: Plan | Replicated, output: str | None, as_json: bool) -> None:
    if isinstance(found, Plan):
        _hand_over(found, output, as_json, lambda: _summary(found, _width()))
    elif output is not None:
        raise click.UsageError(
            "a plan file cannot hold stages with different numbers of replicas: leave out --output; --json prints "
            "them",
            click.get_current_context(),
        )
    elif as_json:
        _print_json(found.to_dict())
    else:
        table = as_text([draw.replicated_table(found)], _width())
        click.echo(table + draw.replicated_words(found), nl=False)


@contextlib.contextmanager
def _watched_search() -> Iterator[Deadline]:
    """Show how far the search is, on a terminal only, and end it at Ctrl-C."""
    with (
        tqdm(desc="planning", bar_format="{desc} ({elapsed})", leave=False, disable=None) as line,
        _ended_by_interrupt(lambda progress: line.set_description_str(f"planning: {progress}")) as deadline,
    ):
        yield deadline


@contextlib.contextmanager
def _ended_by_interrupt(watch: Callable[[str], None]) -> Iterator[Deadline]:
    """End the searches at the first Ctrl-C, so that they return the best so far; end all at the second."""
    deadline = Deadline(watch=watch)
    if threading.current_thread() is not threading.main_thread():  # only that one may handle signals
        yield deadline
        return

    def end(signum: int, frame: FrameType | None) -> None:
        if deadline.stopped:
            raise KeyboardInterrupt
        deadline.stop()

    before = signal.signal(signal.SIGINT, end)
    try:
        yield deadline
    except InfeasibleError as error:
        if deadline.stopped:  # perhaps only because nothing was found yet
            raise click.Abort from error
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    if deadline.stopped:
        click.echo("madpipe: interrupted: this is the best found so far", err=True)
    elif deadline.starved:
        click.echo(
            "madpipe: this machine is so busy that the search had less than a thirtieth of a processor, and was "
            "cut short: another run may find a better plan",
            err=True,
        )


def _result(output: str | None, as_json: bool, source: str) -> tuple[str | None, bool]:
    """Return where the result goes, a file or standard output; refuse a bad one before any measuring."""
    if output == "-":
        return None, True
    if output is not None:
        _check_writable(output)
        if Path(source).exists() and Path(output).exists() and os.path.samefile(source, output):
            raise click.BadParameter(f"{output} is what is read: write to another file", param_hint="--output")
    return output, as_json


def _check_plot(path: str | None) -> None:
    """Refuse a file that cannot be written before any search."""
    if path is None:
        return
    if not path.lower().endswith(".svg"):
        raise click.BadParameter(
            f"{path}: the picture is an SVG file: give a name that ends in .svg", param_hint="--plot"
        )
    _check_writable(path, "--plot")


def _save_plot(path: str | None, picture: Callable[[], str], as_json: bool) -> None:
    if path is not None:
        write_text(path, picture())
        click.echo(f"saved {units.printable(path)}", err=as_json)


def _hand_over(made: Chain | Plan, output: str | None, as_json: bool, text: Callable[[], str]) -> None:
    if output is not None:
        made.save(output)
    if as_json:
        _print_json(made.to_dict())
        return
    click.echo(text(), nl=False)
    if output is not None:
        click.echo(f"saved {units.printable(output)}")


def _print_json(data: Mapping[str, Any] | Sequence[Any]) -> None:
    click.echo(json.dumps(data, indent=1, allow_nan=False))


def _width() -> int:
    """Return the width of the terminal in columns; a pipe gets lines that need no wrapping."""
    return max(40, min(160, os.get_terminal_size().columns)) if sys.stdout.isatty() else 140


def _colour() -> bool:
    """Return whether standard output is a terminal that shows colours, whose user has not asked for none."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _check_writable(path: str, option: str = "--output") -> None:
    given = Path(path)
    folder = given.resolve().parent
    # A device or a pipe is written by the name given (``write_text``), and nothing is made in its folder.
    is_special = given.exists() and not given.is_file()
    if not is_special and not folder.is_dir():
        raise click.BadParameter(f"{path}: the folder {folder} does not exist", param_hint=option)
    if given.is_dir():
        raise click.BadParameter(f"{path} is a folder", param_hint=option)
    may_write = is_special or os.access(folder, os.W_OK)
    if not may_write or (given.exists() and not os.access(path, os.W_OK)):
        raise click.BadParameter(f"{path}: no permission to write there", param_hint=option)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # what the terminal's encoding lacks is escaped, no reason to fail
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status; an error gives one sentence on standard error."""
    try:
        status = cli.main(args=arguments, prog_name="madpipe", standalone_mode=False)
        return status if isinstance(status, int) else DONE
    except click.UsageError as error:
        if error.ctx is not None:
            click.echo(error.ctx.get_usage(), err=True)
        return _fail(error.format_message(), BAD_INPUT)
    except click.ClickException as error:
        return _fail(error.format_message(), BAD_INPUT)
    except click.Abort:
        return _fail("interrupted", INTERRUPTED)
    except InfeasibleError as error:
        return _fail(str(error), NO_PLAN_FITS)
    except BrokenPipeError:  # `madpipe show plan.json | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", BAD_INPUT)
    except (MadPipeError, HostError, ValueError) as error:
        return _fail(str(error), BAD_INPUT)


def _fail(sentence: str, status: int) -> int:
    click.echo(f"madpipe: {units.printable(sentence)}", err=True)
    return status


if __name__ == "__main__":
    main()

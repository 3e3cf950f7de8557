"""Options that several commands share, and how their values are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from deepspeed_partition.planner import units
from deepspeed_partition.planner.data_parallel import AUTO
from deepspeed_partition.planner.planning.algorithms import ALGORITHMS
from deepspeed_partition.planner.problem import DUPLEX
from deepspeed_partition.planner.recomputation import MODES
from deepspeed_partition.planner.weight_versions import FLUSH
from deepspeed_partition.planner.weight_versions import MODES as WEIGHT_VERSIONS

Callback = Callable[[click.Context, click.Parameter, str | None], float | None]
Command = TypeVar("Command", bound=Callable[..., Any])


def quantity(parse: Callable[[str], float]) -> Callback:
    """Return a callback that reads a size, a bandwidth or a time, as people write it."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx=ctx, param=param) from None

    return read


SIZE, BANDWIDTH, DURATION = map(quantity, (units.parse_size, units.parse_bandwidth, units.parse_seconds))


def input_file(name: str, metavar: str | None = None) -> Callable[[Command], Command]:
    """Return an argument for a file to read, or - for standard input."""

    def read(ctx: click.Context, param: click.Parameter, value: str) -> str:
        return "/dev/stdin" if value == "-" else value

    return click.argument(name, metavar=metavar, type=click.Path(allow_dash=True), callback=read)


def output_file(what: str, *, required: bool = False) -> Callable[[Command], Command]:
    return click.option(
        "-o",
        "--output",
        metavar="FILE",
        type=click.Path(readable=False),
        required=required,
        help=f"The {what} file to write.",
    )


def chain_option(what: str) -> Callable[[Command], Command]:
    return click.option(
        "--chain",
        "chain_file",
        metavar="CHAIN",
        type=click.Path(),
        help=f"The chain of the plan, {what}; left out: PLAN with .chain.json, as a run saves it, if it is there.",
    )


measured_option = click.option(
    "--measured",
    metavar="TIMELINE",
    type=click.Path(),
    help="What a run of the plan measured, and saved beside it.",
)


def plot_file(what: str) -> Callable[[Command], Command]:
    return click.option(
        "--plot",
        metavar="FILE",
        type=click.Path(readable=False),
        help=f"A picture {what} to write, such as picture.svg.",
    )


def json_flag(what: str) -> Callable[[Command], Command]:
    return click.option("--json", "as_json", is_flag=True, help=f"Print {what} as JSON, and nothing else.")


def complete_algorithm(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete an algorithm in the shell: names, and the beginning of ``type:REGEX``."""
    names = [name.removesuffix("REGEX") for name in ALGORITHMS if " " not in name]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def data_parallel_degree(ctx: click.Context, param: click.Parameter, value: str | None) -> int | str | None:
    if value is None or value == AUTO:
        return value
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number nor {AUTO}", ctx=ctx, param=param) from None


def whole_numbers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Read a list of whole numbers, ``4,8,16``."""
    if value is None:
        return None
    parts = value.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{value!r} is no list of numbers: write it like 4,8,16", ctx=ctx, param=param)
    return tuple(map(int, parts))


def platform_options(*, memory_is_required: bool, takes_machines: bool = True) -> Callable[[Command], Command]:
    """Return the options of the platform, the step and the time.

    Args:
        memory_is_required: whether ``--memory`` is, unless machines are given.
        takes_machines: whether ``--machines`` may stand for devices, memory and bandwidth.
    """

    def add(command: Command) -> Command:
        machines = (
            click.option("--machines", metavar="FILE", type=click.Path(),
                         help="Devices and links, instead of --devices, --memory and --bandwidth."),
        ) if takes_machines else ()  # fmt: skip
        for option in reversed((
            *machines,
            click.option("--devices", type=click.IntRange(min=1), required=not takes_machines,
                         help="Number of devices, in all data-parallel pipelines together."),
            click.option("--memory", metavar="SIZE", callback=SIZE,
                         required=memory_is_required and not takes_machines,
                         help="Memory of each device, such as 16GB or 16GiB."),
            click.option("--bandwidth", metavar="SIZE/s", callback=BANDWIDTH, required=not takes_machines,
                         help="Bandwidth between two devices, such as 12GB/s."),
            click.option("--latency", metavar="TIME", callback=DURATION, default="0", show_default=True,
                         help="Latency of a transfer, such as 10us."),
            click.option("--duplex", type=click.Choice(DUPLEX), default="half", show_default=True,
                         help="Transfers on a link at a time: one, or one in each direction."),
            click.option("--port-bandwidth", metavar="SIZE/s", callback=BANDWIDTH,
                         help="Bandwidth of a port that all links of a host share; left out: no port."),
            click.option("--devices-per-port", type=click.IntRange(min=1), default=1, show_default=True,
                         help="Devices of a host that share its port."),
            click.option("--operation-seconds", metavar="TIME", callback=DURATION, default="0", show_default=True,
                         help="Time that an engine adds to each forward and backward of a stage, in a step."),
            click.option("--copy-bandwidth", metavar="SIZE/s", callback=BANDWIDTH,
                         help="Bandwidth at which a device itself copies messages, in a step; left out: no copy."),
            click.option("--weight-copies", type=float, default=3, show_default=True,
                         help="Bytes that training keeps per byte of parameters, unless the chain says."),
            click.option("--micro-batches", type=click.IntRange(min=1),
                         help="Micro-batches of a synchronous step, or of an update."),
            click.option("--recompute", type=click.Choice(MODES), default="auto", show_default=True,
                         help="What may run its forward again; auto: whatever is fastest."),
            click.option("--split-backward", is_flag=True,
                         help="Backwards may be two operations: input first, weights any time later."),
            click.option("--weight-versions", type=click.Choice(WEIGHT_VERSIONS), default=FLUSH, show_default=True,
                         help="Drain before updates, or never: versions as needed, two, or in sync."),
            click.option("--time-limit", metavar="TIME", callback=DURATION, default="60", show_default=True,
                         help="Processor time of searches that may end without a proof."),
        )):  # fmt: skip
            command = option(command)
        return command

    return add


algorithm_option = click.option(
    "--algorithm",
    metavar="NAME",
    default="madpipe",
    show_default=True,
    shell_complete=complete_algorithm,
    help=f"{', '.join(ALGORITHMS)} such as 0,3,8.",
)
data_parallel_option = click.option(
    "--data-parallel",
    metavar="D|auto",
    callback=data_parallel_degree,
    help="Pipelines that share the devices and a step's micro-batches; auto: the best number.",
)
zero_option = click.option(
    "--zero",
    type=click.Choice(["0", "1"]),
    help="ZeRO stage of --data-parallel; with 1 the pipelines share all weight copies but 2 (weights, gradients).",
)

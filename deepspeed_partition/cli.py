"""The command line: ``madpipe profile``, ``plan``, ``check``, ``show``.

Exit status: 0 done; 1 the check failed; 2 bad usage or bad input, one sentence; 3 no plan fits in memory.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

import deepspeed_partition
from deepspeed_partition.planner import draw, units
from deepspeed_partition.planner.errors import InfeasibleError, MadPipeError
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.planning import ALGORITHMS, make_plan
from deepspeed_partition.planner.problem import Chain, Platform
from deepspeed_partition.planner.simulate import replay

DONE, CHECK_FAILED, BAD_INPUT, NO_PLAN_FITS = 0, 1, 2, 3


Callback = Callable[[click.Context, click.Parameter, str | None], float | None]


def quantity(parse: Callable[[str], float]) -> Callback:
    """A size, a bandwidth or a time, as people write it."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
        try:
            return None if value is None else parse(value)
        except ValueError as flaw:
            raise click.BadParameter(str(flaw), ctx=ctx, param=param) from None

    return read


SIZE, BANDWIDTH, DURATION = map(quantity, (units.parse_size, units.parse_bandwidth, units.parse_seconds))


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(deepspeed_partition.__version__, prog_name="madpipe", message="%(prog)s %(version)s")
def cli() -> None:
    """Memory-aware pipeline parallelism: measure the layers, plan the cut, check the plan."""


@cli.command()
@click.argument("factory", metavar="MODULE:FACTORY")
@click.option("--micro-batch", type=click.IntRange(min=1), required=True, help="Samples per micro-batch.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), required=True, help="The chain file to write.")
@click.option("--device", help="cpu, cuda, cuda:1; left out: a GPU if there is one.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Timed runs of a layer.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads; left out: torch's default.")
def profile(
    factory: str, micro_batch: int, output: str, device: str | None, repeats: int, threads: int | None
) -> None:
    """Measure time and memory of each layer.

    FACTORY is called with the micro-batch size and returns the layers and one micro-batch, and with a third
    value the loss function.
    """
    _check_writable(output)
    from deepspeed_partition.profiling.factory import profile_factory  # torch

    chain = profile_factory(
        factory, micro_batch_size=micro_batch, device=device, repeats=repeats, threads=threads, progress=True
    )
    chain.save(output)
    click.echo(draw.as_text([draw.chain_table(chain)], _width()), nl=False)
    click.echo(f"saved {output}")


@cli.command()
@click.argument("chain", type=click.Path())
@click.option("--devices", type=click.IntRange(min=1), required=True, help="Devices of the pipeline.")
@click.option(
    "--memory", metavar="SIZE", callback=SIZE, required=True, help="Of each device, such as 16GB or 16GiB."
)
@click.option(
    "--bandwidth", metavar="SIZE/s", callback=BANDWIDTH, required=True, help="Between two devices, such as 12GB/s."
)
@click.option(
    "--latency",
    metavar="TIME",
    callback=DURATION,
    default="0",
    show_default=True,
    help="Of a transfer, such as 10us.",
)
@click.option("--weight-copies", type=float, default=3, show_default=True, help="Times the parameters.")
@click.option("--micro-batches", type=click.IntRange(min=1), help="Of one synchronous step; the pipeline drains.")
@click.option("--algorithm", default="madpipe", show_default=True, help=f"{', '.join(ALGORITHMS)}.")
@click.option("--time-limit", metavar="TIME", callback=DURATION, help="Seconds for searches that prove nothing.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="The plan file to write.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan, and nothing else.")
def plan(
    chain: str,
    devices: int,
    memory: int,
    bandwidth: float,
    latency: float,
    weight_copies: float,
    micro_batches: int | None,
    algorithm: str,
    time_limit: float | None,
    output: str | None,
    as_json: bool,
) -> None:
    """Decide where and when every layer of CHAIN runs."""
    if output is not None:
        _check_writable(output)
    platform = Platform(
        num_devices=devices,
        memory_bytes=memory,
        bandwidth=bandwidth,
        latency_seconds=latency,
        weight_copies=weight_copies,
    )
    made = make_plan(
        Chain.load(chain),
        platform,
        algorithm,
        num_micro_batches=micro_batches,
        time_limit_seconds=time_limit,
    )
    if output is not None:
        made.save(output)
    if as_json:
        click.echo(json.dumps(made.to_dict(), indent=1))
        return
    click.echo(draw.summary(made, _width()), nl=False)
    if output is not None:
        click.echo(f"saved {output}")


@cli.command()
@click.argument("plan", type=click.Path())
@click.argument("chain", type=click.Path())
@click.pass_context
def check(ctx: click.Context, plan: str, chain: str) -> None:
    """Replay PLAN on CHAIN and compare it with what it promises; exit 1 where it breaks."""
    made = Plan.load(plan)
    found = replay(made, Chain.load(chain))
    if found.violations:
        for violation in found.violations:
            click.echo(violation)
        click.echo(f"{plan}: {len(found.violations)} violations")
        ctx.exit(CHECK_FAILED)
    peaks = ", ".join(units.format_bytes(use.total) for use in found.memory)
    click.echo(
        f"{plan}: ok. Replayed: period {units.format_seconds(made.period_seconds)}, in flight "
        f"{', '.join(map(str, found.in_flight))}, peaks {peaks}"
    )


@cli.command()
@click.argument("plan", type=click.Path())
def show(plan: str) -> None:
    """The table of stages and the timeline of PLAN."""
    made = Plan.load(plan)
    click.echo(draw.summary(made, _width()))
    click.echo(draw.timeline(made, max(40, _width() - 20)), nl=False)
    if made.step is not None:
        click.echo("\n" + draw.step_order(made), nl=False)


def _width() -> int:
    """Of the terminal; a pipe gets lines that need no wrapping."""
    return min(160, os.get_terminal_size().columns) if sys.stdout.isatty() else 140


def _check_writable(path: str) -> None:
    """Before minutes of measuring, not after."""
    folder = Path(path).resolve().parent
    if not folder.is_dir():
        raise click.BadParameter(f"{path}: the folder {folder} does not exist", param_hint="--output")
    if Path(path).is_dir():
        raise click.BadParameter(f"{path} is a folder", param_hint="--output")
    if not os.access(folder, os.W_OK) or (Path(path).exists() and not os.access(path, os.W_OK)):
        raise click.BadParameter(f"{path}: no permission to write there", param_hint="--output")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; what goes wrong is one sentence on standard error and a status."""
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
        return _fail("interrupted", 130)
    except InfeasibleError as error:
        return _fail(str(error), NO_PLAN_FITS)
    except BrokenPipeError:  # `madpipe show plan.json | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}", BAD_INPUT)
    except (MadPipeError, ValueError) as error:
        return _fail(str(error), BAD_INPUT)


def _fail(sentence: str, status: int) -> int:
    click.echo(f"madpipe: {' '.join(sentence.split())}", err=True)
    return status


if __name__ == "__main__":
    main()

"""Schemes of parallel training.

``table``: the closed forms of the source beside the simulation. ``published``: models of 7 to 70 billion
parameters on 8 to 64 devices, every scheme, saved in ``results``. ``report``: what is saved, as a table.
``levels``: the gain of planning for links and devices as they are. ``elsewhere``: steps that others measured on
GPUs, and what is predicted for them.
"""

from __future__ import annotations

import argparse

import levels
import measured_elsewhere
import published

from deepspeed_partition.planner.schemes.scheme_table import scheme_table


def print_table(num_stages: int, num_micro_batches: int, num_groups: int, group_size: int) -> None:
    """Print the source's table 1 as printed, corrected, and simulated, in Markdown."""
    print("| scheme | quantity, of the worker that has most | printed | corrected | simulated |")
    print("|---|---|---|---|---|")
    for entry in scheme_table(num_stages, num_micro_batches, num_groups, group_size):
        relation = {"=": "", ">=": "at least ", "<=": "at most "}[entry.relation]
        mark = "" if entry.printed == entry.simulated else " **differs**"
        print(
            f"| {entry.scheme} | {entry.quantity} | {entry.printed:g} | {relation}{entry.corrected:g} "
            f"| {entry.simulated:g}{mark} |"
        )


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    table = commands.add_parser("table", help="the closed forms beside the simulation")
    table.add_argument("--stages", type=int, default=4)
    table.add_argument("--micro-batches", type=int, default=8)
    table.add_argument("--groups", type=int, default=2)
    table.add_argument("--group-size", type=int, default=2)
    models = commands.add_parser("published", help="rank the schemes of published models")
    models.add_argument("--models", nargs="+", default=["llama2-7b", "llama2-13b", "llama2-70b"])
    models.add_argument("--numbers", nargs="+", type=int, default=[4, 8, 16, 32, 64])
    models.add_argument("--time-limit", type=float, default=12, help="seconds of the processor for each ranking")
    commands.add_parser("report", help="print what is saved")
    gains = commands.add_parser("levels", help="what links in levels and unlike devices gain")
    gains.add_argument("--time-limit", type=float, default=4, help="seconds of the processor for each plan")
    commands.add_parser("elsewhere", help="steps that others measured, beside what is predicted")
    arguments = parser.parse_args()
    if arguments.command == "elsewhere":
        measured_elsewhere.print_beside_measured()
        return
    if arguments.command == "levels":
        levels.print_gains(arguments.time_limit)
        return
    if arguments.command == "published":
        published.rank_published(arguments.models, arguments.numbers, arguments.time_limit)
        return
    if arguments.command == "report":
        print(published.table(published.saved()))
        return
    print_table(arguments.stages, arguments.micro_batches, arguments.groups, arguments.group_size)


if __name__ == "__main__":
    main()

"""Schemes of parallel training. ``table``: the closed forms of the source beside the simulation."""

from __future__ import annotations

import argparse

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
    arguments = parser.parse_args()
    print_table(arguments.stages, arguments.micro_batches, arguments.groups, arguments.group_size)


if __name__ == "__main__":
    main()

"""How much is a plan worth that counts memory? The evaluation of the MadPipe paper, section 5, in one command:
chains, sweep, results, figures, tables and a verdict for each claim.

    python examples/benchmarks/madpipe_vs_pipedream/main.py [--chains FILE ...] [--networks NAME ...]
        [--algorithms NAME ...] [--kept input autograd] [--devices 2 ... 8] [--memory 3 ... 16]
        [--bandwidth 12 24] [--time-limit 10] [--jobs 2]

A plan that is in ``results/`` is not made again, so a run may be stopped, continued, and split over its arguments.
The chains are computed from operations and bytes (``computed.py``), or were measured by ``madpipe profile``.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from evaluation import ALGORITHMS, evaluation_of
from report import report
from sweep import KEPT, Setting, sweep

from deepspeed_partition import Chain, ChainFormatError
from deepspeed_partition.planner.io.files import write_text

PATIENCE_SECONDS = 600.0
"""The seconds for algorithms that prove nothing: the paper's algorithm is not to lose by being cut short."""


def folder_of(chains: list[Chain]) -> Path:
    """Return the folder of the results of these chains, by the hardware that they were measured on.

    Raises:
        ValueError: there are several.
    """
    hardware = {chain.hardware or "unknown" for chain in chains}
    if len(hardware) > 1:
        raise ValueError(
            f"the chains are of different hardware ({', '.join(sorted(hardware))}): run one at a time"
        )
    return HERE / "results" / re.sub(r"[^a-z0-9]+", "_", hardware.pop().lower()).strip("_")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", nargs="+", type=Path, metavar="FILE", help="measured; left out: computed ones")
    parser.add_argument("--networks", nargs="+", metavar="NAME", help="of the chains; left out: all")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--kept", nargs="+", default=list(KEPT), choices=KEPT)
    parser.add_argument("--devices", nargs="+", type=int, default=list(range(2, 9)))
    parser.add_argument("--memory", nargs="+", type=float, default=list(range(3, 17)), help="GB per device")
    parser.add_argument("--bandwidth", nargs="+", type=float, default=[12, 24], help="GB/s")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for each plan of madpipe")
    parser.add_argument("--jobs", type=int, default=1, help="plans at a time; one leaves the times of each alone")
    return parser.parse_args()


def run(arguments: argparse.Namespace) -> None:
    measured = [Chain.load(path) for path in arguments.chains or ()]
    chains = {chain.name.rpartition(":")[2]: chain for chain in measured or _computed_chains()}
    if 0 < len(chains) < len(measured):
        raise ValueError(f"two chains have the same name: there are {', '.join(chains)}")
    networks = arguments.networks or list(chains)
    unknown = sorted(set(networks) - set(chains))
    if unknown:
        raise ValueError(f"unknown network {', '.join(unknown)}: known are {', '.join(chains)}")
    folder = folder_of(list(chains.values()))
    settings = [
        Setting(network=network, kept=kept, num_devices=devices, memory_gb=memory, bandwidth_gb=bandwidth)
        for network, kept, devices, bandwidth, memory in itertools.product(
            networks, arguments.kept, arguments.devices, arguments.bandwidth, map(float, arguments.memory)
        )
    ]
    for algorithm in arguments.algorithms:
        sweep(
            folder / f"{algorithm}.jsonl",
            algorithm,
            chains,
            settings,
            time_limit_seconds=arguments.time_limit if algorithm == "madpipe" else PATIENCE_SECONDS,
            num_jobs=arguments.jobs,
        )
    show(folder)


def _computed_chains() -> list[Chain]:
    from computed import computed_chains  # torch, which nobody else here needs

    return computed_chains()


def show(folder: Path) -> None:
    """Tables, verdicts and figures of all that is in a folder."""
    from figures import draw  # matplotlib

    table = evaluation_of(folder)
    text = report(table)
    print(text)
    write_text(folder / "report.md", text)
    for path in draw(table, folder):
        print(f"saved {path}")


def main() -> None:
    try:
        run(parse_arguments())
    except (ValueError, OSError, ChainFormatError) as error:
        sys.exit(f"main.py: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped: what is planned is kept, and the same command goes on from there")


if __name__ == "__main__":
    main()

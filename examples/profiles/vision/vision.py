"""Chains of the four networks of the MadPipe paper, computed from operations and bytes.

    python examples/profiles/vision/vision.py

writes a file for each beside this one. Nothing was measured. The networks, their sources and the device (12
TFLOP/s, 900 GB/s) are those of ``examples/benchmarks/madpipe_vs_pipedream``, in ``vision_networks.py`` and
``computed.py``. Images have 1000 x 1000 pixels, micro-batches 8 of them. A layer keeps what autograd keeps. It
needs torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "benchmarks" / "madpipe_vs_pipedream"))


def main() -> None:
    from computed import computed_chains

    for chain in computed_chains():
        chain.save(HERE / f"{chain.name.lower()}.json")
        print(f"{chain.name}: {chain.num_layers} layers, {chain.compute_seconds:.3f} s per micro-batch")


if __name__ == "__main__":
    main()

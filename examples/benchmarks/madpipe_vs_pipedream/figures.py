"""The paper's figures 6, 7 and 8, with the lower bound in them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from evaluation import Evaluation, geometric_mean
from matplotlib import pyplot
from PIL import Image  # which matplotlib brings

LINES = {
    "pipedream-blind": {"color": "tab:orange", "marker": "v"},
    "pipedream": {"color": "tab:red", "marker": "s"},
    "contiguous": {"color": "tab:green", "marker": "^"},
    "madpipe-paper": {"color": "tab:purple", "marker": "D"},
    "madpipe": {"color": "tab:blue", "marker": "o"},
}
BOUND = {"color": "black", "linewidth": 0.8, "linestyle": ":"}
NUM_COLORS = 64
"""The number of colors of an image file; so few make it a third as large."""
SPEEDUP_MEMORY_GB = (3, 5, 8, 12, 16)
"""The memory of the columns of figure 8, in GB."""


def draw(table: Evaluation, folder: Path) -> list[Path]:
    """Draw all figures of all ways of counting; return their files."""
    written = []
    for kept in table.values("kept"):
        of_kept = table.where(kept=kept)
        algorithms = of_kept.algorithms
        for network in of_kept.values("network"):
            path = folder / f"figure6_{network}_{kept}.png".lower()
            written.append(_periods(of_kept.where(network=network), algorithms, f"{network}, kept: {kept}", path))
        written.append(_ratios(of_kept, algorithms, f"kept: {kept}", folder / f"figure7_{kept}.png"))
        for bandwidth in of_kept.values("bandwidth_gb"):
            path = folder / f"figure8_{kept}_{bandwidth:g}.png"
            title = f"{bandwidth:g} GB/s, kept: {kept}"
            written.append(_speedups(of_kept.where(bandwidth_gb=bandwidth), algorithms, title, path))
    return written


def _periods(table: Evaluation, algorithms: Sequence[str], title: str, path: Path) -> Path:
    """Figure 6: period against memory; a column for each number of devices, a row for each bandwidth."""
    devices, bandwidths = table.values("num_devices"), table.values("bandwidth_gb")
    figure, axes = _grid(len(bandwidths), len(devices), sharey="col")
    for row, bandwidth in enumerate(bandwidths):
        for column, count in enumerate(devices):
            panel, ax = table.where(num_devices=count, bandwidth_gb=bandwidth), axes[row][column]
            bounds: dict[float, float] = {}
            for algorithm in algorithms:
                found = list(panel.results(algorithm))
                ax.plot(
                    [setting.memory_gb for setting, _ in found], [result.period_seconds for _, result in found],
                    label=algorithm, **LINES[algorithm],
                )  # fmt: skip
                promised = [
                    (setting.memory_gb, found[algorithm].promised_seconds)
                    for setting, found in panel.rows.items()
                    if algorithm in found and found[algorithm].promised_seconds is not None
                ]
                if promised:
                    ax.plot(*zip(*promised, strict=True), color=LINES[algorithm]["color"], linestyle="--", lw=0.8)
                bounds |= {setting.memory_gb: result.lower_bound_seconds or 0.0 for setting, result in found}
            ax.plot(
                *zip(*sorted(bounds.items()), strict=True) if bounds else ([], []), label="lower bound", **BOUND
            )
            ax.set_ylim(bottom=0)
            ax.set_title(f"{count} devices, {bandwidth:g} GB/s", fontsize=8)
    return _finish(
        figure,
        axes,
        "memory per device (GB)",
        "period (s)",
        f"{title} (dashed: what the partitioner promised)",
        path,
    )


def _ratios(table: Evaluation, algorithms: Sequence[str], title: str, path: Path) -> Path:
    """Figure 7: periods over madpipe's, means over devices and bandwidths, against memory."""
    networks = table.values("network")
    figure, axes = _grid(1, len(networks), sharey=True)
    for ax, network in zip(axes[0], networks, strict=True):
        of_network = table.where(network=network)
        for algorithm in algorithms:
            points = [
                (memory, geometric_mean(found))
                for memory in of_network.values("memory_gb")
                if (found := of_network.where(memory_gb=memory).ratios(algorithm, "madpipe"))
            ]
            ax.plot(*(zip(*points, strict=True) if points else ([], [])), label=algorithm, **LINES[algorithm])
        ax.axhline(1.2, label="20 % slower", **BOUND)
        ax.set_title(network, fontsize=8)
    return _finish(figure, axes, "memory per device (GB)", "period / madpipe's", f"Geometric means, {title}", path)


def _speedups(table: Evaluation, algorithms: Sequence[str], title: str, path: Path) -> Path:
    """Figure 8: speedup against devices; a row for each network, a column for each memory."""
    networks = table.values("network")
    memories = [memory for memory in table.values("memory_gb") if memory in SPEEDUP_MEMORY_GB]
    figure, axes = _grid(len(networks), max(1, len(memories)), sharey=True)
    for row, network in enumerate(networks):
        whole = table.sequential_seconds[network]
        for column, memory in enumerate(memories):
            panel, ax = table.where(network=network, memory_gb=memory), axes[row][column]
            bounds: dict[int, float] = {}
            for algorithm in algorithms:
                found = list(panel.results(algorithm))
                ax.plot(
                    [setting.num_devices for setting, _ in found],
                    [whole / (result.period_seconds or 1) for _, result in found],
                    label=algorithm, **LINES[algorithm],
                )  # fmt: skip
                bounds |= {
                    setting.num_devices: whole / (result.lower_bound_seconds or 1) for setting, result in found
                }
            ax.plot(
                *zip(*sorted(bounds.items()), strict=True) if bounds else ([], []), label="upper bound", **BOUND
            )
            ax.set_title(f"{network}, {memory:g} GB", fontsize=8)
    return _finish(figure, axes, "devices", "speedup", f"Speedup over one device, {title}", path)


def _grid(num_rows: int, num_columns: int, sharey: bool | str) -> tuple[Any, Any]:
    pyplot.rcParams.update({"lines.linewidth": 1.0, "lines.markersize": 2.5, "font.size": 8, "axes.grid": True,
                            "grid.alpha": 0.3})  # fmt: skip
    size = (max(2.0 * num_columns, 6.0) + 0.4, 1.9 * num_rows + 1.0)
    return pyplot.subplots(num_rows, num_columns, figsize=size, sharex=True, sharey=sharey, squeeze=False)


def _finish(figure: Any, axes: Any, x: str, y: str, title: str, path: Path) -> Path:
    handles, labels = axes[0][0].get_legend_handles_labels()
    for row in axes:
        row[0].set_ylabel(y)
    for ax in axes[-1]:
        ax.set_xlabel(x)
    height = figure.get_size_inches()[1]
    figure.suptitle(title, fontsize=9, y=1 - 0.08 / height)
    figure.legend(
        handles, labels, loc="upper center", ncols=len(labels), fontsize=7, frameon=False,
        bbox_to_anchor=(0.5, 1 - 0.25 / height),
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / height))
    pixels = io.BytesIO()
    figure.savefig(pixels, dpi=100)
    pyplot.close(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(pixels).convert("RGB").quantize(NUM_COLORS).save(path, optimize=True)
    return path

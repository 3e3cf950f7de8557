"""Choice and name of the device that layers are measured on."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def device_or_default(device: torch.device | str | None) -> torch.device:
    """Return ``device``, or the current CUDA device, or the CPU.

    Raises:
        ValueError: there is no such device here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device {device!r} is unknown: use 'cpu', 'cuda' or 'cuda:0'") from None
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r}: layers are measured on 'cpu' and on 'cuda'")
    if chosen.type == "cuda":
        count = torch.cuda.device_count()
        index = torch.cuda.current_device() if chosen.index is None and count else chosen.index
        if index is None or index >= count:
            raise ValueError(f"device {str(device)!r}: torch sees {count} CUDA devices here; use 'cpu'")
        chosen = torch.device("cuda", index)
    return chosen


def hardware_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    num_threads = torch.get_num_threads()
    return f"{_processor_name()}, {num_threads} thread{'' if num_threads == 1 else 's'}"


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # only Linux has this file
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()

"""Paths that are on no disk of this machine: a file can be written there, and no folder of a pipeline's."""

from __future__ import annotations

import os

NOT_ELSEWHERE = (
    "folders are written by each process to a disk of this machine: give a local path, or save the weights only "
    "(save_weights_only=True of a ModelCheckpoint, save_checkpoint(path, weights_only=True)), which writes one "
    "file there"
)


def is_elsewhere(path: str | os.PathLike[str]) -> bool:
    """Whether a path is not of this machine's disks, such as ``s3://bucket/name.ckpt``."""
    return "://" in os.fspath(path)

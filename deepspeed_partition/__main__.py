"""``python -m deepspeed_partition`` is the command ``madpipe``."""

from deepspeed_partition.cli import main

main()

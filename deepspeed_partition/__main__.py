"""Entry of ``python -m deepspeed_partition``, which is the command ``madpipe``."""

from deepspeed_partition.cli import main

main()

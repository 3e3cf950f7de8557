"""Entry of ``python -m deepspeed_partition`` and of the command ``madpipe``, which is the same."""

import sys


def main() -> None:
    """Run the command line and exit with its status; Ctrl-C while it is imported gives one line, too."""
    try:
        from deepspeed_partition.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("madpipe: interrupted\n")
        sys.exit(130)  # as the command line exits, which may not be there yet


if __name__ == "__main__":
    main()

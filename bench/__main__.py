"""The command `bench`, also as `python -m bench`: Ctrl-C while modules are imported ends it in silence."""

import os
import signal
import sys


def main() -> int:
    """Imports the command line and runs it; returns the exit code."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # nothing is begun that would have to be cleaned up
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    from bench.system import shells

    shells.install()
    from bench import cli

    signal.signal(signal.SIGINT, before)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())

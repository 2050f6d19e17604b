"""The failures that a user can cause or must know of, each with its exit code.

Every one is shown as a single line on standard error: what is wrong, where, what to do.
"""


class BenchError(Exception):
    """Something failed that is not a mistake of the user's; exit code 1."""

    exit_code = 1


class UsageError(BenchError):
    """A name, flag or setting is wrong, or a finished run is in the way; exit code 2."""

    exit_code = 2


class NotImported(UsageError):
    """A record names a class outside the suite, whose code nobody has said to run; exit code 2.

    Args:
        message: What is wrong.
        name: `package.module:Class`.
    """

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


class Busy(UsageError):
    """Another process has the folder to itself; exit code 2."""


class DataError(BenchError):
    """A data set is missing, truncated or not the one it claims to be; exit code 3."""

    exit_code = 3


class Diverged(BenchError):
    """A loss or prediction stopped being finite; exit code 4. Recorded, and counted, never dropped."""

    exit_code = 4


class OutputError(BenchError):
    """The results cannot be written; exit code 5."""

    exit_code = 5

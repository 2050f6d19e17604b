"""The leaderboard: submissions, how they are checked, ranked and shown, and the records behind the docs."""

from pathlib import Path

# Python gets here by a link in `bench/`; the modules are told by where they lie.
__path__ = [str(Path(__file__).resolve().parent)]

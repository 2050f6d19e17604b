"""The leaderboard: submissions, how they are checked, ranked and shown, and the records behind the docs."""

"""Many runs: sweeps over methods, tasks and seeds, the search for settings, and who runs which cell."""

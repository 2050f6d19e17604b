"""What each command does; `bench.cli` lists them. Results go to `output`, all other words to `errors`."""

"""What the operating system gives: files, places of data, processes, signals, and the suite's own sources."""

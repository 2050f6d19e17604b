"""One run, from names on the command line to a record on disk, and what is known of finished runs."""

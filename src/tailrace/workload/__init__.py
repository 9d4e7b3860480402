"""Load: what is asked and when (here), the processes that send it (`send/`), the run around them (`run/`), and launches
(`cold/`)."""

"""As many connections as the machine grants: the usual soft limit of open files is 1,024, the hard one far above."""

import contextlib
import resource


def raise_file_limit() -> None:
    """For this process. Where a host is stricter, the records of requests that got no connection say so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

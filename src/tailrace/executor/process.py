"""Bounds on what the kernels' libraries keep in this process. Called once, before the first model is compiled.

Measured on steps of random shapes (SmolLM2-135M int8, AVX2; `benchmarks/bench_soak.py`): resident memory grew from
880 to 1,008 MB over 400 steps and went on with each token count never seen before. With these bounds and
`model.paged.KERNEL_CACHE_ENTRIES` it stands still at 904 MB from the 150th step on, at the same processor time.
"""

import contextlib
import ctypes

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""glibc's numbers, malloc.h."""
_MMAP_BYTES_MIN = 256 * 1024
"""Larger buffers are returned to the system when freed; glibc would raise its own threshold with each one freed."""


def bound_library_memory() -> None:
    """oneDNN's own cache of kernels is off (the plugin has one, bounded), malloc keeps one arena and few large pieces.

    Does what the C library offers: elsewhere than on glibc the second half is left out.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.setenv(b"ONEDNN_PRIMITIVE_CACHE_CAPACITY", b"0", 0)  # 0: who started the process may have set another
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES_MIN)

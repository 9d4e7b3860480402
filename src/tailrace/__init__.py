"""tailrace: an LLM inference service whose numbers can be defended.

A request takes this path, one folder a hop: `worker -> engine -> executor`, and its tokens come back the same way.
"""

__version__ = "0.1.0"

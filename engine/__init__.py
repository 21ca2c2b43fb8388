"""millstream: a CPU engine for Mixture-of-Experts language models.

import engine
for piece in engine.load().generate("In the beginning"):
    print(piece, end="", flush=True)
"""

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def load(*args, **kwargs):
    """See engine.runtime.load; imported on first use so that `millstream --help` stays quick."""
    from .runtime import load as load_engine

    return load_engine(*args, **kwargs)

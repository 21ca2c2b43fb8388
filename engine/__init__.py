"""millstream: a CPU engine for Mixture-of-Experts language models.

import engine
for piece in engine.load().generate("In the beginning"):
    print(piece, end="", flush=True)
"""

__version__ = "0.1.0"
__all__ = ["SamplingParams", "__version__", "load"]


def load(*args, **kwargs):
    """See engine.runtime.load; imported on first use so that `millstream --help` stays quick."""
    from .runtime import load as load_engine

    return load_engine(*args, **kwargs)


def __getattr__(name):
    if name == "SamplingParams":
        from .sampler import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'engine' has no attribute {name!r}")

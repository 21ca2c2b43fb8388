"""Where the experts of a layer are: all resident (this version); streamed from disk later behind the same table."""

from .lazy import LazyExperts, Recoder
from .resident import ResidentExperts

__all__ = ["LazyExperts", "Recoder", "ResidentExperts"]

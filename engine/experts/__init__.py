"""Where the experts of a layer are: all resident (this version); streamed from disk later behind the same table."""

from .resident import ResidentExperts

__all__ = ["ResidentExperts"]

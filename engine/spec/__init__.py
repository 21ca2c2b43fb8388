"""Speculation: draft sources, the policy that sizes a window, and the book-keeping of both.

A window is row 0 = the last accepted token and up to 7 drafts; the decode loop (engine.generate) verifies it in one
forward pass. Nothing here can change a token: a draft is kept only where it equals the model's own pick.
"""

from .drafts import MAX_ROWS, DraftSource, Offer
from .lookup import LookupSource
from .policy import AutoPolicy, FixedPolicy
from .speculator import PLAIN, SpecStats, Speculator, Window, make_speculator

__all__ = [
    "MAX_ROWS", "PLAIN", "AutoPolicy", "DraftSource", "FixedPolicy", "LookupSource", "Offer", "SpecStats",
    "Speculator", "Window", "make_speculator",
]  # fmt: skip

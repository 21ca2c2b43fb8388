"""What a draft source is. Sources see token ids only; they know no weights of the model that verifies."""

from typing import NamedTuple, Protocol

import numpy as np

from ..config import MAX_WINDOW_ROWS as MAX_ROWS

__all__ = ["MAX_ROWS", "NOT_FINITE", "DraftSource", "Offer"]
NOT_FINITE = "a value is not finite"


class Offer(NamedTuple):
    """A source has something to say.

    count: drafts it can give. bucket: how sure it is, a small number that its acceptance is counted under. chance: that
    the first draft is right, believed until there are counts.
    """

    count: int
    bucket: int
    chance: float = 0.5


class DraftSource(Protocol):
    """Guesses the tokens that follow a text.

    Calls come in pairs: `offer` is cheap and may abstain; `draft` is called with at most the offered count, for the
    same text. ms_per_draft: measured cost of one draft in milliseconds, which the policy adds to that of verifying.
    ended: why there are no more drafts for this text, None while there may be.
    """

    name: str
    ms_per_draft: float
    ended: str | None = None

    def follow(self, kv) -> None:
        """The prefill is over; kv: the KV cache of the text that is drafted. Nothing to do for most sources."""

    def offer(self, text: np.ndarray, limit: int) -> Offer | None:
        """text: int32 [n], prompt and output so far; limit: drafts that are of use. None: abstains."""

    def draft(self, count: int) -> list[int]:
        """The next `count` tokens as this source sees them; fewer is allowed."""

"""The policies of the expert cache by name (the values of --cache-policy), and which one is the default."""

from ..errors import ConfigError
from .policy_base import Policy
from .policy_decay import LFU, Score
from .policy_lru import LRU

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (LRU, LFU, Score)}
DEFAULT_POLICY = Score.name  # docs/cache-policies.md has the evidence


def make_policy(name: str, capacity: int, num_keys: int) -> Policy:
    """Return a policy for `capacity` slots and keys below num_keys.

    Raises ConfigError for an unknown name or an empty cache.
    """
    if name not in POLICIES:
        raise ConfigError(f"cache policy: got {name!r}, expected one of {', '.join(POLICIES)}")
    if capacity < 1:
        raise ConfigError(f"cache policy: got a capacity of {capacity} experts, expected at least 1")
    return POLICIES[name](capacity, num_keys)

"""Places where a kept tensor may wait other than whole and on its device."""

from megackpt.recompute.tiers.base import Stored, Ticket, Tier, flat_storage
from megackpt.recompute.tiers.host import HostTier
from megackpt.recompute.tiers.shard import ShardTier

__all__ = ["HostTier", "ShardTier", "Stored", "Ticket", "Tier", "flat_storage"]

"""DECIDE: pure functions on numbers.  Importing this room never imports torch."""

from megackpt.plan.decision import KEEP, REPLAY, TIERS, ChunkPlan, Decision, Group, Plan, SaveSet, group_at
from megackpt.plan.policies import Policy, chunk_plan, plan_for

__all__ = [
    "KEEP", "REPLAY", "TIERS", "ChunkPlan", "Decision", "Group", "Plan", "Policy", "SaveSet", "chunk_plan",
    "group_at",    "plan_for",
]  # fmt: skip

"""DECIDE: pure functions on numbers.  Importing this room never imports torch."""

from megackpt.plan.decision import KEEP, REPLAY, ChunkPlan, Decision, Group, Plan, SaveSet
from megackpt.plan.policies import chunk_plan, plan_for

__all__ = ["KEEP", "REPLAY", "ChunkPlan", "Decision", "Group", "Plan", "SaveSet", "chunk_plan", "plan_for"]

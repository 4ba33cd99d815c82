"""The memory of another system: Megatron-LM as its launch arguments say, on the last pipeline stage.

Our own trainer is predicted by `plan.predict`.  This room answers the other question of somebody who comes from there:
what did my run hold, and of what?  It is checked against published allocator counters (`tools/predict_measured.py`).
"""

from megackpt.plan.megatron.arguments import MegatronRun, read_arguments
from megackpt.plan.megatron.memory import MegatronMemory, predict_memory

__all__ = ["MegatronMemory", "MegatronRun", "predict_memory", "read_arguments"]

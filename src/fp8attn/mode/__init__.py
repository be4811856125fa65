"""FP8 attention in any model: `with fp8_attention(policy, model) as report: model(x)`.

| file | what |
|---|---|
| `mode.py` | `fp8_attention`, and how it sees a model's calls |
| `policy.py` | `AttentionPolicy`: which calls run in FP8 |
| `report.py` | `AttentionReport`: which calls did, and why the others did not |
| `sites.py` | which module of the model makes a call |
"""

from .mode import fp8_attention
from .policy import AttentionCall, AttentionPolicy
from .report import AttentionReport, ModuleCalls

__all__ = ["AttentionCall", "AttentionPolicy", "AttentionReport", "ModuleCalls", "fp8_attention"]

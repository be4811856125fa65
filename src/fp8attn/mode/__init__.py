"""FP8 attention in any model: `with fp8_attention(policy, model) as report: model(x)`."""

from .mode import fp8_attention
from .policy import AttentionCall, AttentionPolicy
from .report import AttentionReport, ModuleCalls

__all__ = ["AttentionCall", "AttentionPolicy", "AttentionReport", "ModuleCalls", "fp8_attention"]

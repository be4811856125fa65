"""FP8 attention in ComfyUI, by block and by step.

    patched = fp8_model(model, AttentionPolicy(skip_first=2, skip_last=2, steps=range(3, 27)))    # in a node
    print(override_of(patched).report)                                                              # after sampling

ComfyUI calls `transformer_options["optimized_attention_override"]` in place of its attention function, which is the first argument. It also
names the block and the noise of the step there. `examples/comfyui/` has a node. Nothing of ComfyUI is imported or changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..dense.sdpa import fallback_reason, log_fallback, scaled_dot_product_attention
from ..errors import UsageError
from ..mode import AttentionPolicy, AttentionReport

KEY = "optimized_attention_override"
Attend = Callable[..., torch.Tensor]


class AttentionOverride:
    """What ComfyUI calls in place of its attention function. It runs FP8 where the policy and the call allow it, and else that function.

    Args:
        policy: `skip_first`, `skip_last` and numbers in `skip` count blocks. Of a model with double and single blocks (Flux), each kind is
            counted by itself. `steps` are indices in the sampler's schedule. Default: `AttentionPolicy()`, calls of 8,192 tokens and more.
        before: another override, which is called where FP8 does not run.
    Attributes:
        report: which calls ran in FP8, and why the others did not.
    Raises:
        TypeError: `policy` is no `AttentionPolicy`.
        UsageError: the policy has patterns of modules' names, which ComfyUI does not give.
    """

    def __init__(self, policy: AttentionPolicy | None = None, before: Attend | None = None) -> None:
        self.policy = AttentionPolicy() if policy is None else policy
        if not isinstance(self.policy, AttentionPolicy):
            raise TypeError(f"policy must be an AttentionPolicy; got {type(policy).__name__}")
        if self.policy.patterns:
            raise UsageError(f"ComfyUI does not name modules: skip blocks by their numbers, not by {', '.join(self.policy.patterns)}")
        self.report = AttentionReport(self.policy)
        self._before = before
        self._seen: tuple[torch.Tensor, int] | None = None  # the tensor of the step's noise and its version: reading it waits for the GPU

    def __deepcopy__(self, memo: dict) -> AttentionOverride:
        """This object: ComfyUI copies the options of a model, and all copies count in one report."""
        return self

    def __call__(
        self,
        func: Attend,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of one call of ComfyUI.

        Args:
            func: ComfyUI's function, which takes the other arguments.
            q, k, v: `[B, S, heads * head_dim]`, or with `skip_reshape` `[B, heads, S, head_dim]`. With `enable_gqa=True`, k and v may have
                fewer heads.
            mask, attn_precision, kwargs: as ComfyUI passes them. With a mask, with `attn_precision=torch.float32` and with
                `low_precision_attention=False` the function runs.
        Returns:
            `[B, S, heads * head_dim]`, or with `skip_output_reshape` `[B, heads, S, head_dim]`.
        """
        scale, gqa = kwargs.get("scale"), bool(kwargs.get("enable_gqa", False))
        size = q.shape[-1] if skip_reshape else q.shape[-1] // heads
        query, key, value = (q, k, v) if skip_reshape else (x.unflatten(-1, (-1, size)).transpose(1, 2) for x in (q, k, v))
        options = kwargs.get("transformer_options") or {}
        kind, block = options.get("block_type"), options.get("block_index")
        reason = _precision_reason(attn_precision, kwargs) or fallback_reason(query, key, value, mask, scale=scale, enable_gqa=gqa)
        reason = reason or self._reason(query, key, options)
        name = " ".join(str(x) for x in (kind, block) if x is not None)
        self.report.row(name, block, reason).count(query, key)
        if reason is None:
            out = scaled_dot_product_attention(
                query, key, value, scale=scale, enable_gqa=gqa, key_dtype=self.policy.key_dtype, rotate_keys=self.policy.rotate_keys,
                backend=self.policy.backend,
            )  # fmt: skip
            return out if skip_output_reshape else out.transpose(1, 2).flatten(2)
        log_fallback(reason, query, key, value)
        given = dict(mask=mask, attn_precision=attn_precision, skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape)
        return (func if self._before is None else _bound(self._before, func))(q, k, v, heads, **given, **kwargs)

    def _reason(self, query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> str | None:
        """Why the policy skips this call; None: it does not."""
        policy, block, total = self.policy, options.get("block_index"), options.get("total_blocks")
        if policy.steps is not None:
            if not self._follow(options.get("sigmas"), options.get("sample_sigmas")):
                return "left out by steps: the sampler does not say which step this is"
            if not self.report.step_runs:
                return "left out by steps"
        if policy.skip_first or policy.skip_last or policy.layers:
            from_the_end = bool(policy.skip_last) or min(policy.layers, default=0) < 0
            if block is None or (total is None and from_the_end):
                return "left out by block: the model does not say which block this is"
            total = block + 1 if total is None else total  # then none counts from the end
            if (reason := policy.layer_reason(block, total)) is not None:
                return reason
        return policy.call_reason(None, block, query, key, is_causal=False)

    def _follow(self, sigmas: torch.Tensor | None, schedule: torch.Tensor | None) -> bool:
        """Set the report's step: the place in the schedule whose noise is nearest. Returns whether it is known."""
        if sigmas is None or schedule is None:
            return False
        if self._seen is None or self._seen[0] is not sigmas or self._seen[1] != sigmas._version:
            self._seen = sigmas, sigmas._version
            self.report.step(int((schedule.to(sigmas.device) - sigmas.flatten()[0]).abs().argmin()))
        return True


def fp8_model(model: Any, policy: AttentionPolicy | None = None) -> Any:
    """A copy of one of ComfyUI's models (`ModelPatcher`) whose attention runs in FP8 where the policy and the call allow it.

    Args:
        model: the input MODEL of a node. An attention override that it has is called where FP8 does not run.
        policy: as `AttentionOverride` takes it.
    Returns:
        The output MODEL. `override_of` has its override.
    """
    patched = model.clone()
    options = patched.model_options.setdefault("transformer_options", {})
    before = options.get(KEY)
    if isinstance(before, AttentionOverride):  # the newest policy decides alone
        before = before._before
    patched.model_options["transformer_options"] = {**options, KEY: AttentionOverride(policy, before)}
    return patched


def override_of(model: Any) -> AttentionOverride:
    """The override of a model of `fp8_model`, with its report.

    Raises:
        UsageError: the model has none.
    """
    found = model.model_options.get("transformer_options", {}).get(KEY)
    if not isinstance(found, AttentionOverride):
        raise UsageError("this model has no override of fp8attn: pass one that fp8_model returned")
    return found


def _precision_reason(attn_precision: torch.dtype | None, kwargs: dict[str, Any]) -> str | None:
    if attn_precision == torch.float32:
        return "ComfyUI asks for attention in float32"
    if kwargs.get("low_precision_attention", True) is False:
        return "the model asks for full precision (low_precision_attention=False)"
    return None


def _bound(override: Attend, func: Attend) -> Attend:
    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        return override(func, *args, **kwargs)

    return attend

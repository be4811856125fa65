"""A node of ComfyUI: attention in 8 bits, by block and by step.

Copy this file into ComfyUI/custom_nodes, and install fp8attn into ComfyUI's environment.
Put the node "FP8 attention (fp8attn)" between the loader of a model and its sampler. Short calls, calls with a mask,
and the skipped blocks and steps run ComfyUI's own attention. The report of `Override` counts both, and has the reasons.

ComfyUI calls `transformer_options["optimized_attention_override"]` instead of its attention function, and passes that
function as the first argument. The same dict names the block and the noise of the step. Nothing of ComfyUI is imported
or changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8attn import AttentionPolicy, AttentionReport, fallback_reason, scaled_dot_product_attention

KEY = "optimized_attention_override"
LAST = 10_000  # blocks or steps; no model and no schedule has as many
Attend = Callable[..., torch.Tensor]


class Override:
    """The attention of a model: in FP8 where the policy and the call allow it, otherwise ComfyUI's own.

    Args:
        policy: `skip_first`, `skip_last` and numbers in `skip` count blocks. If a model has double and single blocks
            (Flux), each kind is counted by itself. `steps` are indices in the sampler's schedule. ComfyUI names no
            modules, so `skip` cannot have patterns.
        before: the override that the model had; it is called where FP8 does not run.
    Attributes:
        report: which calls ran in FP8, and why the others did not.
    """

    def __init__(self, policy: AttentionPolicy, before: Attend | None = None) -> None:
        if policy.patterns:
            raise ValueError(
                f"ComfyUI names no modules: skip blocks by their numbers instead of {', '.join(policy.patterns)}"
            )
        self.policy, self.before = policy, before
        self.report = AttentionReport(policy)
        self._sigmas: torch.Tensor | None = None  # the noise of the current step

    def __deepcopy__(self, memo: dict) -> Override:
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
            q, k, v: `[B, S, heads * head_dim]`, or with `skip_reshape` `[B, heads, S, head_dim]`. With
                `enable_gqa=True`, k and v may have fewer heads.
            mask, attn_precision, kwargs: as ComfyUI passes them.
        Returns:
            `[B, S, heads * head_dim]`, or with `skip_output_reshape` `[B, heads, S, head_dim]`.
        """
        scale, gqa = kwargs.get("scale"), bool(kwargs.get("enable_gqa", False))
        size = q.shape[-1] if skip_reshape else q.shape[-1] // heads
        query, key, value = (
            (q, k, v) if skip_reshape else (x.unflatten(-1, (-1, size)).transpose(1, 2) for x in (q, k, v))
        )
        options = kwargs.get("transformer_options") or {}
        kind, block = options.get("block_type"), options.get("block_index")
        reason = precision_reason(attn_precision, kwargs) or fallback_reason(
            query, key, value, mask, scale=scale, enable_gqa=gqa
        )
        reason = reason or self._policy_reason(query, key, options)
        name = " ".join(str(x) for x in (kind, block) if x is not None)
        self.report.row(name, block, reason).count(query, key)
        if reason is None:
            out = scaled_dot_product_attention(
                query, key, value, scale=scale, enable_gqa=gqa, key_dtype=self.policy.key_dtype,
                rotate_keys=self.policy.rotate_keys,
                backend=self.policy.backend,
            )  # fmt: skip
            return out if skip_output_reshape else out.transpose(1, 2).flatten(2)
        kwargs |= {
            "mask": mask,
            "attn_precision": attn_precision,
            "skip_reshape": skip_reshape,
            "skip_output_reshape": skip_output_reshape,
        }
        return func(q, k, v, heads, **kwargs) if self.before is None else self.before(func, q, k, v, heads, **kwargs)

    def _policy_reason(self, query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> str | None:
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
            total = block + 1 if total is None else total  # no number counts from the end, so any total does
            if (reason := policy.layer_reason(block, total)) is not None:
                return reason
        return policy.call_reason(None, block, query, key, is_causal=False)

    def _follow(self, sigmas: torch.Tensor | None, schedule: torch.Tensor | None) -> bool:
        """Set the report's step: the index in the schedule whose noise is nearest. Returns whether the step is known.

        Reading the noise waits for the GPU. ComfyUI makes a new tensor for each call of the model, so each tensor is
        read once.
        """
        if sigmas is None or schedule is None:
            return False
        if self._sigmas is not sigmas:
            self._sigmas = sigmas
            self.report.step(int((schedule.to(sigmas.device) - sigmas.flatten()[0]).abs().argmin()))
        return True


def precision_reason(attn_precision: torch.dtype | None, kwargs: dict[str, Any]) -> str | None:
    """Why ComfyUI wants a call in high precision; None: it does not."""
    if attn_precision == torch.float32:
        return "ComfyUI asks for attention in float32"
    if kwargs.get("low_precision_attention", True) is False:
        return "the model asks for full precision (low_precision_attention=False)"
    return None


def fp8_model(model: Any, policy: AttentionPolicy) -> Any:
    """A copy of one of ComfyUI's models (`ModelPatcher`) with an `Override`. An `Override` that the model has is
    replaced.
    """
    patched = model.clone()
    options = patched.model_options.get("transformer_options", {})
    before = options.get(KEY)
    if isinstance(before, Override):
        before = before.before
    patched.model_options["transformer_options"] = {**options, KEY: Override(policy, before)}
    return patched


class FP8Attention:
    """The node: patches a MODEL with `fp8_model`."""

    CATEGORY = "model_patches"
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    DESCRIPTION = (
        f"Runs attention in 8 bits: faster on H100 and H200 from about {AttentionPolicy.min_length:,} tokens on "
        "(videos, large images)."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, tuple]]:  # ComfyUI's name
        """The node's inputs."""

        def count(default: int, tooltip: str) -> tuple:
            return ("INT", {"default": default, "min": 0, "max": LAST, "tooltip": tooltip})

        return {
            "required": {
                "model": ("MODEL",),
                "min_length": (
                    "INT",
                    {
                        "default": AttentionPolicy.min_length,
                        "min": 0,
                        "max": 1 << 20,
                        "tooltip": "Shorter calls stay in 16 bits. Tokens.",
                    },
                ),
                "skip_first": count(0, "The first blocks that stay in 16 bits."),
                "skip_last": count(0, "The last blocks that stay in 16 bits."),
                "first_step": count(0, "The steps before this one stay in 16 bits."),
                "last_step": count(LAST, "The steps after this one stay in 16 bits."),
            }
        }

    def patch(
        self, model: Any, min_length: int, skip_first: int, skip_last: int, first_step: int, last_step: int
    ) -> tuple[Any]:
        """The output MODEL."""
        steps = None if (first_step, last_step) == (0, LAST) else range(first_step, last_step + 1)
        return (
            fp8_model(
                model, AttentionPolicy(min_length=min_length, skip_first=skip_first, skip_last=skip_last, steps=steps)
            ),
        )


NODE_CLASS_MAPPINGS = {"FP8Attention": FP8Attention}
NODE_DISPLAY_NAME_MAPPINGS = {"FP8Attention": "FP8 attention (fp8attn)"}

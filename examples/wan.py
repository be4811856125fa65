"""8-bit attention in diffusers' Wan, a video model: in all but the first steps and the outer blocks.

With a tiny Wan of random weights (on a GPU or a CPU), and with a real one on a GPU:

    python examples/wan.py
    python examples/wan.py --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --prompt "A cat on a boat" --video cat.mp4
"""

import argparse
from contextlib import ExitStack

import torch

from fp8attn import AttentionPolicy
from fp8attn.integrations.diffusers import fp8_transformer, on_step_end

# after fp8attn, which says what to install where diffusers is missing
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel  # isort: skip
from diffusers.utils import export_to_video  # isort: skip

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a Wan pipeline: a folder or a Hugging Face id; default: a tiny random one")
parser.add_argument("--prompt", default="A cat on a boat")
parser.add_argument("--video", default="wan.mp4", help="where to write the video of a --model")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
if args.model:
    pipe = WanPipeline.from_pretrained(args.model, torch_dtype=torch.bfloat16).to(device)
    call = {"prompt": args.prompt, "height": 720, "width": 1280, "num_frames": 81, "num_inference_steps": 50}
    policy = AttentionPolicy(skip_first=2, skip_last=2, steps=range(5, 50))
else:  # no text encoder and no decoder: a given embedding in, latent frames out
    tiny = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=64, text_dim=32, freq_dim=32, ffn_dim=64, num_layers=4,
        rope_max_seq_len=64
    )  # fmt: skip
    pipe = WanPipeline(None, None, None, FlowMatchEulerDiscreteScheduler(), transformer=tiny).to(device)
    embedding = torch.randn(1, 16, 32, device=device)
    call = {
        "prompt_embeds": embedding,
        "height": 128,
        "width": 128,
        "num_frames": 9,
        "num_inference_steps": 4,
        "guidance_scale": 1.0,
    }
    call |= {"output_type": "latent"}
    policy = AttentionPolicy(skip_first=1, skip_last=1, steps=range(1, 4), min_length=128)

with ExitStack() as stack:
    transformers = filter(None, (pipe.transformer, pipe.transformer_2))  # Wan 2.2 has two, each for some of the steps
    reports = [stack.enter_context(fp8_transformer(transformer, policy)) for transformer in transformers]
    frames = pipe(**call, callback_on_step_end=on_step_end(*reports)).frames[0]
print(*reports, sep="\n")
if args.model:
    export_to_video(frames, args.video, fps=16)
    print(f"wrote {args.video}")
else:
    print(f"latent frames {tuple(frames.shape)}, all finite: {bool(frames.isfinite().all())}")

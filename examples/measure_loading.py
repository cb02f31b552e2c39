"""What memory loading a checkpoint takes beside its parameters, on a file of any size.

    python examples/measure_loading.py
    python examples/measure_loading.py --bytes 200e6 --scan-layers

Writes a checkpoint of random weights as models are published: sharded, Hugging Face's names,
matrices in e4m3 with scales of blocks and in bfloat16. A process of its own loads it and reads from
the kernel what it held at most. Needs Linux and, for a while, the disk space.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from command_line import Parser, print_error
from safetensors.numpy import save_file
from tqdm import tqdm

import swa_jax as swa
from swa_jax.hf_config import write_config

LAYERS = 8
BOUND = 1.3  # of the largest layer's parameters
SAMPLE_SECONDS = 0.002
STATUS = Path("/proc/self/status")


def build_config(width: int, scan_layers: bool = False) -> swa.DecoderConfig:
    """A decoder whose matrices have some multiple of 320 inputs; 16 is about DeepSeek-V4.1's."""
    attention = swa.AttentionConfig(
        hidden_size=320 * width,
        num_heads=4 * width,
        q_lora_rank=80 * width,
        o_groups=4,
        o_lora_rank=128 * width,
        dtype="bfloat16",
        param_dtype="bfloat16",
    )
    return swa.DecoderConfig(
        vocab_size=512 * width,
        num_layers=LAYERS,
        attention=attention,
        mlp_size=256 * width,
        scan_layers=scan_layers,
    )


def fit_config(size: int, scan_layers: bool) -> swa.DecoderConfig:
    """The widest of these decoders whose checkpoint is no larger than some bytes."""
    width = 1
    while checkpoint_bytes(build_config(width + 1)) <= size:
        width += 1
    return build_config(width, scan_layers)


def shards(config: swa.DecoderConfig) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
    """The tensors of each file: kind and shape by name.

    Kinds are "float32", "bfloat16", and "128" and "32", e4m3 with blocks of that size.
    """
    c = config.layers[0]
    hidden, heads = c.hidden_size, c.num_heads * c.head_dim
    ranks = c.o_groups * c.o_lora_rank
    table = (config.vocab_size, hidden)
    files: list[dict[str, tuple[str, tuple[int, ...]]]] = [
        {
            "model.embed_tokens.weight": ("bfloat16", table),
            "model.norm.weight": ("float32", (hidden,)),
            "lm_head.weight": ("bfloat16", table),
        }
    ]
    for i in range(config.num_layers):
        # half the layers have a SwiGLU in bfloat16, as a model that is quantised in part
        mlp = "bfloat16" if i % 2 else "32"
        layer: dict[str, tuple[str, tuple[int, ...]]] = {
            "self_attn.q_a_proj.weight": ("128", (c.q_lora_rank, hidden)),
            "self_attn.q_a_norm.weight": ("float32", (c.q_lora_rank,)),
            "self_attn.q_b_proj.weight": ("128", (heads, c.q_lora_rank)),
            "self_attn.kv_proj.weight": ("128", (c.head_dim, hidden)),
            "self_attn.kv_norm.weight": ("float32", (c.head_dim,)),
            "self_attn.sinks": ("float32", (c.num_heads,)),
            "self_attn.o_a_proj.weight": ("128", (ranks, heads // c.o_groups)),
            "self_attn.o_b_proj.weight": ("128", (hidden, ranks)),
            "input_layernorm.weight": ("float32", (hidden,)),
            "post_attention_layernorm.weight": ("float32", (hidden,)),
            "mlp.gate_proj.weight": (mlp, (config.mlp_size, hidden)),
            "mlp.up_proj.weight": (mlp, (config.mlp_size, hidden)),
            "mlp.down_proj.weight": (mlp, (hidden, config.mlp_size)),
        }
        files.append({f"model.layers.{i}.{name}": kind for name, kind in layer.items()})
    return files


def checkpoint_bytes(config: swa.DecoderConfig) -> int:
    """Bytes of a checkpoint's tensors."""
    return sum(
        tensor_bytes(kind, shape) for file in shards(config) for kind, shape in file.values()
    )


def tensor_bytes(kind: str, shape: tuple[int, ...]) -> int:
    size = int(np.prod(shape))
    if kind in ("float32", "bfloat16"):
        return size * jnp.dtype(kind).itemsize
    return size + int(np.prod([-(-n // int(kind)) for n in shape]))


def random_tensor(name: str, kind: str, shape: tuple[int, ...], rng: Any) -> dict[str, np.ndarray]:
    """A tensor of some kind, with its scales."""
    if kind == "float32":
        return {name: rng.uniform(0.5, 1.5, shape).astype(np.float32)}
    raw = np.frombuffer(rng.bytes(int(np.prod(shape)) * (2 if kind == "bfloat16" else 1)), np.uint8)
    if kind == "bfloat16":  # exponents of 2**-1 and less, either sign
        bits = raw.view(np.uint16) & 0xBEFF
        return {name: bits.view(ml_dtypes.bfloat16).reshape(shape)}
    codes = raw & 0xF7  # no NaN
    blocks = [-(-n // int(kind)) for n in shape]
    exponents = rng.integers(108, 114, blocks).astype(np.uint8)
    return {
        name: codes.view(ml_dtypes.float8_e4m3fn).reshape(shape),
        f"{name}_scale_inv": exponents.view(ml_dtypes.float8_e8m0fnu),
    }


def write_checkpoint(directory: Path, config: swa.DecoderConfig) -> None:
    """Writes random weights in one file for each layer and one for the rest, and the index."""
    rng = np.random.default_rng(0)
    files = shards(config)
    weight_map: dict[str, str] = {}
    total = checkpoint_bytes(config)
    with tqdm(total=total, unit="B", unit_scale=True, desc="writing") as bar:
        for i, tensors in enumerate(files, 1):
            file = f"model-{i:05d}-of-{len(files):05d}.safetensors"
            arrays: dict[str, np.ndarray] = {}
            for name, (kind, shape) in tensors.items():
                arrays |= random_tensor(name, kind, shape, rng)
                bar.update(tensor_bytes(kind, shape))
            save_file(arrays, directory / file)
            weight_map |= dict.fromkeys(arrays, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    write_config(directory, config)


def load(directory: Path) -> dict[str, int]:
    """Loads a checkpoint in this process, which should be a fresh one.

    Returns:
      Bytes: of the parameters; of those of the largest layer; of embedding and head, the larger;
      resident before; and at most while loading, in all and anonymous.
    """
    config = swa.read_config(directory)
    jax.block_until_ready(jax.device_put(np.zeros(8)))  # JAX starts
    before = read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    params, anonymous = sample_peak(lambda: swa.checkpoint.load_decoder(
        directory, config, progress=True
    )["params"])  # fmt: skip
    peak = read_status("VmHWM")
    layers = [tree for name, tree in params.items() if name.startswith("layers")]
    stacked = config.num_layers if config.scan_layers else 1
    return {
        "parameters": _nbytes(params),
        "layer": max(_nbytes(layer) for layer in layers) // stacked,
        "table": max(_nbytes(params["embedding"]), _nbytes(params["head"])),
        "before": before,
        "peak": peak,
        "anonymous": anonymous,
    }


def sample_peak(call: Callable[[], Any]) -> tuple[Any, int]:
    """A call's result, and the most anonymous memory that was seen meanwhile."""
    done = threading.Event()
    seen = [read_status("RssAnon")]

    def sample():
        while not done.wait(SAMPLE_SECONDS):
            seen[0] = max(seen[0], read_status("RssAnon"))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        result = call()
    finally:
        done.set()
        thread.join()
    return result, max(seen[0], read_status("RssAnon"))


def read_status(field: str) -> int:
    """Bytes of a field of this process's status."""
    for line in STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"{STATUS}: expected a field {field}, got none")


def print_report(file_bytes: int, found: dict[str, int]) -> bool:
    """Prints the figures and the verdict; returns whether the bound holds."""
    above = found["peak"] - found["before"] - found["parameters"]
    ratio = above / max(found["layer"], found["table"])
    holds = ratio < BOUND
    for name, value in (
        ("files", file_bytes),
        ("parameters as loaded", found["parameters"]),
        ("of the largest layer", found["layer"]),
        ("of embedding or head", found["table"]),
        ("resident before loading", found["before"]),
        ("resident at most", found["peak"]),
        ("anonymous at most", found["anonymous"]),
        ("at most above before + parameters", above),
    ):
        print(f"{name:36}{value:16,} bytes")
    print(
        f"{'HOLDS' if holds else 'DOES NOT HOLD'}: beside the parameters loading takes {ratio:.3f} "
        f"times the larger of layer and embedding, {above / found['layer']:.3f} times the layer; "
        f"the bound is {BOUND}"
    )
    return holds


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="measure_loading.py",
        description="Measures what memory loading a checkpoint takes beside its parameters.",
    )
    add = parser.add_argument
    add("--bytes", type=float, default=2e9, metavar="N",
        help="size of the checkpoint at most, 10e6 to 1e15 (2e9)")  # fmt: skip
    add("--dir", type=Path, default=Path(tempfile.gettempdir()), metavar="DIR",
        help="where to write it, in a folder that is removed afterwards "
        f"({tempfile.gettempdir()})")  # fmt: skip
    add("--scan-layers", action="store_true", help="load layers stacked, as scan_layers needs them")
    add("--load", type=Path, metavar="DIR",
        help="only load a checkpoint and print its figures as JSON")  # fmt: skip
    options = parser.parse_args(arguments)
    for name in ("bytes", "dir", "scan_layers"):
        if options.load is not None and getattr(options, name) != parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            parser.error(f"argument {option}: --load writes no checkpoint")
    if not 10e6 <= options.bytes <= 1e15:
        parser.error(f"argument --bytes: expected 10e6 to 1e15, got {options.bytes:g}")
    if not options.dir.is_dir():
        parser.error(f"argument --dir: expected a folder, got {options.dir}")
    if not STATUS.exists():
        parser.error(f"expected Linux, got a system without {STATUS}")
    return options


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    options = parse_arguments(arguments)
    if options.load is not None:
        try:
            print(json.dumps(load(options.load)))
        except (OSError, ValueError) as error:
            print_error("measure_loading.py", error)
            return 2
        return 0
    config = fit_config(int(options.bytes), options.scan_layers)
    size = checkpoint_bytes(config)
    free = shutil.disk_usage(options.dir).free
    if free < 1.1 * size:
        print(
            f"measure_loading.py: error: expected {1.1 * size:,.0f} bytes of free disk in "
            f"{options.dir}, got {free:,}",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="measure_loading-", dir=options.dir) as folder:
        directory = Path(folder)
        write_checkpoint(directory, config)
        file_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        # Parameters on the host: on a GPU there would be nothing to compare with.
        done = subprocess.run(
            [sys.executable, __file__, "--load", folder],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            check=True,
        )
    return 0 if print_report(file_bytes, json.loads(done.stdout)) else 1


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

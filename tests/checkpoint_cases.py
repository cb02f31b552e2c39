"""Checkpoint files made byte by byte, and what they hold computed in float64."""

import json
import math
import re
import struct
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from small_models import attention_config, decoder_config

import swa_jax as swa

INDEX = "model.safetensors.index.json"

# --- files, written from outside

DTYPES = {
    np.dtype(np.float64): "F64",
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
    np.dtype(np.int32): "I32",
    np.dtype(np.uint8): "U8",
}


def entry(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def file_bytes(header, data=b""):
    """A safetensors file; the header as an object or as its text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_file(path, tensors):
    header, data = {}, b""
    for name, array in tensors.items():
        start, data = len(data), data + array.tobytes()
        header[name] = entry(DTYPES[array.dtype], array.shape, start, len(data))
    path.write_bytes(file_bytes(header, data))
    return path


def write_sharded(directory, shards, **index):
    """Files by name, and an index of them with other fields changed."""
    directory.mkdir(exist_ok=True)
    for file, tensors in shards.items():
        write_file(directory / file, tensors)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    total = sum(array.nbytes for tensors in shards.values() for array in tensors.values())
    fields = {"metadata": {"total_size": total}, "weight_map": weight_map} | index
    (directory / INDEX).write_text(json.dumps(fields))
    return directory


# --- models, and their tensors by the names that the world gives them

# No size is a multiple of 128, and those that shards divide are no multiple of 32 then.
ATTENTION = attention_config(
    8,
    swa.F32,
    hidden_size=160,
    num_heads=4,
    q_lora_rank=96,
    o_groups=2,
    o_lora_rank=40,
)
ATTENTION_SHAPES = {
    "q_a_proj.weight": (96, 160),
    "q_a_norm.weight": (96,),
    "q_b_proj.weight": (256, 96),
    "kv_proj.weight": (64, 160),
    "kv_norm.weight": (64,),
    "sinks": (4,),
    "o_a_proj.weight": (80, 128),
    "o_b_proj.weight": (160, 80),
}
DECODER = decoder_config(ATTENTION, num_layers=2)
DECODER_SHAPES = {
    "model.embed_tokens.weight": (50, 160),
    **{
        f"model.layers.{i}.{name}": shape
        for i in range(2)
        for name, shape in (
            *((f"self_attn.{name}", shape) for name, shape in ATTENTION_SHAPES.items()),
            ("input_layernorm.weight", (160,)),
            ("post_attention_layernorm.weight", (160,)),
            ("mlp.gate_proj.weight", (48, 160)),
            ("mlp.up_proj.weight", (48, 160)),
            ("mlp.down_proj.weight", (160, 48)),
        )
    },
    "model.norm.weight": (160,),
    "lm_head.weight": (50, 160),
}
# From the names in transformers to those of the model's own inference code.
TO_ORIGINAL = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"\.self_attn\.", ".attn."),
    (r"\.q_a_proj\.", ".wq_a."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.q_b_proj\.", ".wq_b."),
    (r"\.attn\.kv_proj\.", ".attn.wkv."),
    (r"\.sinks$", ".attn_sink"),
    (r"\.o_a_proj\.", ".wo_a."),
    (r"\.o_b_proj\.", ".wo_b."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.mlp\.gate_proj\.", ".ffn.w1."),
    (r"\.mlp\.up_proj\.", ".ffn.w3."),
    (r"\.mlp\.down_proj\.", ".ffn.w2."),
    (r"\.weight_scale_inv$", ".scale"),
)


def original_name(name):
    for pattern, replacement in TO_ORIGINAL:
        name = re.sub(pattern, replacement, name)
    return name


def without_prefix(name):
    return name.removeprefix("model.")


NAMINGS = {"prefixed": str, "bare": without_prefix, "original": original_name}
by_naming = pytest.mark.parametrize("naming", NAMINGS.values(), ids=NAMINGS)


def random_tensors(shapes, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(size=shape) * shape[-1] ** -0.5).astype(
            np.float32 if len(shape) == 1 else dtype
        )
        for name, shape in shapes.items()
    }


def renamed(tensors, naming):
    return {naming(name): value for name, value in tensors.items()}


def attention_tensors(**arguments):
    """One layer, number 3, of a whole model."""
    tensors = random_tensors(ATTENTION_SHAPES, **arguments)
    return {f"model.layers.3.self_attn.{name}": value for name, value in tensors.items()}


def equal_bits(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def equal_trees(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(equal_bits, got, want)


def expected_attention(tensors, prefix):
    t = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return {
        "q_a_kv": np.concatenate([t["q_a_proj.weight"], t["kv_proj.weight"]]),
        "q_a_norm": t["q_a_norm.weight"],
        "q_b": t["q_b_proj.weight"],
        "kv_norm": t["kv_norm.weight"],
        "sinks": t["sinks"],
        "o_a": t["o_a_proj.weight"],
        "o_b": t["o_b_proj.weight"],
    }


def expected_layer(tensors, i):
    prefix = f"model.layers.{i}."
    return {
        "attention": expected_attention(tensors, f"{prefix}self_attn."),
        "attention_norm": {"weight": tensors[f"{prefix}input_layernorm.weight"]},
        "mlp_norm": {"weight": tensors[f"{prefix}post_attention_layernorm.weight"]},
        "mlp": {
            "gate": tensors[f"{prefix}mlp.gate_proj.weight"],
            "up": tensors[f"{prefix}mlp.up_proj.weight"],
            "down": tensors[f"{prefix}mlp.down_proj.weight"],
        },
    }


def expected_decoder(tensors, scan_layers=False):
    layers = [expected_layer(tensors, i) for i in range(2)]
    if scan_layers:
        tree = {"layers": {"layer": jax.tree.map(lambda *values: np.stack(values), *layers)}}
    else:
        tree = {f"layers_{i}": layer for i, layer in enumerate(layers)}
    return {
        "params": tree
        | {
            "embedding": tensors["model.embed_tokens.weight"],
            "norm": {"weight": tensors["model.norm.weight"]},
            "head": tensors["lm_head.weight"],
        }
    }


def e4m3_values():
    """Every e4m3 code's value: sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    values = []
    for code in range(256):
        sign, exponent, mantissa = -1.0 if code >> 7 else 1.0, code >> 3 & 15, code & 7
        size = math.ldexp(mantissa / 8 + (exponent > 0), max(exponent, 1) - 7)
        values.append(math.nan if code & 127 == 127 else sign * size)
    return np.array(values)


def dequantized(codes, scales, block):
    """In float64: each value times the scale of its block."""
    values = e4m3_values()[codes.view(np.uint8)]
    if scales.dtype.itemsize == 1:
        exponents = scales.view(np.uint8).astype(int)
        scales = np.where(exponents == 255, np.nan, np.ldexp(1.0, exponents - 127))
    rows, columns = (np.arange(size) // block for size in codes.shape)
    return values * scales.astype(np.float64)[rows[:, None], columns[None, :]]


def rounded_to_bfloat16(values):
    """float32 values to the nearest of 8 significant bits, ties to even; as bfloat16."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    kept = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    kept = np.where(np.isnan(values), np.uint16(0x7FC0), kept)
    return kept.view(ml_dtypes.bfloat16)


def random_codes(shape, seed=0):
    """All e4m3 codes, NaN and both zeros among them."""
    codes = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return codes.view(ml_dtypes.float8_e4m3fn)


def random_scales(shape, block, kind, seed=0):
    rng = np.random.default_rng(seed)
    blocks = tuple(-(-size // block) for size in shape)
    if kind == "float32":
        return rng.uniform(0.5e-3, 2e-3, blocks).astype(np.float32)
    exponents = rng.integers(115, 125, blocks).astype(np.uint8)
    return exponents if kind == "uint8" else exponents.view(ml_dtypes.float8_e8m0fnu)


def block_scaled(tensors, block, kind):
    """Attention and SwiGLU matrices in e4m3 with scales; and all of them in float64."""
    stored, values = {}, {}
    for i, (name, tensor) in enumerate(tensors.items()):
        stored[name] = tensor
        values[name] = tensor.astype(np.float64)
        if tensor.ndim == 2 and (".self_attn." in name or ".mlp." in name):
            stored[name] = random_codes(tensor.shape, i)
            scales = random_scales(tensor.shape, block, kind, i)
            stored[f"{name}_scale_inv"] = scales
            values[name] = dequantized(stored[name], scales, block)
    return stored, values


def fault_text(call):
    with pytest.raises(ValueError, match=r"\S") as raised:
        call()
    return str(raised.value)


def every_dtype():
    rng = np.random.default_rng(0)
    return {
        f"tensor {i}": np.frombuffer(rng.bytes(6 * dtype.itemsize), dtype).reshape(2, 3)
        for i, dtype in enumerate(DTYPES)
    }


def resident_bytes(path):
    """How much of a file this process has in its memory maps."""
    found, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            found = line.endswith(str(path))
        elif found and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


needs_smaps = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")

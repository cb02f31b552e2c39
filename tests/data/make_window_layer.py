"""Makes window_layer.npz. Needs an environment of its own: torch 2.13.0 and transformers 5.24.0.

It holds one sliding-window attention layer of DeepSeek-V4 as Hugging Face transformers computes it
on a CPU in float32, with random weights `p_*`, the input `x`, the output `y`, the configuration
`cfg` as JSON, and `y64`: the same maths in float64, written below without a look at that code.
Before it writes, it checks that transformers' own cache gives the same output chunk by chunk and
token by token.

    python make_window_layer.py [--out window_layer.npz]
"""

import argparse
import functools
import json
from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4RotaryEmbedding,
)

BATCH, TOKENS = 2, 40
FIELDS = (
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "qk_rope_head_dim",
    "rope_theta",
    "rms_norm_eps",
)


def make_config(rotated: int = 8, **fields) -> DeepseekV4Config:
    config = DeepseekV4Config(
        num_hidden_layers=1,
        layer_types=["sliding_attention"],
        mlp_layer_types=["moe"],
        vocab_size=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        hidden_size=64,
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=8,
        sliding_window=8,
        partial_rotary_factor=rotated / 32,
        **fields,
    )
    config._attn_implementation = "eager"  # the other implementations leave out the sinks
    return config


@torch.no_grad()
def make_layer(config: DeepseekV4Config) -> DeepseekV4Attention:
    torch.manual_seed(0)
    layer = DeepseekV4Attention(config, 0).eval()
    for name, weight in layer.named_parameters():
        if name == "sinks":
            weight.normal_(0, 1)
        elif name.endswith("norm.weight"):
            weight.uniform_(0.5, 1.5)
        else:
            weight.normal_(0, weight.shape[-1] ** -0.5)
    return layer


@torch.no_grad()
def run(config, layer, x: torch.Tensor, chunks: list[int], angles=None, first=0) -> torch.Tensor:
    """The layer's output for x [B, T, hidden], fed in chunks through its own cache.

    `angles` gives the cosines and sines of positions [B, T], by default those of layers that read
    their window only; `first` is the position of the first token.
    """
    rotary = DeepseekV4RotaryEmbedding(config)
    if angles is None:
        angles = functools.partial(rotary, x, layer_type="main")
    cache, outputs, start = DynamicCache(config=config), [], 0
    for size in chunks:
        queries = torch.arange(start, start + size)
        keys = torch.arange(max(start - config.sliding_window + 1, 0), start + size)
        distance = queries[:, None] - keys[None, :]
        hidden = (distance < 0) | (distance >= config.sliding_window)
        mask = torch.zeros(distance.shape, dtype=x.dtype)
        mask = mask.masked_fill(hidden, float("-inf"))[None, None]
        positions = first + queries[None].expand(len(x), -1)
        chunk, turns = x[:, start : start + size], {"main": angles(positions)}
        outputs.append(layer(chunk, turns, positions, mask, cache=cache)[0])
        start += size
    return torch.cat(outputs, dim=1)


def run_in_float64(config, layer, x: torch.Tensor, frequencies=None, first=0) -> np.ndarray:
    """The same from the maths: no cache, and complex numbers for the rotations.

    The rotary frequencies are powers of `rope_theta` unless given.
    """
    weights = {name: value.detach().double().numpy() for name, value in layer.named_parameters()}
    x = x.double().numpy()
    batch, tokens, _ = x.shape
    heads, width, rotated = config.num_attention_heads, config.head_dim, config.qk_rope_head_dim
    if frequencies is None:
        frequencies = config.rope_theta ** (-np.arange(0, rotated, 2) / rotated)
    turns = np.exp(1j * (first + np.arange(tokens))[:, None] * frequencies)

    def norm(values):
        return values / np.sqrt(np.mean(values**2, -1, keepdims=True) + config.rms_norm_eps)

    def rotate(values, turns):
        pairs = values[..., width - rotated :].reshape(*values.shape[:-1], rotated // 2, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turns
        tail = np.stack([turned.real, turned.imag], -1).reshape(*values.shape[:-1], rotated)
        return np.concatenate([values[..., : width - rotated], tail], -1)

    query = norm(x @ weights["q_a_proj.weight"].T) * weights["q_a_norm.weight"]
    query = norm((query @ weights["q_b_proj.weight"].T).reshape(batch, tokens, heads, width))
    query = rotate(query, turns[:, None])
    row = rotate(norm(x @ weights["kv_proj.weight"].T) * weights["kv_norm.weight"], turns)
    distance = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    visible = (distance >= 0) & (distance < config.sliding_window)
    scores = np.einsum("bthd,bsd->bhts", query, row) * width**-0.5
    mass = np.exp(np.where(visible, scores, -np.inf))  # scores of normed values: no overflow
    total = mass.sum(-1, keepdims=True) + np.exp(weights["sinks"])[:, None, None]
    out = rotate(np.einsum("bhts,bsd->bthd", mass / total, row), turns.conj()[:, None])
    groups = out.reshape(batch, tokens, config.o_groups, -1)
    o_a = weights["o_a_proj.weight"].reshape(config.o_groups, config.o_lora_rank, -1)
    low_rank = np.einsum("btgd,grd->btgr", groups, o_a).reshape(batch, tokens, -1)
    return low_rank @ weights["o_b_proj.weight"].T


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=Path(__file__).with_name("window_layer.npz"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = make_config()
    layer = make_layer(config)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, TOKENS, config.hidden_size, generator=generator)
    y64 = run_in_float64(config, layer, x)
    y = run(config, layer, x, [TOKENS])
    for chunks in ([TOKENS], [1] * TOKENS, [5, 1, 3, 8, 2, 5, 1, 3, 8, 2, 2]):
        difference = np.abs(run(config, layer, x, chunks).double().numpy() - y64).max()
        if difference > 2e-6 * np.abs(y64).max():
            raise SystemExit(f"chunks {chunks}: off by {difference} from the float64 result")
    weights = {f"p_{name}": value.detach().numpy() for name, value in layer.named_parameters()}
    fields = json.dumps({name: getattr(config, name) for name in FIELDS})
    np.savez(arguments.out, x=x.numpy(), y=y.numpy(), y64=y64, cfg=fields, **weights)


if __name__ == "__main__":
    main()

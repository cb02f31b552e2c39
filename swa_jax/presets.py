"""Attention of published models, as configurations: DeepSeek-V4-Flash, V4-Pro and V4.1-Flash.

The figures are those of the models' configuration files. A decoder made of a preset has their
attention and their widths; what else they have is no part of this library: residual streams mixed
by hyper-connections, routed experts (the SwiGLU here is as wide as the experts of one token), and
what makes and selects compressed keys, which layers take as `extra`.
"""

import dataclasses

from pallas_kernels import V4, V41, V41_FP4, KVCacheFormat
from swa_jax.config import AttentionConfig, DecoderConfig
from swa_jax.rotary import YarnScaling

COMPRESSED_ROPE_THETA = 160000.0
YARN = YarnScaling(factor=16.0, original_max_positions=65536, beta_fast=32.0, beta_slow=1.0)

_V4_FLASH = AttentionConfig(
    hidden_size=4096,
    num_heads=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    norm_eps=1e-6,
    query_norm=True,
    fmt=V4,
    scale_floor="amax",
    dtype="bfloat16",
    param_dtype="bfloat16",
)
_V4_PRO = dataclasses.replace(
    _V4_FLASH, hidden_size=7168, num_heads=128, q_lora_rank=1536, o_groups=16
)
_V41_FLASH = dataclasses.replace(
    _V4_FLASH, hidden_size=5120, q_lora_rank=1280, norm_eps=1e-20, query_norm=False, fmt=V41
)


def v4_flash() -> DecoderConfig:
    """DeepSeek-V4-Flash: 43 layers of 64 heads, the first two with their window only."""
    return _decoder(_V4_FLASH, V4, window_only=2, num_layers=43, expert_size=2048)


def v4_pro() -> DecoderConfig:
    """DeepSeek-V4-Pro: 61 layers of 128 heads, each with a compressed cache."""
    return _decoder(_V4_PRO, V4, window_only=0, num_layers=61, expert_size=3072)


def v41_flash() -> DecoderConfig:
    """DeepSeek-V4.1-Flash: 40 layers of 64 heads, the first two with their window only.

    Its queries are not normalised, its rows are 528 bytes, those of the compressed cache 288.
    """
    return _decoder(_V41_FLASH, V41_FP4, window_only=2, num_layers=40, expert_size=2304)


PRESETS = {"v4-flash": v4_flash, "v4-pro": v4_pro, "v41-flash": v41_flash}


def look_alike(config: DecoderConfig) -> DecoderConfig:
    """A decoder of the same kind that is small enough for a test.

    Norms, rotation, row formats, kinds of layers and the experts' scoring stay; widths, window and
    numbers of layers, heads, experts and tokens shrink, and it computes in float32.

    Args:
      config: a preset, or another decoder whose rotation and formats fit rows of 128 values.

    Returns:
      Its first four layers, narrow: 4 heads of 128 values, a window of 16.
    """

    def shrink(layer: AttentionConfig) -> AttentionConfig:
        extra = layer.extra_fmt
        return dataclasses.replace(
            layer,
            hidden_size=64,
            num_heads=4,
            head_dim=128,
            q_lora_rank=32,
            o_groups=2,
            o_lora_rank=16,
            window=16,
            fmt=layer.fmt.with_width(128),
            extra_fmt=None if extra is None else extra.with_width(128),
            dtype="float32",
            param_dtype="float32",
        )

    layers = tuple(shrink(layer) for layer in config.layers[:4])
    experts = config.experts
    if experts is not None:
        chosen = min(experts.top_k, 2)
        shared = 32 if experts.shared_size else 0
        experts = dataclasses.replace(
            experts, num_experts=8, top_k=chosen, expert_size=32, shared_size=shared
        )
    return DecoderConfig(
        vocab_size=256,
        num_layers=len(layers),
        attention=layers,
        mlp_size=128 if experts is None else 0,
        scan_layers=config.scan_layers,
        experts=experts,
    )


def _decoder(
    window: AttentionConfig,
    extra_fmt: KVCacheFormat,
    *,
    window_only: int,
    num_layers: int,
    expert_size: int,
) -> DecoderConfig:
    """Layers with their window only, then those with a compressed cache too."""
    compressed = dataclasses.replace(
        window, rope_theta=COMPRESSED_ROPE_THETA, rope_scaling=YARN, extra_fmt=extra_fmt
    )
    return DecoderConfig(
        vocab_size=129280,
        num_layers=num_layers,
        attention=(window,) * window_only + (compressed,) * (num_layers - window_only),
        mlp_size=(6 + 1) * expert_size,  # six routed experts and the shared one
    )

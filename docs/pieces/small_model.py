"""A decoder of two narrow layers, with random weights."""

import flax.linen as nn
import jax
import jax.numpy as jnp

import swa_jax as swa

attention = swa.AttentionConfig(
    hidden_size=64,
    num_heads=2,
    head_dim=64,
    rope_dim=16,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=16,
    window=16,
    fmt=swa.V41.with_width(64),
)
config = swa.DecoderConfig(vocab_size=256, num_layers=2, attention=attention, mlp_size=128)
model = swa.Decoder(config)
params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32)))

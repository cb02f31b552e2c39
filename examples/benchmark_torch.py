"""Peers in PyTorch: attention over gathered rows, and the layer of Hugging Face transformers.

Whoever imports this module has PyTorch, see `benchmark_settings.Settings.torch`.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

# Else PyTorch's threads spin for a while after each of its calls, on cores that the next program
# needs, and wait for each other so where a core is busy. Read when PyTorch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
from benchmark_clock import Program

import swa_jax as swa


def tensor(array: Any) -> torch.Tensor:
    """A copy of an array as a tensor: PyTorch warns of arrays that must not be written to."""
    return torch.from_numpy(np.array(array))


def torch_program(name: str, function: Callable[..., Any], *arguments: torch.Tensor) -> Program:
    """A function of tensors as a program, without gradients and uncompiled."""

    def run() -> None:
        with torch.inference_mode():
            function(*arguments)

    return Program(name, run)


def read_programs(q, data, ring, visible, indices) -> list[Program]:
    """Attention over rings of numbers, over their gathered rows, and over gathered rows of bytes.

    Args:
      q: float32[n, H, D].
      data: uint8[n * S, row_bytes].
      ring: float32[n, S, D], the numbers that the bytes stand for.
      visible: bool[n, S], the rows of the window.
      indices: int32[n, W], the same rows, 0 or more.
    """
    q, data, ring, visible, indices = map(tensor, (q, data, ring, visible, indices))
    return [
        torch_program("torch, float32 ring", ring_read, q, ring, visible),
        torch_program("torch, float32 rows gathered", gathered_read, q, ring, indices),
        torch_program("torch, same bytes", byte_read, q, data, indices),
    ]


def ring_read(q: torch.Tensor, ring: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """scaled_dot_product_attention over whole rings under a mask; it knows no sink.

    The heads stand where it expects a sequence of queries: over one key that all heads share it is
    fastest so.

    Args:
      q: float32[n, H, D].
      ring: float32[n, S, D], key and value at once.
      visible: bool[n, S].

    Returns:
      float32[n, H, D].
    """
    return _attention(q, ring, visible[:, None, None])


def gathered_read(q: torch.Tensor, ring: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The same over the rows that indices name, gathered.

    Args:
      q: float32[n, H, D].
      ring: float32[n, S, D], key and value at once.
      indices: int32[n, W], 0 or more.

    Returns:
      float32[n, H, D].
    """
    return _attention(q, _gather(ring.flatten(0, 1), indices))


def byte_read(q: torch.Tensor, data: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Attention over gathered rows of e4m3 codes and ue8m0 scales for 32 values each.

    Args:
      q: float32[n, H, D].
      data: uint8[rows, row_bytes].
      indices: int32[n, W], 0 or more.

    Returns:
      float32[n, H, D].
    """
    rows, width = _gather(data, indices), q.shape[-1]
    codes = rows[..., :width].view(torch.float8_e4m3fn).float()
    scales = torch.exp2(rows[..., width:].float() - 127)
    return _attention(q, (codes.unflatten(-1, (-1, 32)) * scales[..., None]).flatten(-2))


def _gather(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return rows.index_select(0, indices.flatten()).unflatten(0, indices.shape)


def _attention(q: torch.Tensor, rows: torch.Tensor, visible: Any = None) -> torch.Tensor:
    key = rows[:, None]
    return F.scaled_dot_product_attention(q[:, None], key, key, attn_mask=visible)[:, 0]


class HuggingFaceLayer:
    """DeepseekV4Attention of transformers with eager attention, and its sliding cache.

    Only eager attention: the other implementations leave the sinks out.
    """

    def __init__(
        self, params: Mapping[str, Any], config: swa.AttentionConfig, past: Any, position: int
    ):
        """Copies the parameters.

        Args:
          params: of `swa_jax.attention.attention_layer`.
          config: theirs, float32, with plain rotary frequencies.
          past: float32[n, W - 1, D], rows before the token: normalised and rotated.
          position: the token's.
        """
        from transformers import DynamicCache  # pyright: ignore[reportMissingImports]
        from transformers.models.deepseek_v4 import (  # pyright: ignore[reportMissingImports]
            modeling_deepseek_v4 as model,
        )

        sizes = _hugging_face_config(config)
        with torch.device("meta"):
            self.layer = model.DeepseekV4Attention(sizes, 0).eval()
        rank = config.q_lora_rank
        tensors = {
            "q_a_proj.weight": params["q_a_kv"][:rank],
            "kv_proj.weight": params["q_a_kv"][rank:],
            "q_b_proj.weight": params["q_b"],
            "o_a_proj.weight": params["o_a"],
            "o_b_proj.weight": params["o_b"],
            "q_a_norm.weight": params["q_a_norm"],
            "kv_norm.weight": params["kv_norm"],
            "sinks": params["sinks"],
        }
        tensors = {name: tensor(value) for name, value in tensors.items()}
        self.layer.load_state_dict(tensors, assign=True)
        rows = tensor(past)[:, None]
        # Once it holds W - 1 rows it keeps that many: a call appends one and drops the oldest.
        self.cache = DynamicCache(config=sizes)
        self.cache.update(rows, rows, 0)
        self.positions = torch.full((len(rows), 1), position)
        rotary = model.DeepseekV4RotaryEmbedding(sizes)
        # A model makes the angles once for all layers: they are not the layer's work.
        self.angles = {"main": rotary(rows, position_ids=self.positions, layer_type="main")}

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output for one token of each request.

        Args:
          x: float32[n, 1, hidden].
        """
        return self.layer(x, self.angles, self.positions, None, cache=self.cache)[0]

    def program(self, x: Any) -> Program:
        """The step as a program.

        Args:
          x: float32[n, 1, hidden].
        """
        return torch_program("Hugging Face, eager", self.step, tensor(x))


def _hugging_face_config(config: swa.AttentionConfig):
    from transformers.models.deepseek_v4 import (  # pyright: ignore[reportMissingImports]
        DeepseekV4Config,
    )

    sizes = DeepseekV4Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        partial_rotary_factor=config.rope_dim / config.head_dim,
        q_lora_rank=config.q_lora_rank,
        o_groups=config.o_groups,
        o_lora_rank=config.o_lora_rank,
        sliding_window=config.window,
        rope_theta=config.rope_theta,
        rms_norm_eps=config.norm_eps,
        num_hidden_layers=1,
        layer_types=["sliding_attention"],
        mlp_layer_types=["moe"],
    )
    sizes._attn_implementation = "eager"
    return sizes

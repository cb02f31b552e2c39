"""Makes quantised_rows.npz; needs PyTorch, so run it in an environment of its own (torch 2.13.0).

The 528-byte rows of DeepSeek-V4.1 by torch's own float8_e4m3fn and float8_e8m0fnu, once with the
floor of DeepSeek's published inference code (`act_quant`: amax is 1e-4 at least) and once with that
of FlashMLA's tests/quant.py (amax / 448 is 1e-4 at least). The tests read the result only.
"""

from pathlib import Path

import numpy as np
import torch

WIDTH = 512
GROUP = 32
ROWS = 64
E4M3_MAX = 448.0
FLOOR = 1e-4


def next_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below a positive float32, from its bits."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) > 0).int()
    return (exponent << 23).view(torch.float32)


def deepseek_scale(amax: torch.Tensor) -> torch.Tensor:
    return next_power_of_two(amax.clamp_min(FLOOR) * (1.0 / E4M3_MAX))


def flashmla_scale(amax: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2((amax / E4M3_MAX).clamp_min(FLOOR))))


def quantize(x: torch.Tensor, scale_of) -> torch.Tensor:
    """The row's bytes: e4m3 codes, then one scale byte for each group."""
    groups = x.reshape(-1, WIDTH // GROUP, GROUP)
    scale = scale_of(groups.abs().amax(dim=-1))
    scaled = (groups / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    codes = scaled.to(torch.float8_e4m3fn).reshape(-1, WIDTH)
    return torch.cat(
        [codes.view(torch.uint8), scale.to(torch.float8_e8m0fnu).view(torch.uint8)], dim=-1
    )


def dequantize(data: torch.Tensor) -> torch.Tensor:
    """The float32 values of the row's bytes."""
    codes = data[:, :WIDTH].contiguous().view(torch.float8_e4m3fn).float()
    scale = data[:, WIDTH:].contiguous().view(torch.float8_e8m0fnu).float()
    return (codes.reshape(-1, WIDTH // GROUP, GROUP) * scale[..., None]).reshape(-1, WIDTH)


def sample_rows() -> torch.Tensor:
    """Normal rows, and small, tiny, zero, large, boundary, spiked and mixed ones; all bfloat16."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    x[1] *= 1e-3
    x[2] *= 1e-6
    x[3] = 0
    x[4] *= 1e3
    x[5] = E4M3_MAX
    x[6] = E4M3_MAX * 2**-7
    x[7] = torch.nextafter(torch.tensor(E4M3_MAX), torch.tensor(1e9))
    x[8, ::GROUP] = 60000.0
    x[9] = torch.randn(WIDTH) * 2.0 ** torch.randint(-12, 8, (WIDTH,)).float()
    return x.to(torch.bfloat16).float()


if __name__ == "__main__":
    rows = sample_rows()
    reference = quantize(rows, deepseek_scale)
    np.savez(
        Path(__file__).with_name("quantised_rows.npz"),
        x=rows.numpy(),
        bytes_reference=reference.numpy(),
        bytes_flashmla=quantize(rows, flashmla_scale).numpy(),
        dequant_reference=dequantize(reference).numpy(),
    )

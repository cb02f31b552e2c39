"""Makes fp4_rows.npz; needs PyTorch, so run it in an environment of its own (torch 2.13.0).

The 288-byte rows of DeepSeek-V4.1's compressed cache: 512 e2m1 values in 256 bytes, the even one of
a pair in the low nibble, then 32 e4m3 scales, a sixth of the largest magnitude of 16 values and
2**-9 at least; all to nearest, ties to even, and saturating.

- `x` bfloat16 bits [rows, 512], `bytes` uint8 [rows, 288], and `values` bfloat16 bits [rows, 512],
  what the bytes stand for;
- `stored` uint8 [tokens, 288]: the rows of `latents(0, positions)` of row_inputs.py, normalised,
  weighted, rotated and cast to bfloat16 before they are quantised.

Scales are cast by torch, values by a search among the codes in exact arithmetic. Before it writes,
it checks that decoded values are off by half the widest step at most, or saturated.

    python make_fp4_rows.py [--out fp4_rows.npz]
"""

import argparse
from fractions import Fraction
from pathlib import Path

import numpy as np
import row_inputs
import torch
from row_inputs import HALF, WIDTH

GROUP, TOKENS = 16, 12
MAGNITUDES = [Fraction(number, 2) for number in (0, 1, 2, 3, 4, 6, 8, 12)]
MIDDLES = [(a + b) / 2 for a, b in zip(MAGNITUDES[:-1], MAGNITUDES[1:], strict=True)]
POSITIVE_SCALES = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def scale_of(amax: torch.Tensor) -> torch.Tensor:
    return (amax.double() / 6).clamp(2.0**-9, 448.0).float().to(torch.float8_e4m3fn)


def code_of(magnitude: Fraction) -> int:
    """The nearest of the eight magnitudes; of two as near, the one with the even code."""
    distances = [abs(magnitude - other) for other in MAGNITUDES]
    nearest = [code for code, distance in enumerate(distances) if distance == min(distances)]
    return next(code for code in nearest if len(nearest) == 1 or code % 2 == 0)


def quantize(x: torch.Tensor) -> np.ndarray:
    """The bytes of bfloat16 rows."""
    groups = x.double().reshape(len(x), -1, GROUP)
    scales = scale_of(groups.abs().amax(-1))
    codes = np.empty(groups.shape, np.uint8)
    for index in np.ndindex(*groups.shape):
        value, scale = Fraction(groups[index].item()), Fraction(scales[index[:2]].double().item())
        codes[index] = code_of(abs(value) / scale) + 8 * bool(torch.signbit(groups[index]))
    codes = codes.reshape(len(x), -1)
    return np.concatenate([codes[:, ::2] + 16 * codes[:, 1::2], scales.view(torch.uint8)], 1)


def dequantize(data: np.ndarray) -> torch.Tensor:
    codes = np.stack([data[:, : WIDTH // 2] % 16, data[:, : WIDTH // 2] // 16], -1)
    codes = codes.reshape(len(data), -1)
    numbers = torch.tensor([float(m) for m in MAGNITUDES] + [-float(m) for m in MAGNITUDES])
    scales = torch.from_numpy(data[:, WIDTH // 2 :].copy()).view(torch.float8_e4m3fn).float()
    return numbers[torch.from_numpy(codes).long()] * scales.repeat_interleave(GROUP, -1)


def sample_rows() -> torch.Tensor:
    """bfloat16 rows: many sizes, and all that lies on a boundary, with its neighbours."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(6, WIDTH, generator=generator, dtype=torch.float64)]
    rows[0] *= torch.tensor([1.0, 1e-3, 1e-6, 1e3, 1e30, 1.0])[:, None]
    sizes = torch.randint(-14, 12, (2, WIDTH // GROUP), generator=generator)
    mixed = torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)
    rows.append(mixed * torch.exp2(sizes.double()).repeat_interleave(GROUP, -1))
    # A group for each scale: its largest magnitude, then all middles between two codes.
    middles = torch.tensor([6.0] + [float(middle) for middle in MIDDLES] * 2 + [0.0])
    middles[8:] *= -1
    ties = POSITIVE_SCALES[:, None] * middles
    # A group for each tie between two scales: its largest magnitude alone.
    between = (POSITIVE_SCALES[1:] + POSITIVE_SCALES[:-1]) / 2
    scale_ties = between[:, None] * torch.tensor([-6.0] + [0.75, 1.5, -5.0] * 5)
    groups = torch.cat([ties, torch.zeros(2, GROUP), scale_ties, torch.zeros(3, GROUP)])
    boundaries = groups.reshape(-1, WIDTH).to(torch.bfloat16)
    for direction in (-torch.inf, torch.inf):
        near = torch.nextafter(boundaries, torch.full_like(boundaries, direction))
        near[boundaries == 0] = -0.0 if direction < 0 else 0.0
        rows.append(near)
    rows.append(boundaries)
    rows.append(
        torch.tensor([[0.0], [-0.0], [3e38], [2688.0], [2**-9 * 6], [2**-10]]).expand(6, WIDTH)
    )
    return torch.cat([row.to(torch.bfloat16) for row in rows])


def stored_rows() -> torch.Tensor:
    positions = np.arange(TOKENS)
    x = torch.from_numpy(row_inputs.latents(0, positions)).double()
    x = x / x.square().mean(-1, keepdim=True).sqrt() * torch.from_numpy(row_inputs.norm_weight())
    cos, sin = (torch.from_numpy(part).double() for part in row_inputs.rotation(positions))
    a, b = x[:, -2 * HALF :: 2].clone(), x[:, 1 - 2 * HALF :: 2].clone()
    x[:, -2 * HALF :: 2], x[:, 1 - 2 * HALF :: 2] = a * cos - b * sin, a * sin + b * cos
    return x.to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=Path(__file__).with_name("fp4_rows.npz"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x = sample_rows()
    data = quantize(x)
    values = dequantize(data)
    scales = torch.from_numpy(data[:, WIDTH // 2 :].copy()).view(torch.float8_e4m3fn).float()
    error = (values - x.float()).abs() / scales.repeat_interleave(GROUP, -1)
    saturated = x.float().abs() > 6 * scales.repeat_interleave(GROUP, -1)
    if error[~saturated].max() > 1 or not torch.equal(values.to(torch.bfloat16).float(), values):
        raise SystemExit("a decoded value is off by more than half a step, or is no bfloat16")
    print(f"{len(x)} rows, scale codes", np.unique(data[:, WIDTH // 2 :]).size)
    np.savez_compressed(
        arguments.out,
        x=x.view(torch.uint16).numpy(),
        bytes=data,
        values=values.to(torch.bfloat16).view(torch.uint16).numpy(),
        stored=quantize(stored_rows()),
    )


if __name__ == "__main__":
    main()

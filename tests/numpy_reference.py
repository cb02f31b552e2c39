"""Rows, transforms and attention in numpy, written from their rules: what the tests compare with.

Nothing here is shared with the library: number formats are those of ml_dtypes, powers of two are
found by comparison, and sums are float64.
"""

import ml_dtypes
import numpy as np

E4M3_MAX = 448
E2M1_MAX = 6
# A larger finite value would decode to infinity: 255 * 2**120 rounds to 256 * 2**120.
LARGEST_QUANTIZED = np.float32(240 * 2.0**120)


def float32_of_bits(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def to_bfloat16(x):
    """float32 values rounded to the nearest bfloat16."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def e4m3_codes(x):
    """Nearest-even codes of finite float32 values; saturates, where ml_dtypes alone gives NaN."""
    clipped = np.clip(np.asarray(x, np.float32), -E4M3_MAX, E4M3_MAX)
    return clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def e4m3_values(codes):
    return np.asarray(codes, np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def e2m1_codes(x):
    clipped = np.clip(np.asarray(x, np.float32), -E2M1_MAX, E2M1_MAX)
    return clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF


def e2m1_values(codes):
    return np.asarray(codes, np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def scale_codes(amax):
    """127 + k for the smallest k with amax <= 448 * 2**k, found by trying."""
    amax = np.maximum(np.asarray(amax, np.float64), 2.0**-149)
    k = np.frexp(amax)[1] - 11
    for _ in range(3):
        k += amax > np.ldexp(448.0, k)
    return 127 + k


def quantize(x, fmt, scale_floor="amax"):
    """The bytes of float32 rows [n, elements], by the rules of the formats."""
    x = np.asarray(x, np.float32)
    n = len(x)
    finite = np.isfinite(x).all(axis=1, keepdims=True)
    x = np.where(finite, x, np.float32(0))
    parts, nan = [], []
    scales = nan_scales = np.empty((n, 0), np.uint8)
    if fmt.raw_dtype != "float32":
        x = to_bfloat16(np.clip(x, -LARGEST_QUANTIZED, LARGEST_QUANTIZED))
    if fmt.quantized_dtype is not None:
        groups = x[:, : fmt.quantized_elements].reshape(n, -1, fmt.elements_per_scale)
        amax = np.abs(groups).max(axis=2)
        floor = np.float32(1e-4)
        if fmt.scale_dtype == "ue8m0":
            # The floor of the scale is a power of two: 2**-13 is the first above 1e-4.
            least = scale_codes(1e-4) if scale_floor == "amax" else 127 - 13
            scales = np.maximum(scale_codes(amax), least).astype(np.uint8)
            scale = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
            nan_scales = np.full_like(scales, 0xFF)
        elif fmt.scale_dtype == "float32":
            if scale_floor == "amax":
                scale = np.maximum(amax, floor) / np.float32(E4M3_MAX)
            else:
                scale = np.maximum(amax / np.float32(E4M3_MAX), floor)
            scales = scale.view(np.uint8)
            nan_scales = np.full_like(scale, float32_of_bits(0x7FC00000)).view(np.uint8)
        else:
            scales = e4m3_codes(np.maximum(amax / np.float32(E2M1_MAX), np.float32(2.0**-9)))
            scale = e4m3_values(scales)
            nan_scales = np.full_like(scales, 0x7F)
        scaled = (groups / scale[:, :, None]).reshape(n, -1)
        if fmt.quantized_dtype == "e4m3":
            data = e4m3_codes(scaled)
        else:
            pairs = e2m1_codes(scaled).reshape(n, -1, 2)
            data = pairs[:, :, 0] | pairs[:, :, 1] << 4
        parts.append(data)
        nan.append(np.full_like(data, 0x7F))
    raw = x[:, fmt.quantized_elements :]
    if fmt.raw_dtype == "bfloat16":
        raw, nan_raw = raw.astype(ml_dtypes.bfloat16).view(np.uint8), [0xC0, 0x7F]
    elif fmt.raw_dtype == "float32":
        raw, nan_raw = np.ascontiguousarray(raw).view(np.uint8), [0, 0, 0xC0, 0x7F]
    else:
        raw, nan_raw = np.empty((n, 0), np.uint8), [0]
    nan_raw = np.resize(np.asarray(nan_raw, np.uint8), raw.shape)
    pad = np.zeros((n, fmt.pad_bytes), np.uint8)
    if fmt.scales_last:
        parts, nan = [*parts, raw, scales, pad], [*nan, nan_raw, nan_scales, pad]
    else:
        parts, nan = [*parts, scales, raw, pad], [*nan, nan_scales, nan_raw, pad]
    return np.where(finite, np.concatenate(parts, axis=1), np.concatenate(nan, axis=1))


def dequantize(data, fmt):
    """The float64 numbers that bytes [n, row_bytes] stand for."""
    data = np.asarray(data, np.uint8)
    n = len(data)
    raw_bytes = fmt.raw_elements * {None: 0, "bfloat16": 2, "float32": 4}[fmt.raw_dtype]
    sizes = [fmt.data_bytes - raw_bytes, raw_bytes, fmt.scale_bytes]
    if not fmt.scales_last:
        sizes = [sizes[0], sizes[2], sizes[1]]
    quantized, raw, scales, _ = np.split(data, np.cumsum(sizes), axis=1)
    if not fmt.scales_last:
        raw, scales = scales, raw
    raw, scales = np.ascontiguousarray(raw), np.ascontiguousarray(scales)
    values = []
    if fmt.quantized_dtype is not None:
        if fmt.quantized_dtype == "e4m3":
            numbers = e4m3_values(quantized)
        else:
            numbers = e2m1_values(np.stack([quantized & 0xF, quantized >> 4], axis=2))
        if fmt.scale_dtype == "ue8m0":
            scale = scales.view(ml_dtypes.float8_e8m0fnu)
        elif fmt.scale_dtype == "float32":
            scale = scales.view(np.float32)
        else:
            scale = scales.view(ml_dtypes.float8_e4m3fn)
        groups = numbers.astype(np.float64).reshape(n, -1, fmt.elements_per_scale)
        values.append((groups * scale.astype(np.float64)[:, :, None]).reshape(n, -1))
    if fmt.raw_dtype is not None:
        dtype = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}[fmt.raw_dtype]
        values.append(raw.view(dtype).astype(np.float64))
    return np.concatenate(values, axis=1)


def norm(x, weight, eps):
    x = np.asarray(x, np.float64)
    x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return x if weight is None else x * np.asarray(weight, np.float64)


def rotate(x, angles, pairing):
    """The last 2 * half values as complex numbers, times exp(i * angle)."""
    x = np.array(x, np.float64)
    half = angles.shape[-1]
    tail = x[..., x.shape[-1] - 2 * half :]
    real, imaginary = (
        (slice(0, None, 2), slice(1, None, 2))
        if pairing == "interleaved"
        else (slice(0, half), slice(half, None))
    )
    turned = (tail[..., real] + 1j * tail[..., imaginary]) * np.exp(1j * angles)
    tail[..., real], tail[..., imaginary] = turned.real, turned.imag
    return x


def hadamard_matrix(width):
    """Sylvester's matrix over sqrt(width): the sign is the parity of the indices' common bits."""
    common = np.arange(width)[:, None] & np.arange(width)[None, :]
    return (1.0 - 2.0 * (np.bitwise_count(common) & 1)) / np.sqrt(width)


def attention(q, caches, sink=None, scale=None):
    """Attention of each query, one after the other, with a loop over what it may see.

    Args:
      q: [n, h, d].
      caches: for each cache its values [rows, d], indices [n, k] and lengths [n] or None.
      sink: [h] or None.
      scale: of the scores.

    Returns:
      float64 out [n, h, d] and lse [n, h].
    """
    q = np.asarray(q, np.float64)
    n, heads, width = q.shape
    scale = width**-0.5 if scale is None else scale
    sink = np.full(heads, -np.inf) if sink is None else np.asarray(sink, np.float64)
    out, lse = np.zeros((n, heads, width)), np.full((n, heads), -np.inf)
    for t in range(n):
        seen = [
            values[index]
            for values, indices, lengths in caches
            for column, index in enumerate(np.asarray(indices)[t].tolist())
            if 0 <= index < len(values) and (lengths is None or column < lengths[t])
        ]
        if not seen:
            continue
        seen = np.asarray(seen, np.float64)
        scores = scale * q[t] @ seen.T
        peak = scores.max(axis=1)
        lse[t] = peak + np.log(np.exp(scores - peak[:, None]).sum(axis=1))
        for head in range(heads):
            if sink[head] == np.inf:
                continue
            denominator = np.logaddexp(lse[t, head], sink[head])
            out[t, head] = np.exp(scores[head] - denominator) @ seen
    return out, lse

"""Row formats of a shared key/value cache: what the bytes of one token's row mean."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, UInt8

from pallas_kernels import checks, codec

ScaleFloor = Literal["amax", "scale"]
SCALE_FLOORS = ("amax", "scale")

# Floor of a group: the model's own code bounds amax, FlashMLA and vLLM bound the scale.
_FLOOR = 1e-4
# Both become a smallest exponent byte: ceil(log2(.)) is monotone, so it commutes with the maximum.
SMALLEST_UE8M0 = {
    "amax": 127 + math.ceil(math.log2(_FLOOR / codec.E4M3_MAX)),
    "scale": 127 + math.ceil(math.log2(_FLOOR)),
}
FP4_SCALE_FLOOR = 2.0**-9  # the smallest positive e4m3 number

_SCALE_BYTES = {"ue8m0": 1, "e4m3": 1, "float32": 4}
_RAW_BYTES = {"bfloat16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class KVCacheFormat:
    """How one token's row is laid out in bytes.

    A row holds quantised values with one scale per group, raw values, or both. The order of the
    parts is data, raw, scales, pad (`scales_last`) or data, scales, raw, pad.

    Attributes:
      name: short name, for messages and saved files.
      quantized_dtype: "e4m3", "e2m1" (two values a byte, the low nibble first) or None.
      quantized_elements: number of quantised values; they are the first of the row.
      elements_per_scale: values that share a scale.
      scale_dtype: "ue8m0" (power of two, biased exponent byte), "float32", "e4m3" or None.
      raw_elements: number of values stored as they are, after the quantised ones.
      raw_dtype: "bfloat16", "float32" or None.
      scales_last: whether the scales stand after the raw values.
      pad_bytes: unused bytes at the end of the row, written as 0.
      token_interleaved: True if a token's scales follow its data; False for a page layout that
        keeps the scales of all the page's tokens after all their data.
      note: what the format is for.
    """

    name: str
    quantized_dtype: Literal["e4m3", "e2m1"] | None = None
    quantized_elements: int = 0
    elements_per_scale: int = 0
    scale_dtype: Literal["ue8m0", "float32", "e4m3"] | None = None
    raw_elements: int = 0
    raw_dtype: Literal["bfloat16", "float32"] | None = None
    scales_last: bool = True
    pad_bytes: int = 0
    token_interleaved: bool = True
    note: str = dataclasses.field(default="", compare=False)

    def __post_init__(self):
        for field in ("name", "note"):
            if not isinstance(getattr(self, field), str):
                raise ValueError(f"{field}: expected a string, got {getattr(self, field)!r}")
        for field in ("scales_last", "token_interleaved"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field}: expected True or False, got {getattr(self, field)!r}")
        for field in ("quantized_elements", "elements_per_scale", "raw_elements", "pad_bytes"):
            checks.check_integer(field, getattr(self, field), 0)
        checks.check_choice("quantized_dtype", self.quantized_dtype, ("e4m3", "e2m1", None))
        checks.check_choice("scale_dtype", self.scale_dtype, (*_SCALE_BYTES, None))
        checks.check_choice("raw_dtype", self.raw_dtype, (*_RAW_BYTES, None))
        quantized = self.quantized_elements > 0
        if quantized != (self.quantized_dtype is not None):
            raise ValueError(
                f"quantized_dtype: expected it exactly when there are quantised values, got "
                f"{self.quantized_dtype!r} for {self.quantized_elements} values"
            )
        if quantized != (self.scale_dtype is not None):
            raise ValueError(
                f"scale_dtype: expected it exactly when there are quantised values, got "
                f"{self.scale_dtype!r} for {self.quantized_elements} values"
            )
        if (self.quantized_dtype == "e2m1") != (self.scale_dtype == "e4m3"):
            raise ValueError(
                f"scale_dtype: expected e4m3 scales for e2m1 values and no others, got "
                f"{self.scale_dtype!r} for {self.quantized_dtype!r}"
            )
        if (self.raw_elements > 0) != (self.raw_dtype is not None):
            raise ValueError(
                f"raw_dtype: expected it exactly when there are raw values, got "
                f"{self.raw_dtype!r} for {self.raw_elements} values"
            )
        if quantized and (
            self.elements_per_scale == 0 or self.quantized_elements % self.elements_per_scale
        ):
            raise ValueError(
                f"quantized_elements: expected a multiple of elements_per_scale "
                f"{self.elements_per_scale}, got {self.quantized_elements}"
            )
        if self.quantized_dtype == "e2m1" and self.quantized_elements % 2:
            raise ValueError(
                f"quantized_elements: expected an even number for e2m1 pairs, got "
                f"{self.quantized_elements}"
            )
        if self.num_elements == 0:
            raise ValueError("num_elements: expected at least one value in a row, got 0")

    @property
    def num_elements(self) -> int:
        """Values in a row."""
        return self.quantized_elements + self.raw_elements

    @property
    def data_bytes(self) -> int:
        """Bytes of the values, quantised and raw."""
        return self.quantized_bytes + self.raw_elements * _RAW_BYTES.get(self.raw_dtype or "", 0)

    @property
    def quantized_bytes(self) -> int:
        """Bytes of the quantised values."""
        return self.quantized_elements // (2 if self.quantized_dtype == "e2m1" else 1)

    @property
    def num_scales(self) -> int:
        """Scales in a row."""
        return self.quantized_elements // self.elements_per_scale if self.scale_dtype else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales."""
        return self.num_scales * _SCALE_BYTES[self.scale_dtype] if self.scale_dtype else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: data, scales and pad."""
        return self.data_bytes + self.scale_bytes + self.pad_bytes

    def with_width(self, num_elements: int) -> "KVCacheFormat":
        """The same format for rows of another width.

        Args:
          num_elements: values in a row. The raw tail of a mixed format keeps its size.

        Returns:
          The format; V41 at width n has n + n / 32 bytes.

        Raises:
          ValueError: the width is no integer or does not fit the groups.
        """
        checks.check_integer("num_elements", num_elements, 0)
        if self.quantized_dtype is None:
            return dataclasses.replace(self, raw_elements=num_elements)
        quantized = num_elements - self.raw_elements
        if quantized <= 0 or quantized % self.elements_per_scale:
            tail = f" plus {self.raw_elements}" if self.raw_elements else ""
            raise ValueError(
                f"num_elements: {self.name} expects a multiple of {self.elements_per_scale}{tail}, "
                f"got {num_elements}"
            )
        return dataclasses.replace(self, quantized_elements=quantized)


V41 = KVCacheFormat(
    name="V41",
    quantized_dtype="e4m3",
    quantized_elements=512,
    elements_per_scale=32,
    scale_dtype="ue8m0",
    note="DeepSeek-V4.1 window rows: 512 e4m3 values, rotary ones too, one scale for 32.",
)
V4 = KVCacheFormat(
    name="V4",
    quantized_dtype="e4m3",
    quantized_elements=448,
    elements_per_scale=64,
    scale_dtype="ue8m0",
    raw_elements=64,
    raw_dtype="bfloat16",
    pad_bytes=1,
    note="DeepSeek-V4 rows: 448 e4m3 values, one scale for 64, and 64 rotary values in bfloat16.",
)
V32 = KVCacheFormat(
    name="V32",
    quantized_dtype="e4m3",
    quantized_elements=512,
    elements_per_scale=128,
    scale_dtype="float32",
    raw_elements=64,
    raw_dtype="bfloat16",
    scales_last=False,
    note="DeepSeek-V3.2 rows: the value is the first 512 of 576. Codec and converters only.",
)
BF16 = KVCacheFormat(
    name="BF16", raw_elements=512, raw_dtype="bfloat16", note="Rows rounded to bfloat16."
)
F32 = KVCacheFormat(name="F32", raw_elements=512, raw_dtype="float32", note="Rows as computed.")
V41_FP4 = KVCacheFormat(
    name="V41_FP4",
    quantized_dtype="e2m1",
    quantized_elements=512,
    elements_per_scale=16,
    scale_dtype="e4m3",
    note="DeepSeek-V4.1 compressed rows, for the extra cache: e2m1 pairs, one scale for 16.",
)
FORMATS = {fmt.name: fmt for fmt in (V41, V4, V32, BF16, F32, V41_FP4)}


def quantize_rows(
    x: Float[Array, "*batch elements"], fmt: KVCacheFormat, scale_floor: ScaleFloor = "amax"
) -> UInt8[Array, "*batch row_bytes"]:
    """Rows of numbers as the bytes of a format.

    Quantised formats first round to bfloat16, then take per group the largest magnitude `amax`.
    ue8m0: scale `2**ceil(log2(amax / 448))`, e4m3 to nearest even. float32 scales: amax / 448.
    e4m3 scales of e2m1 values: amax / 6, `2**-9` at least. The rule is that of DeepSeek-V4's
    published inference code.

    Args:
      x: floating, width `fmt.num_elements`.
      fmt: the row format.
      scale_floor: "amax" bounds amax at 1e-4, "scale" bounds amax / 448 at 1e-4, the rule of
        FlashMLA and vLLM. It has no effect on raw values and e2m1.

    Returns:
      uint8, width `fmt.row_bytes`. A row with a non-finite value is NaN as a whole.

    Raises:
      ValueError: wrong width, dtype, format or floor.
    """
    check_format(fmt)
    checks.check_choice("scale_floor", scale_floor, SCALE_FLOORS)
    checks.check_floating("x", x)
    if x.ndim == 0 or x.shape[-1] != fmt.num_elements:
        raise ValueError(
            f"x: format {fmt.name} expects rows of {fmt.num_elements} values, got shape {x.shape}"
        )
    x = x.astype(jnp.float32)
    values, raw = x[..., : fmt.quantized_elements], x[..., fmt.quantized_elements :]
    finite = jnp.all(codec.is_finite(raw), axis=-1, keepdims=True)
    data, scales = None, None
    if fmt.quantized_dtype is not None:
        groups = values.reshape(*x.shape[:-1], fmt.num_scales, fmt.elements_per_scale)
        # Of magnitudes as integers, which have no NaN that a maximum may drop: one pass over the
        # values tells both what the scales need and whether all are finite.
        largest = jnp.max(codec.float_bits(groups) & codec.MAGNITUDE_MASK, axis=-1)
        finite &= jnp.all(codec.is_finite(codec.bits_float(largest)), axis=-1, keepdims=True)
        # Rounding keeps the order of magnitudes, so the largest is the largest after it too.
        amax = codec.round_to_bfloat16(codec.bits_float(largest))
        data, scales = _quantize_groups(codec.round_to_bfloat16(groups), amax, fmt, scale_floor)
    raw = _encode_raw(raw, fmt)
    parts = [data, *([raw, scales] if fmt.scales_last else [scales, raw])]
    if fmt.pad_bytes:
        parts.append(jnp.zeros((*x.shape[:-1], fmt.pad_bytes), jnp.uint8))
    row = jnp.concatenate([part for part in parts if part is not None], axis=-1)
    return jnp.where(finite, row, _nan_row(fmt))


def dequantize_rows(
    data: UInt8[Array, "*batch row_bytes"], fmt: KVCacheFormat
) -> Float32[Array, "*batch elements"]:
    """The numbers that the bytes of rows stand for.

    Args:
      data: uint8, width `fmt.row_bytes`.
      fmt: the row format.

    Returns:
      float32, width `fmt.num_elements`. Exact, for ue8m0 scales with codes 1 to 254; code 0 gives
      zeros and code 255 (as any NaN scale) NaN. NaN is told by the scale alone: under another one
      the e4m3 codes 7F and FF, which no row of a writer here has, stand for +-480.

    Raises:
      ValueError: wrong width, dtype or format.
    """
    check_format(fmt)
    checks.check_bytes("data", data)
    if data.ndim == 0 or data.shape[-1] != fmt.row_bytes:
        raise ValueError(
            f"data: format {fmt.name} expects rows of {fmt.row_bytes} bytes, got shape {data.shape}"
        )
    parts = []
    raw_start = fmt.quantized_bytes + (0 if fmt.scales_last else fmt.scale_bytes)
    raw_end = raw_start + fmt.data_bytes - fmt.quantized_bytes
    if fmt.quantized_dtype is not None:
        scale_start = raw_end if fmt.scales_last else fmt.quantized_bytes
        scales = data[..., scale_start : scale_start + fmt.scale_bytes]
        parts.append(_dequantize_groups(data[..., : fmt.quantized_bytes], scales, fmt))
    if fmt.raw_dtype is not None:
        raw = codec.from_bytes(data[..., raw_start:raw_end], jnp.dtype(fmt.raw_dtype))
        parts.append(raw.astype(jnp.float32))
    return jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]


def check_format(fmt: KVCacheFormat, name: str = "fmt") -> None:
    """Raises ValueError unless `fmt` is a token-interleaved KVCacheFormat."""
    checks.check_type(name, fmt, KVCacheFormat)
    if not fmt.token_interleaved:
        raise ValueError(f"{name}: expected a token-interleaved format, got page-planar {fmt.name}")


def check_cache_format(name: str, fmt: KVCacheFormat) -> None:
    """Raises ValueError unless rows of the format can be stored and attended to."""
    check_format(fmt, name)
    if fmt.scale_dtype == "float32":
        raise ValueError(
            f"{name}: format {fmt.name} is for conversion only: its value is a part of its row"
        )


def _quantize_groups(groups, amax, fmt, scale_floor):
    """Bytes of values [..., groups, elements] and of their scales, from each group's largest."""
    rows = groups.shape[:-2]
    if fmt.scale_dtype == "ue8m0":
        exponent = codec.power_of_two_scale(amax, SMALLEST_UE8M0[scale_floor])
        inverse = codec.bits_float((254 - exponent) << 23)
        scaled = groups * inverse[..., None]
        scales = exponent.astype(jnp.uint8)
    elif fmt.scale_dtype == "float32":
        floor, largest = jnp.float32(_FLOOR), jnp.float32(codec.E4M3_MAX)
        if scale_floor == "amax":
            scale = codec.divide(jnp.maximum(amax, floor), largest)
        else:
            scale = jnp.maximum(codec.divide(amax, largest), floor)
        scaled = codec.divide(groups, scale[..., None])
        scales = codec.to_bytes(scale)
    else:
        # Whether XLA divides or multiplies by 1/6 does not matter: amax is a bfloat16, so its sixth
        # is a tie of two e4m3 codes in both, or far from one.
        scale = amax / jnp.float32(codec.E2M1_MAX)
        scales = codec.encode_e4m3(jnp.maximum(scale, jnp.float32(FP4_SCALE_FLOOR)))
        codes = codec.encode_e2m1(groups, codec.decode_e4m3(scales)[..., None])
        codes = codes.reshape(*rows, fmt.quantized_bytes, 2)
        return codes[..., 0] | (codes[..., 1] << 4), scales
    return codec.encode_e4m3(scaled.reshape(*rows, fmt.quantized_elements)), scales


def _dequantize_groups(data, scales, fmt):
    if fmt.quantized_dtype == "e4m3":
        values = codec.decode_e4m3(data)
    else:
        nibbles = jnp.stack([data & 0xF, data >> 4], axis=-1)
        values = codec.decode_e2m1(nibbles.reshape(*data.shape[:-1], fmt.quantized_elements))
    if fmt.scale_dtype == "ue8m0":
        scale = codec.decode_ue8m0(scales)
    elif fmt.scale_dtype == "float32":
        scale = codec.from_bytes(scales, jnp.dtype(jnp.float32))
    else:
        scale = codec.decode_e4m3_scale(scales)
    groups = values.reshape(*values.shape[:-1], fmt.num_scales, fmt.elements_per_scale)
    return (groups * scale[..., None]).reshape(values.shape)


def _encode_raw(x, fmt):
    if fmt.raw_dtype == "bfloat16":
        return codec.to_bytes(codec.bfloat16_bits(codec.round_to_bfloat16(x)).astype(jnp.uint16))
    return codec.to_bytes(x) if fmt.raw_dtype == "float32" else None


def _nan_row(fmt: KVCacheFormat) -> np.ndarray:
    """The bytes of a row that is NaN as a whole."""
    quantized = np.full(fmt.quantized_bytes, codec.E4M3_NAN, np.uint8)
    nan_scale = {
        "ue8m0": np.full(1, codec.UE8M0_NAN, np.uint8),
        "e4m3": np.full(1, codec.E4M3_NAN, np.uint8),
        "float32": np.asarray([codec.FLOAT32_NAN], "<u4").view(np.uint8),
    }
    nan_raw = {
        "bfloat16": np.asarray([codec.BFLOAT16_NAN], "<u2").view(np.uint8),
        "float32": np.asarray([codec.FLOAT32_NAN], "<u4").view(np.uint8),
    }
    none = np.empty(0, np.uint8)
    scales = np.tile(nan_scale.get(fmt.scale_dtype or "", none), fmt.num_scales)
    raw = np.tile(nan_raw.get(fmt.raw_dtype or "", none), fmt.raw_elements)
    tail = [raw, scales] if fmt.scales_last else [scales, raw]
    return np.concatenate([quantized, *tail, np.zeros(fmt.pad_bytes, np.uint8)])

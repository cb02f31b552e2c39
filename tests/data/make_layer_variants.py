"""Makes layer_variants.npz. Needs the environment of make_window_layer.py, beside which it lies.

The layer of window_layer.npz, with the same weights and input, in two variants that Hugging Face
transformers also computes:

- weights and input rounded to bfloat16, but for norm weights and sinks, which stay float32 there:
  the output `y_bfloat16` as bits, and `y64_bfloat16`, the float64 result of the same numbers;
- with the rope of layers that also read a compressed cache, YaRN over the base 160000, which turns
  16 values of each head instead of 8: the output `y_yarn` in float32 and `y64_yarn` in float64 at
  positions 0 to 39, and `y64_far`, the first sequence at 40 positions from each of `far_starts` on.
  At a million transformers' float32 angles are off by hundredths, so there float64 alone counts.

`frequencies_<rope>_<n>` are those that transformers computes for n rotated values: 16, and the 64
of the published models. `cos_yarn_64` and `sin_yarn_64` are float64, at `angle_positions`;
`cfg_yarn` is the configuration with YaRN as JSON.

    python make_layer_variants.py [--out layer_variants.npz]
"""

import argparse
import functools
import json
import math
from pathlib import Path

import numpy as np
import torch
from make_window_layer import BATCH, FIELDS, TOKENS, make_config, make_layer, run, run_in_float64
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

FAR_STARTS = (1_000_000, 2**20 - TOKENS)
ANGLE_POSITIONS = (0, 1, 2, 127, 128, 65535, 65536, 1_000_000, 1_048_575)
YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 65536,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
BASE = 160000.0
WAYS_OF_FEEDING = ([TOKENS], [1] * TOKENS, [5, 1, 3, 8, 2, 5, 1, 3, 8, 2, 2])


def yarn_frequencies(rotated: int) -> np.ndarray:
    """Radians per position, from the paper: a ramp between the pairs that turn 32 times and once.

    Where the ramp is 0 a pair keeps its frequency, where it is 1 the frequency is divided by 16.
    """
    pair = np.arange(rotated // 2)
    wavelength = 2 * math.pi * BASE ** (2 * pair / rotated)

    def place(turns):
        return rotated / 2 * math.log(65536 / (2 * math.pi * turns), BASE)

    low, high = math.floor(place(32)), math.ceil(place(1))
    ramp = np.clip((pair - low) / (high - low), 0, 1)
    return 2 * math.pi / wavelength * (1 - ramp + ramp / 16)


def public_frequencies(rope: str, rotated: int) -> np.ndarray:
    """What transformers computes, in float32."""
    size = 32 if rotated < 32 else 512
    config = DeepseekV4Config(
        num_hidden_layers=1,
        layer_types=["sliding_attention"],
        head_dim=size,
        partial_rotary_factor=rotated / size,
        rope_parameters=dict(YARN),
    )
    rotary = DeepseekV4RotaryEmbedding(config)
    if getattr(rotary, f"{rope}_attention_scaling") != 1:
        raise SystemExit(f"{rope}: expected rotations that scale nothing")
    return getattr(rotary, f"{rope}_inv_freq").numpy()


def check(name: str, got, want, tolerance: float) -> None:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = np.abs(got - want).max() / np.abs(want).max()
    print(f"{name}: {error:.1e} of the largest value")
    if not error <= tolerance:
        raise SystemExit(f"{name}: expected at most {tolerance}, got {error}")


def sample_input(config) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, TOKENS, config.hidden_size, generator=generator)


def in_bfloat16() -> dict[str, np.ndarray]:
    config = make_config()
    layer = make_layer(config)
    for name, weight in layer.named_parameters():
        if name != "sinks" and not name.endswith("norm.weight"):
            weight.data = weight.data.to(torch.bfloat16)
    x = sample_input(config).to(torch.bfloat16)
    y64 = run_in_float64(config, layer, x)
    y = run(config, layer, x, [TOKENS])
    for chunks in WAYS_OF_FEEDING:  # transformers rounds scores and angles to bfloat16 as well
        check(f"bfloat16, {len(chunks)} chunks", run(config, layer, x, chunks).float(), y64, 8e-3)
    return {"y_bfloat16": y.view(torch.uint16).numpy(), "y64_bfloat16": y64}


def with_yarn() -> dict[str, np.ndarray | str]:
    config = make_config(rotated=16, rope_parameters=dict(YARN))
    layer, x = make_layer(config), sample_input(config)
    frequencies = yarn_frequencies(16)
    rotary = DeepseekV4RotaryEmbedding(config)
    angles = functools.partial(rotary, x, layer_type="compress")
    y64 = run_in_float64(config, layer, x, frequencies)
    y = run(config, layer, x, [TOKENS], angles)
    for chunks in WAYS_OF_FEEDING:
        check(f"YaRN, {len(chunks)} chunks", run(config, layer, x, chunks, angles), y64, 2e-6)

    def right_angles(positions):
        turns = np.exp(1j * positions.numpy()[..., None] * frequencies)
        return torch.tensor(turns.real).float(), torch.tensor(turns.imag).float()

    far = []
    for first in FAR_STARTS:
        far.append(run_in_float64(config, layer, x[:1], frequencies, first)[0])
        for name, of, tolerance in (("right", right_angles, 2e-6), ("float32", angles, 0.05)):
            y_far = run(config, layer, x[:1], [TOKENS], of, first)[0]
            check(f"from {first} on, {name} angles", y_far, far[-1], tolerance)
    fields = {name: getattr(config, name) for name in FIELDS} | {"rope_theta": BASE}
    fields["rope_scaling"] = YARN
    return {
        "y_yarn": y.numpy(),
        "y64_yarn": y64,
        "y64_far": np.stack(far),
        "far_starts": np.array(FAR_STARTS, np.int32),
        "cfg_yarn": json.dumps(fields),
    }


def tables() -> dict[str, np.ndarray]:
    plain = 10000.0 ** (-np.arange(0, 64, 2) / 64)
    tables = {"angle_positions": np.array(ANGLE_POSITIONS, np.int32)}
    for rope, label in (("main", "plain"), ("compress", "yarn")):
        for rotated in (16, 64):
            frequencies = public_frequencies(rope, rotated)
            exact = yarn_frequencies(rotated) if rope == "compress" else plain[:: 64 // rotated]
            check(f"{label} frequencies, {rotated} values", frequencies / exact, 1.0, 1e-6)
            tables[f"frequencies_{label}_{rotated}"] = frequencies
    turns = np.exp(1j * tables["angle_positions"][:, None] * yarn_frequencies(64))
    return tables | {"cos_yarn_64": turns.real, "sin_yarn_64": turns.imag}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=Path(__file__).with_name("layer_variants.npz"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    np.savez_compressed(arguments.out, **in_bfloat16(), **with_yarn(), **tables())


if __name__ == "__main__":
    main()

"""Loads the attention layers of a model's directory, and says what each one is and weighs.

    python examples/load_hf.py PATH [--layers N] [--json]

PATH has config.json and safetensors, one file or sharded with an index, under Hugging Face's names
or the original ones: DeepSeek-V4, V4.1 and smaller models of their kind. If a file
reference.safetensors lies beside them, with an input `x` [batch, tokens, hidden] and outputs
`layers.0`, `layers.1`, ... of some layers' attention on it, each output is compared with this
library's, in float32, with the model's rows and with float32 rows.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from command_line import Parser, print_error, whole_number
from tqdm import tqdm

import swa_jax as swa
from swa_jax.reading import inside
from swa_jax.sizing import ring_cache_bytes

REFERENCE = "reference.safetensors"


def describe(number: int, config: swa.AttentionConfig, params: Mapping[str, Any]) -> dict[str, Any]:
    """What one layer is and weighs."""
    return {
        "layer": number,
        "shapes": {name: list(value.shape) for name, value in params.items()},
        "dtype": config.param_dtype,
        "parameter_bytes": sum(value.nbytes for value in params.values()),
        "format": config.fmt.name,
        "row_bytes": config.fmt.row_bytes,
        "cache_bytes_per_request": ring_cache_bytes(config.fmt, config.geometry, layers=1, slots=1),
        "compressed_format": None if config.extra_fmt is None else config.extra_fmt.name,
        "rope_theta": config.rope_theta,
        "yarn_factor": None if config.rope_scaling is None else config.rope_scaling.factor,
    }


def difference(config: swa.AttentionConfig, params: Any, x: np.ndarray, want: np.ndarray) -> float:
    """The largest difference to a recorded output, over its largest magnitude.

    A compressed cache has no entry yet: the recorded output is that of the window.
    """
    want = np.asarray(want, np.float64)
    if want.shape != x.shape:
        raise ValueError(f"{REFERENCE}: expected an output of shape {x.shape}, got {want.shape}")
    largest = np.max(np.abs(want), initial=0)
    if not 0 < largest < np.inf:
        raise ValueError(f"{REFERENCE}: expected outputs up to a finite size, got {largest}")
    config = dataclasses.replace(config, extra_fmt=None, dtype="float32")
    apply = jax.jit(swa.SlidingWindowAttention(config).apply)
    got = np.asarray(apply({"params": params}, jnp.asarray(x, jnp.float32)), np.float64)
    found = float(np.max(np.abs(got - want)) / largest)
    if not found < np.inf:
        raise ValueError(f"{REFERENCE}: expected finite outputs of the weights for its x, got none")
    return found


def load(path: Path, limit: int | None) -> list[dict[str, Any]]:
    """Loads layer after layer; none is kept."""
    configs = swa.read_attention(path)
    tensors = swa.checkpoint.open_tensors(path)
    reference: Mapping[str, Any] = {}
    if (path / REFERENCE).is_file():
        reference = swa.checkpoint.open_tensors(inside(path, REFERENCE))
        if "x" not in reference:
            raise ValueError(f"{path / REFERENCE}: expected an input x, got {sorted(reference)}")
        x = reference["x"]
        if (
            x.ndim != 3
            or x.shape[2] != configs[0].hidden_size
            or not jnp.issubdtype(x.dtype, jnp.floating)
        ):
            raise ValueError(
                f"{path / REFERENCE}: expected a floating x [batch, tokens, "
                f"{configs[0].hidden_size}], got {x.dtype}{x.shape}"
            )
    layers = []
    for number, config in enumerate(tqdm(configs[:limit], unit="layer", disable=None)):
        params = swa.checkpoint.load_attention(tensors, config, number)["params"]
        found = describe(number, config, params)
        wanted = f"layers.{number}"
        if wanted in reference:
            exact = dataclasses.replace(config, fmt=swa.F32.with_width(config.head_dim))
            x, want = reference["x"], reference[wanted]
            found["difference"] = difference(config, params, x, want)
            found["difference_float32_rows"] = difference(exact, params, x, want)
        layers.append(found)
    return layers


def report(layers: list[dict[str, Any]]) -> str:
    """The layers as a table, shapes where they change."""
    lines, shapes = [], None
    for found in layers:
        if found["shapes"] != shapes:
            shapes = found["shapes"]
            text = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
            lines.append(f"\nfrom layer {found['layer']} on, in {found['dtype']}: {text}")
            lines.append(
                f"{'layer':>5} {'rows':>8} {'bytes':>6} {'cache B/request':>15} {'compressed':>10} "
                f"{'rope':>16} {'difference':>11} {'F32 rows':>9}"
            )
        rope = f"{found['rope_theta']:g}"
        if found["yarn_factor"] is not None:
            rope += f" YaRN {found['yarn_factor']:g}"
        difference, exact = (
            f"{found[key]:.1e}" if key in found else "-"
            for key in ("difference", "difference_float32_rows")
        )
        lines.append(
            f"{found['layer']:>5} {found['format']:>8} {found['row_bytes']:>6} "
            f"{found['cache_bytes_per_request']:>15,} {found['compressed_format'] or '-':>10} "
            f"{rope:>16} {difference:>11} {exact:>9}"
        )
    cache = sum(found["cache_bytes_per_request"] for found in layers)
    weights = sum(found["parameter_bytes"] for found in layers)
    lines.append(
        f"\n{len(layers)} layers: {cache:,} cache bytes per request, {weights:,} parameter bytes"
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; status 2 and one line where the directory is not such a model."""
    parser = Parser(
        prog="load_hf.py",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog=(__doc__ or "").rpartition("\n\n")[2],
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="directory of the model")
    parser.add_argument(
        "--layers", type=whole_number(1), metavar="N", help="only the first N layers"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    parsed = parser.parse_args(arguments)
    try:
        layers = load(parsed.path, parsed.layers)
    except (ValueError, OSError) as error:
        print_error("load_hf.py", error)
        return 2
    print(json.dumps(layers, indent=2) if parsed.json else report(layers).lstrip())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

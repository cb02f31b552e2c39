"""Bits per byte of a text through the ring cache and through recompute, by window and format."""

import dataclasses
import math
import sys

import byte_text
import numpy as np
from jaxtyping import Int
from tqdm import tqdm

import swa_jax as swa
from swa_jax.decoding import replay
from swa_jax.recompute import whole_sequence_logits

WINDOWS = (32, 64, 128)
FORMATS = (swa.F32, swa.V41, swa.BF16)  # the first is what the others are compared with
ROWS_AT_ONCE = 16
WHOLE_ROWS_AT_ONCE = 2  # a recompute keeps all of its activations
SCORED_PER_ROW = 4096


def evaluate(
    config: swa.DecoderConfig,
    variables: dict,
    tokens: Int[np.ndarray, " n"],
    max_rows: int | None = None,
) -> dict[str, dict]:
    """Scores a text in every window and row format, token by token through the ring and whole.

    The text is cut into rows that carry their context along, so each score is that of the
    uncut text.

    Args:
      config: the decoder's configuration; its window and format are replaced.
      variables: its parameters.
      tokens: the token stream, a boundary before each file.
      max_rows: evenly spaced rows of 4096 tokens instead of all.

    Returns:
      By "window W, FORMAT": ring_bits_per_byte, recompute_bits_per_byte,
      largest_logit_difference (ring against recompute, same rows) and
      largest_logit_difference_to_f32 (recompute, against F32 rows).
    """
    layer = config.layers[0]
    context = config.num_layers * (max(WINDOWS) - 1)
    context = -(-context // 128) * 128
    row = min(SCORED_PER_ROW, 1 << (len(tokens) - 1).bit_length())
    inputs, targets, scored = byte_text.scoring_rows(tokens, context, row)
    chosen = np.linspace(0, len(inputs) - 1, min(max_rows or len(inputs), len(inputs)))
    inputs, targets, scored = (x[chosen.round().astype(int)] for x in (inputs, targets, scored))
    num_bytes = int((scored & (targets != byte_text.BOUNDARY)).sum())
    results = {}
    groups = range(0, len(inputs), ROWS_AT_ONCE)
    with tqdm(total=len(WINDOWS) * len(FORMATS) * len(groups), unit="pass", file=sys.stderr) as bar:
        for window in WINDOWS:
            sums = {fmt.name: np.zeros(4) for fmt in FORMATS}
            for start in groups:
                part = slice(start, start + ROWS_AT_ONCE)
                reference = None
                for fmt in FORMATS:
                    bar.set_postfix_str(f"window {window}, {fmt.name}")
                    fitting = fmt.with_width(layer.head_dim)
                    attention = dataclasses.replace(layer, window=window, fmt=fitting)
                    model = swa.Decoder(dataclasses.replace(config, attention=attention))
                    ring = _ring_logits(model, variables, inputs[part])
                    whole = _whole_logits(model, variables, inputs[part])
                    reference = whole if reference is None else reference
                    count = scored[part]
                    sums[fmt.name][:2] += [
                        _nats(logits, targets[part], count) for logits in (ring, whole)
                    ]
                    sums[fmt.name][2:] = np.maximum(
                        sums[fmt.name][2:],
                        [np.abs(ring - whole)[count].max(), np.abs(whole - reference)[count].max()],
                    )
                    bar.update()
            for name, (ring_nats, whole_nats, difference, to_f32) in sums.items():
                results[f"window {window}, {name}"] = {
                    "window": window,
                    "format": name,
                    "ring_bits_per_byte": ring_nats / math.log(2) / num_bytes,
                    "recompute_bits_per_byte": whole_nats / math.log(2) / num_bytes,
                    "largest_logit_difference": float(difference),
                    "largest_logit_difference_to_f32": float(to_f32),
                    "bytes": num_bytes,
                }
    return results


def print_table(results: dict[str, dict]) -> None:
    """The results of `evaluate` as a table on standard output."""
    print(f"{next(iter(results.values()))['bytes']:,} bytes")
    print("window  rows  bits per byte          largest logit difference")
    print("              ring       recompute   ring-recompute   to F32 rows")
    for line in results.values():
        print(
            f"{line['window']:6d}  {line['format']:4s}  {line['ring_bits_per_byte']:.5f}"
            f"    {line['recompute_bits_per_byte']:.5f}     {line['largest_logit_difference']:.2e}"
            f"         {line['largest_logit_difference_to_f32']:.2e}"
        )


def _ring_logits(model: swa.Decoder, variables: dict, inputs: np.ndarray) -> np.ndarray:
    config = model.config
    cache = swa.RingCache.for_decoder(config, len(inputs))
    ids = np.arange(len(inputs), dtype=np.int32)
    logits, _ = replay(model, variables, cache, ids, inputs, np.zeros_like(ids))
    return np.asarray(logits)


def _whole_logits(model: swa.Decoder, variables: dict, inputs: np.ndarray) -> np.ndarray:
    pieces = range(0, len(inputs), WHOLE_ROWS_AT_ONCE)
    parts = [inputs[start : start + WHOLE_ROWS_AT_ONCE] for start in pieces]
    return np.concatenate([whole_sequence_logits(model, variables, part) for part in parts])


def _nats(logits: np.ndarray, targets: np.ndarray, scored: np.ndarray) -> float:
    peak = logits.max(axis=-1)
    lse = peak + np.log(np.exp(logits - peak[..., None]).sum(axis=-1))
    chosen = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return float((lse - chosen)[scored].astype(np.float64).sum())

"""What prefilling only a prefix's last tokens leaves wrong in the rows, layer by layer.

A row of layer l depends on l * (W - 1) tokens before its own, W the window: layer 0 is right after
the last W - 1 tokens, layer l after (l + 1) * (W - 1), and only a saved prefix needs none of them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import swa_jax as swa
from pallas_kernels import dequantize_rows
from swa_jax.decoding import replay
from swa_jax.prefilling import prefill


def measure(
    model: swa.Decoder,
    variables: dict,
    prefix: np.ndarray,
    following: np.ndarray,
    counts: Sequence[int],
    step: Callable[[], object] = lambda: None,
) -> list[dict]:
    """Rows and scores after a prefill of a prefix's last tokens, against those of all of it.

    Args:
      model: the decoder.
      variables: its parameters.
      prefix: int32[n], token ids.
      following: int32[m], the tokens after it, whose scores are compared.
      counts: how many of the last tokens to prefill, at their own positions; at least W - 1.
      step: called after each count.

    Returns:
      For each count, under plain names: of each layer the mean and the largest relative difference
      of the W - 1 rows that a query reads, and the share of rows with any other byte; the largest
      difference of a score, relative to the largest score, and the share of the following tokens
      at which another token is the likeliest.
    """
    end, width = len(prefix), max(counts)
    empty = functools.partial(swa.RingCache.for_decoder, model.config, 1)
    ids, starts = np.zeros(1, np.int32), np.full(1, end, np.int32)

    def scores(cache: swa.RingCache) -> np.ndarray:
        return np.asarray(replay(model, variables, cache, ids, following[None], starts)[0][0])

    true, _ = prefill(model, variables, empty(), ids, [prefix], chunk=width)
    true_rows, true_scores = true.export_slot(0, end), scores(true)
    want = np.asarray(dequantize_rows(true_rows.data, model.config.fmt))
    results = []
    for count in counts:
        tokens = np.zeros((1, width), np.int32)
        tokens[0, :count] = prefix[end - count :]
        cache = _prefill_last(model, variables, empty(), tokens, np.int32(end), np.int32(count))
        rows = cache.export_slot(0, end)
        got = np.asarray(dequantize_rows(rows.data, model.config.fmt))
        error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
        new_scores = scores(cache)
        results.append({
            "tokens": count,
            "mean_by_layer": error.mean(axis=1).tolist(),
            "largest_by_layer": error.max(axis=1).tolist(),
            "rows_that_differ_by_layer": np.any(rows.data != true_rows.data, axis=-1)
            .mean(axis=1).tolist(),
            "score_difference": float(
                np.abs(new_scores - true_scores).max() / np.abs(true_scores).max()
            ),
            "other_likeliest_token": float(
                np.mean(new_scores.argmax(axis=1) != true_scores.argmax(axis=1))
            ),
        })  # fmt: skip
        step()
    return results


def print_table(results: Sequence[dict], window: int) -> None:
    """The mean relative difference of each layer's rows, and what it does to the scores."""
    layers = len(results[0]["mean_by_layer"])
    print("\nrows after a prefill of the last n tokens only, against the true rows:")
    print("mean relative difference (share of rows with another byte)")
    head = "".join(f"{f'layer {i}':>16}" for i in range(layers))
    print(f"{'n':>6}{head}{'scores':>10}{'other token':>13}")
    for line in results:
        each = zip(line["mean_by_layer"], line["rows_that_differ_by_layer"], strict=True)
        cells = "".join(f"{mean:>9.1e} ({share:4.0%})" for mean, share in each)
        print(
            f"{line['tokens']:>6}{cells}{line['score_difference']:>10.1e}"
            f"{line['other_likeliest_token']:>13.0%}"
        )
    print(
        f"layer l is right from (l + 1) * (W - 1) tokens on: "
        f"{', '.join(str((i + 1) * (window - 1)) for i in range(layers))}"
    )


def plot(results: Sequence[dict], window: int, path: Path) -> None:
    """Draws the differences by the number of tokens prefilled."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    counts = [line["tokens"] for line in results]
    for layer in range(len(results[0]["mean_by_layer"])):
        means = [line["mean_by_layer"][layer] for line in results]
        [drawn] = axes.plot(counts, means, marker="o", markersize=4, label=f"layer {layer}")
        axes.axvline((layer + 1) * (window - 1), color=drawn.get_color(), linestyle=":")
    scores = [line["score_difference"] for line in results]
    axes.plot(counts, scores, color="black", marker="x", linestyle="--", label="scores, largest")
    axes.set_yscale("symlog", linthresh=1e-5)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("last tokens of the prefix that were prefilled")
    axes.set_ylabel("relative difference to the true rows, mean")
    axes.set_title("Dotted: (l + 1)(W - 1) tokens, from which layer l is right")
    axes.legend()
    figure.savefig(path, dpi=120)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def _prefill_last(model, variables, cache, tokens, end, count) -> swa.RingCache:
    """The first `count` of some tokens at the positions before `end`, with nothing before them."""
    ids = jnp.zeros(1, jnp.int32)
    meta = swa.PrefillMetadata.build(
        cache.geometry, ids, (end - count)[None], count[None], max_tokens=tokens.shape[1]
    )
    unseen = jnp.full_like(meta.window_slots, -1)
    meta = dataclasses.replace(meta, window_slots=unseen)
    return model.apply(variables, tokens, cache, meta)[1]

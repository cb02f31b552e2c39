"""Makes merged_caches.npz; needs PyTorch, so run it in an environment of its own (torch 2.13.0).

Attention over two caches in one softmax, with a sink: window rows of 528 bytes, and a compressed
cache of rows of 528 bytes (`v41`), of 288 bytes (`fp4`) or in bfloat16 (`bfloat16`). row_inputs.py
computes queries and bytes; torch's own types decode them, and the rest is float64.

- `sink` [2]; `indices` int32 [queries, 128] and `extra_indices` [queries, 192], with -1 and other
  indices outside the rows among them, `lengths` and `extra_lengths` int32 [queries];
- `out_<kind>` float32 [queries, 2, 512] and `lse_<kind>` [queries, 2], both caches, with the sink;
- `out_part_<kind>` float32 [queries, 2, 16], the FEW_COLUMNS, and `lse_part_<kind>` [queries, 2],
  the compressed cache alone without a sink, and with the kind `window` the window alone.

An lse leaves the sink out; it is -inf and the output 0 where a query reads nothing. Rows that no
query may read are 0xFF, NaN in every format. Before it writes, it checks that the parts, merged by
their lse, give the whole.

    python make_merged_caches.py [--out merged_caches.npz]
"""

import argparse
from pathlib import Path

import numpy as np
import row_inputs
import torch
from row_inputs import FEW_COLUMNS, WIDTH

QUERIES, COLUMNS, EXTRA_COLUMNS = 12, 128, 192
ROWS, EXTRA_ROWS = row_inputs.WINDOW_ROWS, row_inputs.EXTRA_ROWS
SINK = torch.tensor([0.5, 4.0], dtype=torch.float64)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def v41_values(rows: torch.Tensor) -> torch.Tensor:
    codes = rows[:, :WIDTH].contiguous().view(torch.float8_e4m3fn).double()
    scales = rows[:, WIDTH:].contiguous().view(torch.float8_e8m0fnu).double()
    return codes * scales.repeat_interleave(32, dim=-1)


def fp4_values(rows: torch.Tensor) -> torch.Tensor:
    pairs = rows[:, : WIDTH // 2].int()
    codes = torch.stack([pairs % 16, pairs // 16], -1).flatten(-2)
    values = torch.where(codes < 8, 1.0, -1.0) * E2M1[codes % 8]
    scales = rows[:, WIDTH // 2 :].contiguous().view(torch.float8_e4m3fn).double()
    return values * scales.repeat_interleave(16, dim=-1)


def bfloat16_values(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.bfloat16).double()


def sample_indices(columns: int, rows: int, seed: int) -> np.ndarray:
    """Readable rows, some of them twice, and a quarter of indices that mean none."""
    random = np.random.default_rng(seed)
    indices = random.choice(row_inputs.readable(rows), (QUERIES, columns))
    none = random.choice([-1, -1, -1, rows, rows + 1, -2, 2**31 - 1, -(2**31)], indices.shape)
    return np.where(random.random(indices.shape) < 0.25, none, indices).astype(np.int32)


def attend(query: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One query [2, 512] over keys [k, 512], without a sink."""
    if len(keys) == 0:
        return torch.zeros_like(query), torch.full((len(query),), -torch.inf, dtype=torch.float64)
    scores = query @ keys.T * WIDTH**-0.5
    return torch.softmax(scores, -1) @ keys, torch.logsumexp(scores, -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=Path(__file__).with_name("merged_caches.npz"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    query = torch.from_numpy(row_inputs.queries(3, np.arange(QUERIES))).double()
    recorded = {
        "sink": SINK.float().numpy(),
        "indices": sample_indices(COLUMNS, ROWS, 0),
        "extra_indices": sample_indices(EXTRA_COLUMNS, EXTRA_ROWS, 1),
        # Everything, the first alone, none of one, none of both, and some.
        "lengths": np.array([128, 1, 0, 128, 0, 128, 64, 65, 2, 127, 200, 33], np.int32),
        "extra_lengths": np.array([192, 0, 192, 0, 0, 64, 1, 129, 2, 191, 999, 17], np.int32),
    }

    def seen(values, prefix, t):
        row = recorded[f"{prefix}indices"][t, : recorded[f"{prefix}lengths"][t]]
        return values[torch.from_numpy(row[(row >= 0) & (row < len(values))]).long()]

    window = v41_values(torch.from_numpy(row_inputs.window_rows()))
    kinds = {"v41": v41_values, "fp4": fp4_values, "bfloat16": bfloat16_values}
    parts = {"window": [attend(query[t], seen(window, "", t)) for t in range(QUERIES)]}
    for kind, values_of in kinds.items():
        extra = values_of(torch.from_numpy(row_inputs.extra_rows(kind)))
        parts[kind] = [attend(query[t], seen(extra, "extra_", t)) for t in range(QUERIES)]
        outputs, lses = [], []
        for t in range(QUERIES):
            keys = torch.cat([seen(window, "", t), seen(extra, "extra_", t)])
            out, lse = attend(query[t], keys)
            outputs.append(out * torch.sigmoid(lse - SINK)[:, None])
            lses.append(lse)
            merged, total = torch.zeros_like(out), torch.exp(SINK)
            for part in ("window", kind):
                part_out, part_lse = parts[part][t]
                merged += torch.exp(part_lse)[:, None] * part_out
                total = total + torch.exp(part_lse)
            if not torch.allclose(merged / total[:, None], outputs[-1], rtol=0, atol=1e-12):
                raise SystemExit(f"{kind}, query {t}: the merged parts are another output")
        recorded[f"out_{kind}"] = torch.stack(outputs).float().numpy()
        recorded[f"lse_{kind}"] = torch.stack(lses).float().numpy()
        print(kind, "lse", recorded[f"lse_{kind}"].min(), recorded[f"lse_{kind}"].max())
    for kind, results in parts.items():
        outputs, lses = map(torch.stack, zip(*results, strict=True))
        recorded[f"out_part_{kind}"] = outputs[..., FEW_COLUMNS].float().numpy()
        recorded[f"lse_part_{kind}"] = lses.float().numpy()
    np.savez_compressed(arguments.out, **recorded)


if __name__ == "__main__":
    main()

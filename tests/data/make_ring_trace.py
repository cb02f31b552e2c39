"""Makes ring_trace.npz; needs PyTorch, so run it in an environment of its own (torch 2.13.0).

A window of 128 in rings of 134 rows of 528 bytes, those of DeepSeek-V4.1, serves three requests,
two at a time: prompts in chunks, steps that verify up to seven tokens and accept some of them, a
second prompt after the first answer, and a third request in the state slot of one that has ended.
row_inputs.py computes the inputs; a token that is rejected has another than the one that stays.

- `requests`, `state_ids`, `starts`, `lengths`, `accepted`: [calls, 2]; `prefill`: [calls];
- `sink` [2]; `lse` float32 [tokens, 2]; `out` float32 [tokens, 2, 16], the FEW_COLUMNS of the
  outputs, rotated back. Tokens are in order of calls, then requests, then positions. A few outputs,
  `whole_tokens`, are whole in `whole_out` [.., 2, 512];
- `checksums` uint32 [4, 134], the CRC-32 of each row of the four rings after the last call, and
  `some_rows` [4, .., 528], those in `some_slots`.

All rows are 0xFF at the beginning, which is NaN in values and in scales, and after each call the
seven to which the next one may store are so again. Rows are cast by torch's own float8 types, the
rest is float64, and a query's keys are looked up by position. Before it writes, it checks that
rings give every query the same: position p in row p % 134, and steps that store before they read.

    python make_ring_trace.py [--out ring_trace.npz]
"""

import argparse
import dataclasses
import random
import zlib
from pathlib import Path

import numpy as np
import row_inputs
import torch
from row_inputs import FEW_COLUMNS, HALF, WIDTH

WINDOW, CAPACITY, STATES, LANES, MOST_TOKENS = 128, 134, 4, 2, 7
GROUP, LARGEST, LEAST_AMAX = 32, 448.0, 1e-4
SINK = torch.tensor([0.5, 3.0], dtype=torch.float64)
PROMPT_CHUNKS = [(5, 0), (1, 129), (130, 3), (0, 150), (64, 1)]


@dataclasses.dataclass
class Call:
    """What one call does in each lane."""

    prefill: bool
    requests: list[int]
    state_ids: list[int]
    starts: list[int]
    lengths: list[int]
    accepted: list[int]

    def tokens(self, lane: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions, and versions of the inputs."""
        length = self.lengths[lane]
        return self.starts[lane] + np.arange(length), row_inputs.versions(
            length, self.accepted[lane]
        )


def make_trace() -> list[Call]:
    chance = random.Random(0)
    requests, state_ids, nexts, calls = [0, 1], [2, 0], [0, 0], []

    def call(prefill, lengths, accepted):
        calls.append(Call(prefill, requests[:], state_ids[:], nexts[:], lengths, accepted))
        for lane in range(LANES):
            nexts[lane] += accepted[lane]

    def chunk(*lengths):
        call(True, list(lengths), list(lengths))

    def verify(most=MOST_TOKENS):
        lengths = [chance.randint(0, most) for _ in range(LANES)]
        call(False, lengths, [chance.randint(1, n) if n else 0 for n in lengths])

    for lengths in PROMPT_CHUNKS:
        chunk(*lengths)
    for accepted in ([7, 7], [1, 1], [1, 4], [7, 2]):
        call(False, [7, 7], accepted)
    for _ in range(18):
        verify()
    chunk(20, 0)
    for _ in range(2):
        verify(most=1)
    requests[0], nexts[0] = 2, 0  # it takes over the state slot as it is
    chunk(9, 40)
    for _ in range(12):
        verify()
    return calls


def make_rows(request: int, positions, versions) -> torch.Tensor:
    """The bytes of rows: norm, rotation, cast to bfloat16, then e4m3 with a scale for 32."""
    x = torch.from_numpy(row_inputs.latents(request, positions, versions)).double()
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    x = turn(x * torch.from_numpy(row_inputs.norm_weight()), positions, +1)
    groups = x.to(torch.bfloat16).double().reshape(-1, WIDTH // GROUP, GROUP)
    amax = groups.abs().amax(-1).clamp_min(LEAST_AMAX)
    # amax / 448 is fraction * 2**exponent, with a fraction from 1/2 to 1.
    fraction, exponent = torch.frexp(amax / LARGEST)
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent)
    scale = torch.ldexp(torch.ones_like(amax), exponent)
    codes = (groups / scale[..., None]).float().to(torch.float8_e4m3fn).reshape(-1, WIDTH)
    scales = scale.float().to(torch.float8_e8m0fnu)
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], -1)


def values_of(rows: torch.Tensor) -> torch.Tensor:
    codes = rows[:, :WIDTH].contiguous().view(torch.float8_e4m3fn).double()
    scales = rows[:, WIDTH:].contiguous().view(torch.float8_e8m0fnu).double()
    return (codes.reshape(-1, WIDTH // GROUP, GROUP) * scales[..., None]).reshape(-1, WIDTH)


def turn(x: torch.Tensor, positions, sign: int) -> torch.Tensor:
    """The last 64 values of x [tokens, ..., 512] in neighbouring pairs, as complex numbers."""
    cos, sin = (torch.from_numpy(part).double() for part in row_inputs.rotation(positions))
    angles = torch.complex(cos, sign * sin)
    angles = angles.reshape(len(x), *(1,) * (x.ndim - 2), HALF)
    pairs = torch.view_as_complex(x[..., -2 * HALF :].reshape(*x.shape[:-1], HALF, 2).contiguous())
    return torch.cat([x[..., : -2 * HALF], torch.view_as_real(pairs * angles).flatten(-2)], -1)


def attend(query: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One query [heads, 512] over keys [k, 512]: its output and the lse without the sink."""
    scores = query @ keys.T * WIDTH**-0.5
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - torch.logaddexp(lse, SINK)[:, None]) @ keys, lse


def by_position(calls: list[Call]):
    """Every call's outputs, with what each request has stored kept by position."""
    stored: dict[tuple[int, int], torch.Tensor] = {}
    for call in calls:
        for lane in range(LANES):
            request, (positions, versions) = call.requests[lane], call.tokens(lane)
            rows = make_rows(request, positions, versions)
            stored |= {(request, int(p)): row for p, row in zip(positions, rows, strict=True)}
            query = torch.from_numpy(row_inputs.queries(request, positions, versions)).double()
            for t, p in enumerate(positions.tolist()):
                seen = [stored[request, key] for key in range(max(p - WINDOW + 1, 0), p + 1)]
                turned = turn(query[t : t + 1], positions[t : t + 1], +1)[0]
                out, lse = attend(turned, values_of(torch.stack(seen)))
                yield turn(out[None], positions[t : t + 1], -1)[0], lse


def by_ring(calls: list[Call], rings: torch.Tensor):
    """The same through rings [states, 134, 528], which it changes."""
    for call in calls:
        for lane in range(LANES):
            request, (positions, versions) = call.requests[lane], call.tokens(lane)
            ring, rows = rings[call.state_ids[lane]], make_rows(request, positions, versions)
            old = ring.clone()
            for p, row in zip(positions.tolist(), rows, strict=True):
                ring[p % CAPACITY] = row
            query = torch.from_numpy(row_inputs.queries(request, positions, versions)).double()
            for t, p in enumerate(positions.tolist()):
                keys = range(max(p - WINDOW + 1, 0), p + 1)
                if call.prefill:  # the old rows and those of the chunk
                    first = call.starts[lane]
                    seen = [old[k % CAPACITY] if k < first else rows[k - first] for k in keys]
                else:
                    seen = [ring[k % CAPACITY] for k in keys]
                turned = turn(query[t : t + 1], positions[t : t + 1], +1)[0]
                out, lse = attend(turned, values_of(torch.stack(seen)))
                yield turn(out[None], positions[t : t + 1], -1)[0], lse
            for p in range(MOST_TOKENS):
                ring[(call.starts[lane] + call.accepted[lane] + p) % CAPACITY] = 0xFF


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=Path(__file__).with_name("ring_trace.npz"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    calls = make_trace()
    rings = torch.full((STATES, CAPACITY, WIDTH + WIDTH // GROUP), 0xFF, dtype=torch.uint8)
    outputs, lses = map(torch.stack, zip(*by_position(calls), strict=True))
    ring_outputs, ring_lses = map(torch.stack, zip(*by_ring(calls, rings), strict=True))
    if not (torch.equal(outputs, ring_outputs) and torch.equal(lses, ring_lses)):
        raise SystemExit("the ring gives other outputs than the positions")
    print(f"{len(calls)} calls, {len(lses)} tokens, up to", np.max([c.starts for c in calls], 0))
    tokens = np.cumsum([sum(call.lengths) for call in calls])
    whole = tokens[[1, 3, 4, 8, 20, 27, len(calls) - 1]] - 1
    slots = np.array([0, 60, 126, 133])
    rows = rings.numpy()
    trace = {
        field.name: np.array([getattr(call, field.name) for call in calls], np.int32)
        for field in dataclasses.fields(Call)
    }
    np.savez_compressed(
        arguments.out,
        **trace | {"prefill": trace["prefill"].astype(bool)},
        sink=SINK.float().numpy(),
        lse=lses.float().numpy(),
        out=outputs[..., FEW_COLUMNS].float().numpy(),
        whole_tokens=whole,
        whole_out=outputs[whole].float().numpy(),
        checksums=np.array([[zlib.crc32(row) for row in ring] for ring in rows], np.uint32),
        some_slots=slots,
        some_rows=rows[:, slots],
    )


if __name__ == "__main__":
    main()

"""Several devices: each has its slots and heads, no row moves, and results are those of one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharded_decode
from collectives import Collective, carrying_rows, find_collectives
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from quick_compilation import quick_environment
from small_models import attention_config, decoder_config, decoder_params, layer_params

import swa_jax as swa
from pallas_kernels import KVRows
from swa_jax.placement import first_state_ids, place_requests

pytestmark = [pytest.mark.quick_compilation, pytest.mark.makes_nan]

ROOT = Path(__file__).parents[1]
# XLA adds up in another order where heads are split: measured 4e-7 of the largest value.
ROUNDING = 3e-6
# A ring has 22 rows of 66 bytes, filled up to 1,472 bytes.
REGION = 1472


def run_python(*command: str | Path) -> subprocess.CompletedProcess:
    """Python in a process of its own, which may have other devices than this one."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        **quick_environment(),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    arguments = [sys.executable, *map(str, command)]
    return subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=300)


def several_devices(which: str) -> dict:
    done = run_python(Path(__file__).parent / "several_devices.py", which)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def fast() -> dict:
    return several_devices("fast")


@pytest.fixture(scope="module")
def slow() -> dict:
    return several_devices("slow")


# --- S02: the compiled step


def check_step(step: dict, sums: list) -> None:
    """No collective but sums of activations, and the cache stays where it is, in place."""
    assert step["collectives"] == [["all-reduce", [["f32", shape]]] for shape in sums]
    assert step["carrying_rows"] == 0
    assert step["aliased"] >= step["cache_per_device"]
    assert step["copies"] == 0
    assert len(step["shardings"]) == 1
    assert step["donated"]


def test_s02_a_decode_step_sends_sums_of_activations_only(fast):
    # 8 requests over 2 devices, width 32: the embedding's sum, and two in each of two layers
    check_step(fast["decode"], [[4, 1, 32]] * 5)
    assert fast["decode"]["cache_per_device"] == 64 * 2 * REGION // 2


@pytest.mark.slow
def test_s02_so_do_verify_and_prefill_steps(slow):
    check_step(slow["verify"], [[2, 6, 32]] * 3)
    check_step(slow["prefill"], [[2, 24, 32]] * 3)


def test_s02_where_xla_decides_it_sends_rows_and_the_check_says_so(fast):
    # the window of each of 8 requests, 16 rows of 66 bytes
    assert fast["without_a_map"]["collectives"] == [["all-reduce", [["u8", [8, 16, 66]]]]]
    assert fast["without_a_map"]["carrying_rows"] == 1


HLO = """
  %all-gather.1 = u8[64,2944]{1,0} all-gather(%p), channel_id=1, dimensions={0}
  %ar = (f32[2,8]{1,0}, /*index=1*/pred[]) all-reduce(%a, %b), to_apply=%add
  ROOT %s = (bf16[4]{0:T(128)}, bf16[16]{0}) all-gather-start(%c), dimensions={0}
  %d = bf16[16]{0} all-gather-done(%s)
  %fusion.3 = f32[9]{0} fusion(%all-reduce.2), kind=kLoop, calls=%f
"""


def test_collectives_are_read_from_a_program():
    found = find_collectives(HLO)
    assert found == [
        Collective("all-gather", (("u8", (64, 2944)),)),
        Collective("all-reduce", (("f32", (2, 8)), ("pred", ()))),
        Collective("all-gather", (("bf16", (4,)), ("bf16", (16,)))),
    ]
    assert [one.nbytes for one in found] == [64 * 2944, 65, 40]
    assert carrying_rows(found, 65) == found[:1]
    assert carrying_rows(found, 64) == found[:2]


# --- S03: eight slots over four devices, requests in slots 1 and 7


def test_s03_each_device_stores_its_two_slots_and_writes_land_on_the_owner(fast):
    case = fast["two_requests"]
    assert case["places"] == [0, 3]
    # with three places on each device: slots 6 and 7 on the last, 0 and 1 on the first
    assert case["places_of_five"] == [9, 0, 1, 10, 3]
    assert case["shard_shapes"] == [[2, REGION]] * 4
    assert case["written"] == [[1], [], [], [1]]


def test_s03_results_equal_the_run_on_one_device(fast):
    assert fast["two_requests"]["bytes_differing"] == 0
    assert fast["two_requests"]["error"] <= ROUNDING


def test_s03_the_memory_report_says_which_mode_is_used(fast):
    case, total = fast["two_requests"], 8 * REGION
    names = ("mode", "slots_per_device", "copies", "bytes_per_device", "bytes_of_all_devices")
    memory = {name: [case[name][field] for field in names] for name in case if "memory" in name}
    assert memory == {
        "memory": ["requests over 4", 2, 1, total // 4, total],
        "memory_of_heads": ["heads over 4, each with a copy of the rows", 8, 4, total, 4 * total],
        "memory_alone": ["one device", 8, 1, total, total],
    }


# --- S04: the whole layer


@pytest.mark.parametrize("devices", ["2", "4"])
def test_s04_a_layer_with_its_heads_over_devices_equals_one_device(fast, devices):
    case = fast["heads"][devices]
    assert case["error"] <= ROUNDING
    assert case["bytes_differing"] == 0
    assert case["keeps_sharding"]


# --- requests and slots


def test_a_request_far_from_its_slot_is_nan_and_stores_nothing(fast):
    case = fast["wrong_place"]
    assert case["nan"] == [False, True, False, False]
    assert case["finite"] == [True, False, True, True]
    assert case["written"] == [0, 5, 7]


def test_it_is_an_error_where_values_are_known(fast):
    message = "state_ids: expected a state slot from 2 to 3 for request 1 of 4"
    assert fast["wrong_place"]["message"].startswith(message)


def test_slots_are_copied_exported_and_imported_as_on_one_device(fast):
    assert all(fast["slots_moved"]["equal"])
    assert all(fast["slots_moved"]["same_sharding"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("mesh", "sharding: expected a NamedSharding or None, got Mesh"),
        ("abstract", "sharding: expected a mesh of devices, got AbstractMesh"),
        ("explicit", "sharding: expected a mesh whose axes have AxisType.Auto"),
        ("row", "sharding: expected a spec that names the axes of the slots only"),
        ("slots", "slots: expected a multiple of 4, the parts that the slots are in, got 6"),
        ("heads", "num_heads: expected a multiple of 2, the devices of ('tensor',), got 3"),
        ("batch", "x: expected a multiple of 4, the parts that the slots are in, got 3"),
        ("parameters", "num_heads: expected a multiple of 2, the devices of ('tensor',), got 3"),
        ("with_layer", "rows: expected sharding None, got NamedSharding("),
        ("prefill", "state_ids: expected a state slot from 2 to 3 for request 1 of 4"),
        ("prompts", "requests: expected a multiple of 4, the parts that the slots are in, got 2"),
        ("per_shard", "per_shard: expected at least 2, the requests of one device, got 1"),
        ("place", "state_ids: expected 0 to 7, got [0, 8]"),
    ],
)
def test_what_cannot_be_divided_is_refused(fast, call, message):
    assert fast["refusals"].keys() >= {call}
    assert (fast["refusals"][call] or "").startswith(message)


def test_requests_on_one_device_are_placed_as_they_come():
    places, size = place_requests(None, 8, [7, 1, 4])
    assert (places.tolist(), size) == ([0, 1, 2], 3)
    assert first_state_ids(None, 8, 3).tolist() == [0, 1, 2]


# --- nothing happens without a sharding


def test_a_mesh_that_names_a_card_maps_nothing_and_a_sharding_does():
    config = attention_config(16, swa.V41)
    layer, params = swa.SlidingWindowAttention(config), layer_params(config)
    meta = swa.DecodeMetadata.build(config.geometry, np.zeros(1, np.int32), np.array([[3]]))
    x = jnp.ones((1, 1, config.hidden_size), jnp.float32)
    one = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec("data"))
    plain, mapped = (
        swa.RingCache.create(1, 1, config.geometry, config.fmt, sharding).layer(0)
        for sharding in (None, one)
    )

    def maps(rows: KVRows) -> bool:
        step = jax.make_jaxpr(lambda rows: layer.apply(params, x, rows, meta))
        return "shard_map" in str(step(rows))

    card = jax.sharding.AbstractDevice("NVIDIA H200", None, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=card)
    with jax.sharding.use_abstract_mesh(mesh):
        assert not maps(plain)
    assert maps(mapped)


def test_a_saved_program_holds_no_devices():
    one = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec("data"))
    cache = swa.RingCache.create(1, 1, swa.RingGeometry(16, 22), sharding=one)
    for value in (cache, cache.layer(0)):
        exported = jax.export.export(jax.jit(lambda value: value))(value)
        with pytest.raises(ValueError, match="expected no sharding in a saved program"):
            exported.serialize()


def test_rows_are_told_apart_by_their_sharding():
    assert KVRows.create(1, 22).sharding is None
    assert swa.RingCache.create(1, 1, swa.RingGeometry(16, 22)).layer(0).sharding is None


# --- whole generations, second caches and kernels


@pytest.mark.slow
def test_generated_tokens_are_those_of_one_device(slow):
    got, want = slow["generations"]["tokens"]
    assert got == want
    assert [len(row) for row in got] == [9] * 8


@pytest.mark.slow
def test_tokens_with_drafts_are_those_of_one_device_without(slow):
    assert slow["generations"]["drafted"] == [slow["generations"]["tokens"][1]] * 2
    assert slow["generations"]["drafters_slots"] == [4, 2], "a drafter's rings lie as the model's"


@pytest.mark.slow
def test_requests_go_back_on_several_devices(slow):
    assert slow["generations"]["rolled_back"]
    assert slow["generations"]["blocks_equal"] == [True, True]


@pytest.mark.slow
def test_s02_nothing_is_compiled_twice(slow):
    # three chunks, and blocks before and after a rollback
    assert slow["generations"]["compiled"] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["whole", "split"])
def test_a_second_cache_lies_whole_on_every_device_or_is_split_as_the_ring(slow, rows):
    assert slow["second_caches"][rows] <= ROUNDING


@pytest.mark.slow
def test_a_request_that_names_compressed_rows_of_another_device_gets_nan(slow):
    assert slow["second_caches"]["of_others"] == [False, True, False, False]


@pytest.mark.slow
def test_a_second_cache_that_is_split_otherwise_is_refused(slow):
    message = "extra: a compressed cache has the sharding of the ring"
    assert slow["second_caches"]["message"].startswith(message)


@pytest.mark.slow
def test_kernels_run_on_each_device(slow):
    assert slow["kernels"]["interpret"] <= 2e-2  # bfloat16, in another order
    assert slow["kernels"]["lowered_for_cuda"] == 2  # the store and the attention


# --- the example, and several processes


@pytest.fixture(scope="module")
def tiny_weights(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sharded_decode") / "tiny.safetensors"
    config = decoder_config(attention_config(16, swa.V41), 1)
    config = swa.DecoderConfig(258, 1, config.attention, mlp_size=48)  # scores are split
    entry = {"config": config.to_json()}
    swa.checkpoint.save_params(path, decoder_params(config)["params"], entry, dtype="bfloat16")
    return path


@pytest.mark.slow
def test_two_processes_give_the_tokens_of_one_device(tiny_weights, tmp_path):
    report = tmp_path / "report.json"
    done = run_python(
        sharded_decode.__file__, "--weights", tiny_weights, "--processes", "2", "--devices", "4",
        "--split-heads", "2", "--prompts", "2", "--bytes", "10", "--report", report,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [mesh] = json.loads(report.read_text())["meshes"]
    assert mesh["tokens_equal"]
    assert [len(row) for row in mesh["tokens"]] == [10] * 2
    assert mesh["mode"] == "requests over 2; heads over 2, each with a copy of the rows"
    assert (mesh["slots_per_device"], mesh["row_bytes_per_device"]) == (1, REGION)
    assert mesh["collectives_carrying_rows"] == 0
    assert "| 2 x 2 | 1 of 2 | 1,472 | 5,888 | yes |" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "3"], "argument --processes: expected a divisor of 8 devices, got 3"),
        (["--devices", "0"], "argument --devices: expected 1 to 64, got 0"),
        (["--devices", "100000"], "argument --devices: expected 1 to 64, got 100000"),
        (["--processes", "65"], "argument --processes: expected 1 to 64, got 65"),
        (["--prompts", "4097"], "argument --prompts: expected 1 to 4096, got 4097"),
        (["--bytes", "2147483648"], "argument --bytes: expected 1 to 2147483647, got 2147483648"),
        (["--split-heads", "0"], "argument --split-heads: expected 1 to 64, got 0"),
        (["--report", "nowhere/r.json"], "argument --report: expected a file in a folder"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        sharded_decode.main(arguments)
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"sharded_decode.py: error: {message}")

"""`hps plan`: what it prints, what it suggests, and its exit codes; and the recordings that it goes by."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from hps.models.writer import write_sparse_model
from hps.parameter_server import HPS
from hps.statistics.key_traces import read_traces
from hps.tensors.bags import Bags
from hps.tools.cli.app import app
from hps.tools.cli.tables.sample import sample_chunks
from hps.tools.profiling.workloads import power_law_keys
from tests.servers.running_service import document_of, model_of

ROWS = {"item": (10_000, 8), "user": (4_000, 4)}


def run(*arguments, code=None):
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "80"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert code in (None, result.exit_code), result.output
    return result


@pytest.fixture
def config(tmp_path):
    for name, (rows, dim) in ROWS.items():
        write_sparse_model(tmp_path / name, sample_chunks(rows, dim, 0))
    dims = {name: dim for name, (_, dim) in ROWS.items()}
    model = model_of("shop", [tmp_path / name for name in ROWS], dims, max_batch_size=1000, gpucacheper=0.1)
    path = tmp_path / "ps.json"
    path.write_text(json.dumps(document_of(model, persistent=tmp_path / "rocksdb")))
    return path


@pytest.fixture
def trace(tmp_path, config):
    path, rng = tmp_path / "keys.trace", np.random.default_rng(1)
    with HPS(config) as server, server.record_trace(path, rate=0.5, hash_keys=True):
        for _ in range(100):
            keys = {name: power_law_keys(rng, 1000, rows, 1.1) for name, (rows, _) in ROWS.items()}
            server.lookup_tables(keys, "shop")
    return path


def test_memory_is_printed_by_tier_and_table(config, tmp_path):
    result = run(config, code=0)
    assert re.search(r"shop +1 +embedding_cache +1,000 rows of table 'item' \(dim 8\) +ram", result.output)
    assert re.search(
        r"shop +1 +persistent_db +10,000 rows of table hps_et.shop.item \(dim 8\) +disk +[45]\d\d kB", result.output
    )
    assert re.search(r"ram .* fits", result.output)
    assert not (tmp_path / "rocksdb").exists()
    assert "…" not in result.output


def test_a_gb_is_as_large_as_it_is_printed_and_a_gib_is_called_so(config):
    def given(size):
        totals = json.loads(run(config, "--ram", size, "--json").output)["totals"]
        return next(total["free_bytes"] for total in totals if total["place"] == "ram")

    sizes = {"64GB": 64 * 10**9, "64G": 64 * 10**9, "1.5TiB": 3 * 2**39, "80000000000": 80 * 10**9}
    assert {size: given(size) for size in sizes} == sizes


@pytest.mark.parametrize("options", [["--disk", "100KB"], ["--ram", "1MB"], ["--gpu-memory", "1K"]])
def test_what_does_not_fit_is_exit_code_1(config, options):
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "device": "auto"}))
    result = run(config, *options, code=1)
    assert "DOES NOT FIT (as given)" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--disk", "much"], "got the size 'much'"),
        (["--goal", "0.9"], "expected --trace or --alpha"),
        (["--devices", "2"], "expected --trace or --alpha"),
        (["--devices", "65"], "64"),
        (["--devices", "2", "--alpha", "1"], "--devices is of GPUs, got device cpu"),
        (["--alpha", "1", "--picture", "plan.gif"], "expected .svg or .png"),
    ],
)
def test_wrong_options_are_exit_code_2(config, options, message):
    result = run(config, *options, code=2)
    assert message in result.stderr


def test_plans_go_by_recorded_keys(config, trace, tmp_path):
    document = json.loads(run(config, "--trace", trace, "--json", "--goal", "0.8", "--picture", tmp_path / "plan.svg").stdout)
    item, user = document["tables"]
    assert (item["rows"], item["recorded"], user["table"]) == (10_000, True, "user")
    assert item["alpha"] == pytest.approx(1.1, abs=0.15)
    rates = [one["hit_rate"] for one in item["curve"]]
    assert rates == sorted(rates)
    assert item["keys_per_s"] > 0
    assert item["configured"]["capacity_rows"] == 1000
    (suggestion,) = document["suggestions"]
    assert suggestion["hit_rate"] >= 0.8
    assert 0 < suggestion["gpucacheper"] < 1
    assert "<svg" in (tmp_path / "plan.svg").read_text()
    assert re.search(r"shop +item +10,000 +1\.\d+ +0\.\d{3}", run(config, "--trace", trace).output)


def test_plans_go_by_a_power_law_and_a_budget(config):
    large, small = (run(config, "--alpha", "1.05", "--budget", size).output for size in ("1GB", "60KB"))
    share = {text: float(re.search(r"gpucacheper ([\d.]+), hit rate", text)[1]) for text in (large, small)}
    assert share[large] == 1
    assert 0.05 < share[small] < 0.15


def test_a_goal_is_reached_by_a_fitted_power_law_or_by_none(config, trace):
    run(config, "--trace", trace, "--fit", "--goal", "0.7", code=0)
    assert "no gpucacheper reaches the goal" in run(config, "--alpha", "0", "--goal", "1").output


def test_every_way_to_look_up_is_recorded(config, tmp_path):
    keys, path = np.arange(10), tmp_path / "keys"
    with HPS(config) as server:
        server.lookup(keys, "shop", 0)
        with server.record_trace(path, rate=1.0):
            server.lookup(keys, "shop", "item")
            server.lookup_tables({"user": keys}, "shop")
            server.lookup_fromdlpack(keys, np.empty((10, 8), np.float32), "shop", 0)
            server.lookup_concatenated(np.arange(20), [10, 10], np.empty(120, np.float32), "shop")
            server.lookup_pooled({"item": Bags(keys, np.array([0, 10]))}, "shop")
        server.lookup(keys, "shop", 0)
        second = server.record_trace(tmp_path / "other", rate=1.0)
        server.lookup(keys, "shop", 0)
    assert {one.table: one.asked for one in read_traces(path)} == {"item": 40, "user": 20}
    assert second._ended  # with the server
    assert [one.asked for one in read_traces(tmp_path / "other")] == [10]


def test_memory_and_hit_rates_are_told_by_row_format(config, trace):
    """int8 takes a third to a quarter of float32 at dim 8 and more at larger ones; the same memory then hits more often."""
    result = run(config, "--trace", trace)
    assert re.search(r"shop +1 +item +persistent_db +float32 +[45]\d\d kB +\d", result.output)
    assert "memory of each table by row format" in result.output
    found = json.loads(run(config, "--trace", trace, "--json").output)["row_formats"]
    assert {(one["table"], one["tier"]) for one in found} == {
        (table, tier) for table in ROWS for tier in ("embedding_cache", "volatile_db", "persistent_db")
    }
    for one in found:
        sizes, rates = one["size_bytes"], one["hit_rates"]
        assert sizes["float32"] > sizes["float16"] == sizes["bfloat16"] >= sizes["int8"]
        assert bool(rates) == (one["tier"] == "embedding_cache")
        if rates:
            assert rates["float32"] <= rates["float16"] <= rates["int8"]
            assert rates["int8"] > rates["float32"] or one["table"] == "user"


def test_the_configured_row_format_is_counted(config):
    def sizes():
        document = json.loads(run(config, "--json").output)
        return {(one["table"], one["tier"]): one["size_bytes"] for one in document["needs"] if one["table"]}, document

    before, document = sizes()
    other = json.loads(config.read_text())
    other["models"][0]["row_dtype"] = ["int8", "bfloat16"]
    config.write_text(json.dumps(other))
    after, _ = sizes()
    by_format = {(one["table"], one["tier"]): one["size_bytes"] for one in document["row_formats"]}
    chosen = {"item": "int8", "user": "bfloat16"}
    assert {key: by_format[key][chosen[key[0]]] for key in after} == after
    assert {key: by_format[key]["float32"] for key in before} == before
    assert "rows of table hps_et.shop~int8.item (int8, 12 bytes a row)" in run(config).output


def test_sharings_of_several_devices_are_compared(config, trace):
    options = ("--trace", trace, "--gpu-memory", "80GB", "--ram", "64GB", "--disk", "1TB")
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "device": "auto"}))
    one, three = run(config, *options), run(config, *options, "--devices", 3)
    assert run(config, *options, "--devices", 1).output == one.output
    before, after = (json.loads(run(config, *options, "--json", *more).output) for more in ([], ["--devices", 3]))
    sharings = after.pop("device_sharings")
    assert after.pop("device_sharings_left_out") == []
    assert after == before
    assert {(entry["table"], entry["sharing"]) for entry in sharings} == {
        (table, sharing) for table in (*ROWS, "all tables") for sharing in ("replicate", "partition", "hot")
    }
    assert {entry["devices"] for entry in sharings} == {3}
    replicate = sharings[0]
    planned = next(need["size_bytes"] for need in before["needs"] if need["table"] == "item" and need["place"] == "gpu")
    assert (replicate["capacity_rows"], replicate["size_bytes"]) == (1000, planned)
    for entry in sharings[:3]:
        shares = r"\?? +".join(f"{entry[name]:.3f}" for name in ("hit_rate", "local", "neighbour", "host"))
        assert re.search(rf"shop +item +{entry['sharing']} +{entry['capacity_rows']:,} .*B +{shares}", three.output), (
            three.output
        )
    assert "3 devices by device sharing" in three.output
    assert three.output.startswith(one.output.rstrip())
    uncertain = [output.count("? fewer than 200 recorded keys") for output in (one.output, three.output)]
    assert uncertain == [1, 2]  # the second is of private rows, half of which were recorded


def test_sharings_that_cannot_be_deployed_are_left_out(config):
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "device": "auto"}))
    options = ("--alpha", 1, "--gpu-memory", "80GB", "--devices", 16)
    result = run(config, *options, code=0)
    assert "model shop version 1: partition and hot left out, since at most 15 devices share rows" in result.output
    assert not re.search(r"item +(partition|hot) ", result.output)
    assert json.loads(run(config, *options, "--json").output)["device_sharings_left_out"] == [
        {"model": "shop", "version": "1", "sharing": sharing, "reason": "at most 15 devices share rows"}
        for sharing in ("partition", "hot")
    ]


def test_other_host_tiers_are_compared(config):
    set_ups = {one["name"]: one for one in json.loads(run(config, "--json", code=0).output)["set_ups"]}
    rocks, files, resident = (set_ups[name] for name in ("rocks_db + hash_map", "row_files", "row_files, resident"))
    vectors = sum(4 * rows * dim for rows, dim in ROWS.values())
    assert rocks["memory_bytes"] > vectors
    assert files["memory_bytes"] == 0
    assert vectors < resident["memory_bytes"] == files["page_cache_bytes"] < files["disk_bytes"]
    assert files["start_s"] < resident["start_s"]
    output = run(config, code=0).output
    assert re.search(r"row_files, resident +\d", output)
    assert "row_files" not in run_without_disk(config)


def test_a_plan_for_another_machine_names_the_gpus_to_compile_kernels_for(config):
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "device": "auto"}))
    assert "sm_90 (H100" in run(config, "--gpu-memory", "80GB", code=0).output
    assert json.loads(run(config, "--gpu-memory", "80GB", "--json", code=0).output)["gpu_kernels"] == []
    config.write_text(json.dumps({**content, "device": "cpu"}))
    assert "sm_90" not in run(config, code=0).output


def run_without_disk(config):
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "persistent_db": {"type": "disabled"}}))
    return run(config).output

"""`prefixfleet plan`: sizes by formula, hit rates that a real pool confirms, an answer in words."""

import json

import pytest
from simulated_conversations import BLOCK, conversations
from trace_forms import FORMS, write_form

from prefixfleet.router.kv_size import attention_kind, kv_bytes_per_token, read_config, shape_of
from prefixfleet.router.plan import main
from prefixfleet.router.reuse import hit_rates, reuses, working_set
from prefixfleet.router.simulated_fleet import chain_of
from prefixfleet.store.errors import ConfigError
from prefixfleet.store.eviction import LruOrder
from prefixfleet.store.pool import SlotPool

LLAMA_70B = {
    "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672,
    "num_attention_heads": 64, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432,
    "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
}  # fmt: skip
MHA = {key: value for key, value in LLAMA_70B.items() if key != "num_key_value_heads"}


@pytest.mark.parametrize(
    ("config", "dtype", "kind", "expected"),
    [
        (LLAMA_70B, None, "GQA", 327_680),  # Mooncake, FAST'25, table 1: 320 KiB
        (LLAMA_70B, "fp8", "GQA", 163_840),
        (LLAMA_70B, "float8_e5m2", "GQA", 163_840),
        (LLAMA_70B, "int8", "GQA", 163_840),
        (LLAMA_70B, "int4", "GQA", 81_920),
        (MHA, None, "MHA", 8 * 327_680),
        (LLAMA_70B | {"num_key_value_heads": 1}, None, "MQA", 327_680 // 8),
        (LLAMA_70B | {"head_dim": 64}, None, "GQA", 327_680 // 2),
        (DEEPSEEK_V3, None, "MLA", 70_272),  # DeepSeek-V3's report: 70 KB a token
    ],
)
def test_a_tokens_kv_has_the_size_of_the_formula(config, dtype, kind, expected):
    assert kv_bytes_per_token(config, dtype) == expected
    assert attention_kind(config) == kind
    assert shape_of(config, dtype).kv_bytes_per_token == expected


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"hidden_size": "x"}', "[" * 100_000]
    + [
        json.dumps(LLAMA_70B | wrong)
        for wrong in (
            {"torch_dtype": "odd"}, {"torch_dtype": ["bfloat16"]}, {"num_hidden_layers": 10**31},
            {"num_experts_per_tok": 2, "moe_intermediate_size": "y"},
            {"num_experts_per_tok": "x"}, {"num_hidden_layers": True},
        )
    ],
    ids=range(11),
)  # fmt: skip
def test_what_is_no_decoders_config_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)

    with pytest.raises(ConfigError):
        shape_of(read_config(tmp_path))


def test_the_text_part_of_a_model_with_eyes_counts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 1, "text_config": LLAMA_70B}))

    assert kv_bytes_per_token(read_config(tmp_path)) == 327_680


@pytest.mark.parametrize("blocks", [5, 60, 200, 5_000])
def test_one_pass_finds_what_a_real_pool_of_that_size_finds(blocks):
    arrivals = conversations(12, 6)
    pool = SlotPool(blocks, LruOrder(), clock := Ticks())
    expected = []
    for arrival in arrivals:
        clock.now += 1
        chain = chain_of(arrival.prompt)
        expected.append(len(chain) if pool.match(chain) == len(chain) else pool.match(chain))
        store(pool, chain)

    found = [request.found(blocks) for request in reuses(arrivals)]

    usable = [(a.prompt.tokens - 1) // BLOCK for a in arrivals]
    # While it stores, a full pool may not let go of the chain it stores: a block more or less
    assert sum(found) == pytest.approx(sum(map(min, expected, usable)), rel=0.05, abs=2)


class Ticks:
    now = 0.0

    def __call__(self):
        return self.now


def store(pool, chain):
    with pool.pin(chain) as here:
        missing = chain[len(here.hashes) :]
        if (short := len(missing) - pool.free_slots) > 0:
            pool.free(pool.choose_victims(short))
        with pool.reserve(here.hashes[-1] if here.hashes else b"", missing) as reservation:
            for block in missing:
                if not reservation.commit(block):
                    break


def test_turns_of_a_conversation_are_drawn_together():
    requests = reuses(conversations(7, 5))

    assert len({request.conversation for request in requests}) == 7


def test_more_memory_never_finds_less_and_the_interval_holds_the_mean():
    requests = reuses(conversations(20, 5))
    rates = [hit_rates(requests, blocks, BLOCK) for blocks in (10, 100, 1_000)]

    assert [r.mean for r in rates] == sorted(r.mean for r in rates)
    assert all(r.low <= r.mean <= r.high for r in rates)


def test_the_working_set_grows_to_every_block():
    arrivals = conversations(5, 4)
    blocks = {block for arrival in arrivals for block in arrival.prompt.ids}

    curve = working_set(arrivals)

    assert curve[-1][1] == len(blocks)
    assert [point[1] for point in curve] == sorted(point[1] for point in curve)


@pytest.fixture
def files(tmp_path):
    trace, model = tmp_path / "trace.jsonl", tmp_path / "config.json"
    lines = [
        {"timestamp": 1000 * a.at_s, "input_length": a.prompt.tokens, "output_length": 1,
         "hash_ids": a.prompt.ids}
        for a in conversations(10, 5)
    ]  # fmt: skip
    trace.write_text("\n".join(map(json.dumps, lines)))
    model.write_text(json.dumps(LLAMA_70B))
    return ["--trace", str(trace), "--model", str(model), "--hardware", "8xA800", "--nodes", "2"]


def test_a_plan_says_in_words_what_its_figures_say(files, tmp_path, capsys):
    assert main([*files, "--html", str(tmp_path / "plan.html")]) == 0

    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("The cache is worth it for this trace")
    assert "PREFIXFLEET_NODE_POOL_BYTES=" in text
    assert "uPlot" in (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_trace_is_planned_for(files, tmp_path, capsys, form):
    trace = write_form(tmp_path / "form.jsonl", form)

    assert main([*files, "--trace", str(trace), "--json"]) == 0

    told = capsys.readouterr()
    found = json.loads(told.out)["memory"][-1]["hit_rate"]["mean"]
    assert found == pytest.approx(0.5, abs=0.02)  # 1 and 2 of 1 + 2 + 3 turns
    assert ("count as a token" in " ".join(told.err.split())) == (form in ("chat", "completions"))


def test_figures_of_a_plan_agree_with_each_other(files, capsys):
    assert main([*files, "--json", "--dram-gb", "5", "--ssd-gb", "100"]) == 0
    plan = json.loads(capsys.readouterr().out)

    runs = plan["simulated"]
    assert runs["without"]["hit_rate"] == 0
    assert runs["shared"]["ttft_s"]["mean"] < runs["without"]["ttft_s"]["mean"]
    dram, ssd = plan["tiers"]
    assert dram["adds_hit_rate"] + ssd["adds_hit_rate"] <= plan["memory"][-1]["hit_rate"]["mean"]
    assert ssd["adds_hit_rate"] > 0


def test_an_ssd_of_known_speed_is_simulated(files, capsys):
    words = [*files, "--dram-gb", "5", "--ssd-gb", "100", "--ssd-bandwidth", "6"]
    assert main([*words, "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["simulated"]
    assert main(words) == 0

    assert runs["shared, with the SSD"]["hit_rate"] > runs["shared"]["hit_rate"]
    assert "With the SSD behind it:" in " ".join(capsys.readouterr().out.split())


def test_the_speed_of_no_ssd_is_refused(files, capsys):
    assert main([*files, "--ssd-bandwidth", "6"]) == 2
    assert "--ssd-gb" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("price", "pays"), [("0.0001", True), ("1e9", False)])
def test_memory_that_costs_more_than_it_saves_is_not_worth_it(files, capsys, price, pays):
    assert main([*files, "--json", "--gb-month", price, "--node-hour", "10"]) == 0

    plan = json.loads(capsys.readouterr().out)
    assert bool(plan["enough"]["gb"]) == pays
    assert bool(plan["settings"]) == pays


def test_one_price_alone_is_refused(files, capsys):
    assert main([*files, "--gb-month", "1"]) == 2
    assert "one price alone" in " ".join(capsys.readouterr().err.split())


CHEAP = ["--gb-month", "1e-6", "--node-hour", "100"]


@pytest.mark.parametrize(
    ("words", "dram_gb", "ssd_gb"),
    [(["--dram-gb", "1"], 1, 0), (["--dram-gb", "1", "--ssd-gb", "500"], 1, 500),
     (["--dram-gb", "5000"], 5000, 0), (["--dram-gb", "1", "--ssd-gb", "2"], 1, 2)],
)  # fmt: skip
@pytest.mark.parametrize("prices", [CHEAP, []])
def test_nothing_beyond_the_memory_that_was_given_is_recommended(
    files, capsys, words, dram_gb, ssd_gb, prices
):
    assert main([*files, "--json", *words, *prices]) == 0

    plan = json.loads(capsys.readouterr().out)
    settings = plan["settings"]
    pool, disk = (
        int(settings.get(f"PREFIXFLEET_NODE_{name}", 0)) for name in ("POOL_BYTES", "SSD_BYTES")
    )
    assert 0 < pool <= dram_gb * 1e9
    assert disk <= ssd_gb * 1e9
    assert bool(disk) == bool(ssd_gb)
    assert ("PREFIXFLEET_NODE_SSD_PATH" in settings) == bool(disk)


def test_that_more_would_pay_is_said_without_recommending_it(files, capsys):
    assert main([*files, "--dram-gb", "1", *CHEAP]) == 0

    assert "More than the 2 GB that you gave would pay too" in " ".join(
        capsys.readouterr().out.split()
    )


def test_an_ssd_that_costs_more_than_it_saves_is_not_used(files, capsys):
    words = [*files, "--json", "--dram-gb", "1", "--ssd-gb", "500", *CHEAP]
    assert main([*words, "--ssd-gb-month", "1e9"]) == 0

    assert "PREFIXFLEET_NODE_SSD_PATH" not in json.loads(capsys.readouterr().out)["settings"]


def test_what_pulling_is_worth_is_the_ratio_of_its_rows(files, capsys):
    assert main([*files, "--json"]) == 0

    plan = json.loads(capsys.readouterr().out)
    own, shared = (
        plan["simulated"][name]["ttft_s"]["mean"] for name in ("own cache only", "shared")
    )
    assert plan["pulling"]["ttft_mean_over_own"] == shared / own


def test_memory_without_room_for_a_block_is_refused(files, capsys):
    assert main([*files, "--dram-gb", "0.002"]) == 2
    assert "room for a block" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("words", [["--dram-gb", "1e9"], ["--nodes", "100000000000"]])
def test_what_no_fleet_has_is_refused(files, capsys, words):
    with pytest.raises(SystemExit):
        main([*files, *words])
    assert f"got {words[1]}, expected" in " ".join(capsys.readouterr().err.split())

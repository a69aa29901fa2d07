"""Configuration: presets, TOML, flags, and the errors for mistakes."""

import dataclasses
import json

import pytest

from gptddp.config import FIELDS, Config, check_world_size, with_preset
from gptddp.errors import ConfigError
from gptddp.flags import differences, flag, from_args, from_saved, from_toml, to_args, to_saved
from gptddp.presets import PRESETS


def test_flags_win_over_toml_and_toml_over_the_preset(tmp_path):
    """Each layer overrides the one below it, field by field."""
    toml = tmp_path / "job.toml"
    toml.write_text('[job]\nname = "x"\n[train]\nlr = 1e-3\nsteps = 7\nbetas = [0.8, 0.9]\n')
    config = from_args(["--config", str(toml), "--steps", "9"])
    config = with_preset(config, accelerator=False)
    assert (config.lr, config.steps, config.betas) == (1e-3, 9, (0.8, 0.9))
    assert (config.preset, config.n_layer) == ("tiny", 4)


def test_the_default_preset_follows_the_hardware():
    """Without an accelerator the preset is tiny, with one it is gpt2."""
    assert with_preset(Config(), accelerator=False).n_embd == 128
    assert with_preset(Config(), accelerator=True).n_embd == 768


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_valid_and_sets_every_field(preset):
    """A preset passes its own checks and leaves only the hardware's fields unset."""
    config = with_preset(Config(preset=preset), accelerator=False)
    left_open = {name for name in FIELDS if getattr(config, name) is None}
    assert left_open <= {"precision", "matmul", "attention", "threads", "device", "metrics_port"}
    check_world_size(config, config.lanes)


def test_muon_has_a_rate_of_its_own_where_it_was_measured():
    """Muon has four times AdamW's rate in tiny presets, AdamW's in others; a given rate wins."""
    given = ("tiny", None), ("modern-tiny", None), ("gpt2", None), ("tiny", 1e-3)
    configs = [Config(preset=preset, optimizer="muon", lr=lr) for preset, lr in given]
    rates = [with_preset(config, accelerator=False).lr for config in configs]
    assert rates == [1.2e-2, 1.2e-2, PRESETS["gpt2"]["lr"], 1e-3]


@pytest.mark.parametrize(("preset", "depth"), [("gpt2", 12), ("modern", 12), ("autoresearch", 8)])
def test_a_preset_at_its_own_depth_differs_only_in_length(preset, depth):
    """`--depth` with a preset's own depth keeps its shape, batch and rate: they are known good."""
    plain, dialled = (
        dataclasses.asdict(with_preset(Config(preset=preset, depth=it), accelerator=True))
        for it in (0, depth)
    )
    other = {name for name in plain if plain[name] != dialled[name]}
    assert other <= {"depth", "steps", "warmup_steps"}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_depth_gives_a_valid_model(preset):
    """At every depth of every preset, heads, lanes and windows fit, and all values are recorded."""
    for depth in (*range(1, 33), 2**12):
        c = with_preset(Config(preset=preset, depth=depth), accelerator=False)
        assert c.n_layer == depth and c.n_embd >= 64 * depth and c.warmup_steps <= c.steps // 10
        assert c.batch * c.seq_len * c.steps >= 20 * 12 * c.n_layer * c.n_embd**2
        saved = json.loads(json.dumps(to_saved(c)))
        assert with_preset(from_saved("ledger", saved), accelerator=True) == c


def test_flags_beside_depth_win():
    """Given values override those of `--depth`, and batch, steps and warm-up follow them."""
    c = with_preset(Config(depth=12, preset="gpt2", seq_len=512, lanes=7), accelerator=True)
    assert (c.seq_len, c.lanes, c.batch) == (512, 7, 959)
    assert c.steps == -(-20 * 12 * 12 * 768**2 // (959 * 512))
    c = with_preset(Config(depth=2, n_embd=64, n_head=2, lr=1e-2, steps=50), accelerator=False)
    assert (c.n_layer, c.n_embd, c.kv_heads, c.lr, c.steps) == (2, 64, 2, 1e-2, 50)
    assert c.warmup_steps == 5


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize(
    ("fields", "rate"),
    [
        ({"n_embd": 32}, 3e-4),
        ({"n_embd": 768}, 6e-5),
        ({"n_embd": 1024, "preset": "tiny"}, 3e-5),
        ({"n_embd": 4096}, 2e-5),
        ({"n_embd": 128, "optimizer": "muon"}, 1.2e-3),
        ({"n_embd": 768, "optimizer": "muon"}, 6e-5),
        ({"n_embd": 768, "lr": 1e-3}, 1e-3),
    ],
)
def test_trained_weights_have_a_tenth_of_the_rate_of_their_width(fields, rate, accelerator):
    """With trained weights the rate follows the width, not the preset that the machine selects."""
    config = Config(init_sha256="0" * 64, n_head=2, **fields)
    config = with_preset(config, accelerator=accelerator)
    assert config.lr == pytest.approx(rate)


def test_flags_written_from_a_configuration_give_it_back():
    """to_args is the inverse of from_args."""
    config = with_preset(Config(data="d", run_dir="r", betas=(0.8, 0.99)), accelerator=False)
    assert from_args(to_args(dataclasses.asdict(config))) == config


def test_flags_and_toml_accept_units_and_numbers_are_recorded(tmp_path):
    """1M becomes 1000000 and 5m becomes 300.0, in saved configurations and in flags of pods."""
    path = tmp_path / "job.toml"
    path.write_text('max_tokens = "1M"\nmax_time = "5m"\nsteps = 1e3\ncheckpoint_every = 90\n')
    (tmp_path / "text.toml").write_text('steps = "1e3"')
    assert from_toml(tmp_path / "text.toml") == {"steps": 1000}
    for args in (
        ["--config", str(path)],
        ["--max-tokens", "1M", "--max-time", "5m", "--steps", "1e3", "--checkpoint-every", "1m30s"],
    ):
        saved = to_saved(from_args(args))
        found = [saved[name] for name in ("max_tokens", "max_time", "steps", "checkpoint_every")]
        assert repr(found) == "[1000000, 300.0, 1000, 90.0]"
        assert "--steps 1000 --max-tokens 1000000 --max-time 300.0" in " ".join(to_args(saved))
    with pytest.raises(ConfigError, match="cannot be used"):
        from_saved("ledger", {"max_tokens": "1M"})


def test_a_flag_without_a_value(tmp_path):
    """--from-scratch takes no value; in TOML it is true or false."""
    assert not from_args([]).from_scratch and from_args(["--from-scratch"]).from_scratch
    assert to_args({"from_scratch": True}) == ["--from-scratch"]
    assert to_args({"from_scratch": False}) == []
    for text, value in (("true", True), ("false", False)):
        (tmp_path / "job.toml").write_text(f"[train]\nfrom_scratch = {text}\n")
        assert from_args(["--config", str(tmp_path / "job.toml")]).from_scratch is value
    (tmp_path / "job.toml").write_text("[train]\nfrom_scratch = 1\n")
    with pytest.raises(ConfigError, match="from_scratch is 1: it must be a value of type bool"):
        from_args(["--config", str(tmp_path / "job.toml")])


def test_lanes_and_batch_follow_each_other():
    """If one of the two is given, the preset's value of the other is fitted to it."""
    assert with_preset(Config(batch=10), accelerator=False).lanes == 10
    assert with_preset(Config(lanes=7), accelerator=False).batch == 49


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--lerning-rate", "1"], "unknown option '--lerning-rate'"),
        (["--step", "1"], "did you mean '--steps'"),
        (["--hlep"], "did you mean '--help'"),
        (["--confg", "x"], "did you mean '--config'"),
        (["--steps", "many"], "--steps is 'many': it must be a whole number"),
        (["--steps", "1.5"], "--steps is '1.5': it must be a whole number"),
        (
            ["--max-tokens", "5m"],
            "--max-tokens is '5m': it must be a whole number, as in 400, 10k, 1",
        ),
        (["--max-tokens", "1e99"], "it must be at most 9007199254740992"),
        (
            ["--max-time", "5M"],
            "--max-time is '5M': it must be a time, as in 90 (seconds), 45s, 10m",
        ),
        (["--max-time", "-5"], "max_time is -5.0: it must be at least 0"),
        (["--steps", "0"], "steps is 0: it must be at least 1"),
        (["--steps"], "argument --steps: expected one argument"),
        (["--data", "--steps"], "argument --data: expected one argument"),
        (["--from-scratch=1"], "argument --from-scratch: ignored explicit argument '1'"),
        (["--lr", "nan"], "lr is nan"),
        (["--betas", "0.9"], "--betas is '0.9'"),
        (["--batch", "10", "--lanes", "4"], "use a batch of 8 or 12, or lanes that divide 10"),
        (["--batch", "3", "--lanes", "4"], "use a batch of 4"),
        (["--n-embd", "100", "--n-head", "3"], "use 99 or 102"),
        (["--n-head", "6", "--kv-heads", "4"], "use --kv-heads 3"),
        (["--positions", "rope", "--n-head", "4", "--n-embd", "12"], "use --n-embd 16"),
        (["--windows", "SXL"], "a pattern of S (half a row) and L"),
        (["--windows", ""], "a pattern of S (half a row) and L"),
        (["--extras", "autoresearch", "--head", "tied"], "use --head untied"),
        (["--softcap", "-1"], "softcap is -1.0: it must be at least 0"),
        (["--softcap", "1e39"], "softcap is 1e+39: it must be at most 1000000.0"),
        (["--softcap", "1e-46"], "softcap is 1e-46: use 0 for none, or at least 0.01"),
        (["--final-lr", "5"], "final_lr is 5.0: it must be at most 1"),
        (["--metrics-port", "65536"], "metrics_port is 65536: it must be at most 65535"),
        (["--norm", "batchnorm"], "use one of layernorm, rmsnorm"),
        (["--dropout", "1"], "below 1"),
        (["--warmdown", "1.5"], "it must be a part of the run, at most 1"),
        (["--cache-dir", ""], "cache_dir is empty: use a folder"),
        (["--config", ""], "cannot read the configuration"),  # as from an unset shell variable
        (["--config", "nowhere.toml"], "cannot read the configuration nowhere.toml"),
    ],
)
def test_a_wrong_flag_is_refused_with_the_fix(args, message):
    """Every mistake in a flag names the field, the rule and, where there is one, the fix."""
    with pytest.raises(ConfigError) as error:
        from_args(args)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nstep = 1\n", "unknown key 'step': did you mean 'steps'?"),
        ("[train]\nsteps = '1'\n", "steps is '1': it must be a value of type int"),
        ("[train]\nsteps = 1.5\n", "steps is '1.5': it must be a whole number"),
        ("[train]\nsteps = '5m'\n", "steps is '5m': it must be a whole number"),
        ("[train]\nmax_time = '5'\n", "max_time is '5': it must be a value of type float"),
        ("steps = true\n", "must be a value of type int"),
        ("[train]\nmax_time = '1m30'\n", "max_time is '1m30': it must be a time, as in"),
        ("[train]\nsteps = '1e-3'\n", "steps is '1e-3': it must be a whole number, as in"),
        ("steps = = 1\n", "is not valid TOML"),
        ("steps = 10k\n", 'numbers with a unit too, as in "10k"'),
        ("train = 3\n", "it must be a table"),
    ],
)
def test_a_wrong_toml_file_is_refused_with_the_fix(tmp_path, text, message):
    """A mistake in the file names the file, the key and the rule."""
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        from_args(["--config", str(path)])
    assert message in str(error.value) and str(path) in str(error.value)


def test_more_workers_than_lanes_are_refused():
    """A rank without a lane would have nothing to train on."""
    with pytest.raises(ConfigError, match="at most 4 workers"):
        check_world_size(Config(lanes=4, batch=4), 5)


def test_only_fixed_fields_count_as_differences():
    """Another seed is another run; another log interval is not."""
    old = dataclasses.asdict(with_preset(Config(), accelerator=False))
    assert differences(old, {**old, "seed": 1, "log_every": 3}) == ["seed: 1337 -> 1"]


def test_no_flag_is_taken_by_torchrun():
    """torchrun accepts abbreviated options even after the script; no flag of ours may be one."""
    from torch.distributed.run import get_args_parser

    theirs = [o for a in get_args_parser()._actions for o in a.option_strings]
    clashes = [(flag(n), o) for n in FIELDS for o in theirs if o.startswith(flag(n))]
    assert not clashes

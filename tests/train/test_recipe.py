"""Recipes are read strictly: what nobody knows or cannot be is an error that says what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from proteus_lm.config import ProteusConfig
from proteus_lm.model import ProteusForCausalLM
from proteus_lm.presets import preset_fields
from proteus_lm.train.recipe import Recipe, RecipeError, load_recipe, make_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
GOOD = """
model: {mixer: attention, hidden_size: 32, num_heads: 2, head_dim: 16, num_hidden_layers: 1}
data: {path: some/folder, context: 64}
train: {steps: 100, lr: 4e-4, eps: 1E-9, betas: [0.9, 0.99], warmup: 10}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def load(tmp_path: Path, text: str, *overrides: str) -> Recipe:
    return load_recipe(write(tmp_path, text), overrides)


def test_a_recipe_is_read_with_its_defaults(tmp_path):
    recipe = load(tmp_path, GOOD)
    assert recipe.data.path == "some/folder" and recipe.data.context == 64
    assert recipe.train.betas == (0.9, 0.99) and recipe.train.clip == 1.0 and recipe.train.precision == "fp32"
    assert recipe.model["hidden_size"] == 32


def test_numbers_with_an_exponent_and_no_dot_are_numbers(tmp_path):
    recipe = load(tmp_path, GOOD, "train.weight_decay=1e-1", "train.clip=5E+0")
    assert (recipe.train.lr, recipe.train.eps, recipe.train.weight_decay, recipe.train.clip) == (4e-4, 1e-9, 0.1, 5.0)


def test_overrides_are_yaml_values_and_win(tmp_path):
    recipe = load(tmp_path, GOOD, "train.lr=1e-3", "train.steps=20", "train.clip=null", "data.path=a=b", "train.tensorboard=false")
    assert (recipe.train.lr, recipe.train.steps, recipe.train.clip) == (1e-3, 20, None)
    assert recipe.data.path == "a=b" and recipe.train.tensorboard is False


def test_a_field_set_twice_is_an_error_that_names_it(tmp_path):
    with pytest.raises(RecipeError, match=r"--set gives train\.lr twice, the second time as '2e-3'; give it once"):
        load(tmp_path, GOOD, "train.lr=1e-3", "train.steps=20", "train.lr=2e-3")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.lrr=1", ["'lrr'", "section train", "did you mean lr"]),
        ("train.warm_up=1", ["section train", "did you mean warmup"]),
        ("data.contxt=1", ["section data", "did you mean context"]),
        ("model.memory_block=4", ["section model", "did you mean memory_blocks"]),
        ("modle.mixer=comba", ["unknown section", "did you mean model"]),
        ("train.lr", ["section.key=value"]),
        ("lr=1", ["section.key=value"]),
        ("train.lr=[1", ["not readable YAML"]),
    ],
)
def test_an_unknown_key_names_the_nearest_right_one_and_the_section(tmp_path, override, words):
    with pytest.raises(RecipeError) as error:
        load(tmp_path, GOOD, override)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.steps=1.5", ["train.steps", "1.5", "whole number"]),
        ("train.steps=true", ["train.steps", "whole number"]),
        ("train.lr=fast", ["train.lr", "'fast'", "a number"]),
        ("train.lr=.inf", ["train.lr", "finite"]),
        ("train.betas=0.9", ["train.betas", "list of 2"]),
        ("train.compile=1", ["train.compile", "true or false"]),
        ("train.precision=bf61", ["train.precision", "fp32, bf16", "did you mean bf16"]),
        ("data.path=3", ["data.path", "text"]),
        ("train.steps=null", ["train.steps", "whole number"]),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error(tmp_path, override, words):
    with pytest.raises(RecipeError) as error:
        load(tmp_path, GOOD, override)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "override",
    [
        "train.steps=0",
        "train.lr=0",
        "train.lr=-1e-3",
        "train.min_lr_ratio=1.5",
        "train.betas=[0.9, 1.0]",
        "train.warmup=101",
        "train.clip=0",
        "train.keep=0",
        "train.seed=-1",
        "train.micro_batch_size=3",
        "train.save_every=0",
        "data.context=0",
        "data.context=-5",
    ],
)
def test_a_value_outside_its_rule_is_an_error_that_names_it(tmp_path, override):
    with pytest.raises(RecipeError, match=override.split("=")[0].replace(".", r"\.") + " is .*; it must be"):
        load(tmp_path, GOOD, override)


def test_missing_keys_are_named(tmp_path):
    with pytest.raises(RecipeError, match=r"section train lacks steps.*--set train\.steps"):
        load(tmp_path, "data: {path: a, context: 4}")


def test_a_key_given_twice_is_an_error(tmp_path):
    with pytest.raises(RecipeError, match="'lr' is given twice"):
        load(tmp_path, "data: {path: a, context: 4}\ntrain:\n  steps: 1\n  lr: 1\n  lr: 2\n")


@pytest.mark.parametrize("text", ["", "- a", "model: 3", "data: [1]", "{"])
def test_what_is_not_sections_of_keys_is_an_error(tmp_path, text):
    with pytest.raises(RecipeError, match=r"recipe\.yaml"):
        load(tmp_path, text)


def test_no_file_says_what_to_give(tmp_path):
    with pytest.raises(FileNotFoundError, match="no recipe at"):
        load_recipe(tmp_path / "none.yaml")


def test_python_objects_in_yaml_are_never_made(tmp_path):
    with pytest.raises(RecipeError, match="not readable YAML"):
        load(tmp_path, "model: !!python/object/apply:os.system ['true']")


def test_a_saved_recipe_reads_back_equal(tmp_path):
    recipe = load(tmp_path, GOOD, "train.lr=3e-5", "train.micro_batch_size=2")
    recipe.save(tmp_path / "saved.yaml")
    assert load_recipe(tmp_path / "saved.yaml") == recipe


def test_an_unknown_mixer_names_the_choices(tmp_path):
    with pytest.raises(RecipeError, match=r"attention.*comba.*titans"):
        load(tmp_path, GOOD, "model.mixer=mamba")


def test_more_blocks_than_the_memory_has_coordinates_is_an_error(tmp_path):
    with pytest.raises(RecipeError, match="model"):
        load(tmp_path, GOOD, "model.mixer=comba", "model.memory_blocks=17")


def test_the_schedule_of_the_memory_follows_the_training_context(tmp_path):
    recipe = load(tmp_path, GOOD, "model.mixer=comba", "model.memory_blocks=4")
    assert recipe.model["memory_context"] == 64
    assert (
        load(tmp_path, GOOD, "model.mixer=comba", "model.memory_blocks=4", "model.memory_context=32").model["memory_context"] == 32
    )


def test_a_memory_that_training_would_never_open_is_an_error(tmp_path):
    with pytest.raises(RecipeError, match=r"memory_context is 128 and data\.context is 64"):
        load(tmp_path, GOOD, "model.mixer=comba", "model.memory_blocks=4", "model.memory_context=128")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_that_ships_is_right(path):
    recipe = load_recipe(path)
    assert recipe.train.steps > 0
    assert ProteusConfig(**recipe.model).memory_context == recipe.data.context


PAPER = sorted(RECIPES.glob("paper-*.yaml"))


def test_the_papers_runs_are_there():
    rows = ("attention", "retnet", "deltanet", "swla", "comba", "titans", "hope", "swla-e16", "comba-e16", "titans-e16", "hope-e16")
    assert {path.stem for path in PAPER} == {f"paper-{size}-{row}" for size in ("760m", "1.3b") for row in rows}


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_the_papers_runs_have_its_sizes_and_tokens(path):
    _, size, row, *blocks = path.stem.split("-")
    recipe = load_recipe(path)
    model, train = ProteusConfig(**recipe.model), recipe.train
    tokens, parameters = {"760m": (50e9, 760e6), "1.3b": (100e9, 1.3e9)}[size]
    assert train.batch_size * recipe.data.context * train.steps == pytest.approx(tokens, rel=1e-4)
    assert train.batch_size * recipe.data.context == 2**19 and recipe.data.context == 8192
    assert ProteusForCausalLM.parameter_count(model) == pytest.approx(parameters, rel=0.03)
    assert (train.lr, train.schedule, train.weight_decay, train.precision) == (4e-4, "cosine", 0.1, "bf16")
    assert (model.mixer, model.channel) == (("attention", "chain") if row == "hope" else (row, "mlp"))
    gated = model.update_blocks if row == "hope" else model.memory_blocks
    assert gated == (16 if blocks else 1) and model.memory_context == 8192


def test_a_preset_stands_for_its_fields_and_is_saved_as_them(tmp_path):
    text = GOOD.replace("{mixer: attention, hidden_size: 32, num_heads: 2, head_dim: 16, num_hidden_layers: 1}", "{MODEL}")
    recipe = load(tmp_path, text.replace("{MODEL}", "{preset: 20M, mixer: comba, memory_blocks: 16}"))
    assert recipe.model == preset_fields("20M", "comba", memory_blocks=16, memory_context=64)
    recipe.save(tmp_path / "saved.yaml")
    saved = (tmp_path / "saved.yaml").read_text()
    assert "preset" not in saved and "intermediate_size: 640" in saved and load_recipe(tmp_path / "saved.yaml") == recipe
    fewer = load(tmp_path, text.replace("{MODEL}", "{preset: 20M, mixer: comba}"), "model.num_hidden_layers=2")
    assert fewer.model["num_hidden_layers"] == 2 and fewer.model["intermediate_size"] == 640
    for model, words in {
        "{preset: 20M}": "needs a mixer",
        "{preset: 20MB, mixer: comba}": "no preset of size '20MB'; did you mean 20M",
        "{preset: 760, mixer: comba}": "no preset of size 760",
        "{preset: 20M, mixer: combo}": "'combo'; did you mean comba",
        "{presett: 20M, mixer: comba}": "did you mean preset",
        "{preset: 20M, mixer: comba, window: 9}": "window",
    }.items():
        with pytest.raises(RecipeError, match=words):
            load(tmp_path, text.replace("{MODEL}", model))


def test_the_two_demo_recipes_differ_in_the_blocks_of_memory_only():
    base, scheduled = (load_recipe(RECIPES / f"demo-titans-e{blocks}.yaml").to_dict() for blocks in (1, 8))
    assert (base["model"].pop("memory_blocks"), scheduled["model"].pop("memory_blocks")) == (1, 8)
    assert base == scheduled


def test_sections_that_are_missing_are_asked_for():
    with pytest.raises(RecipeError, match="section data lacks path"):
        make_recipe({"train": {"steps": 1}})


WAVE = """
model: {mixer: titans, titans_variant: mac, segment_length: 16, chunk_size: 8, hidden_size: 32, num_heads: 2, positions: window}
data: {path: some/folder, context: 96}
train: {steps: 100, wave: 3}
"""


def test_a_wave_of_whole_segments_is_followed_and_saved(tmp_path):
    recipe = load(tmp_path, WAVE)
    assert recipe.train.wave == 3 and make_recipe(recipe.to_dict()) == recipe
    for wave in (0, 1, 2, 6):
        assert load(tmp_path, WAVE, f"train.wave={wave}").train.wave == wave
    assert load(tmp_path, WAVE, "train.wave=0", "model.positions=document", "train.gradient_checkpointing=true").train.wave == 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.wave=-1"], ["train.wave is -1", "0 or more"]),
        (
            ["train.wave=2", "model.positions=document"],
            ["train.wave is 2", "packed documents", "model.positions=window or train.wave=0"],
        ),
        (["train.gradient_checkpointing=true"], ["train.wave is 3", "gradient_checkpointing", "use one of them"]),
        (["train.wave=4"], ["data.context 96", "multiples of model.segment_length (16)", "train.wave=3", "multiple of 64"]),
        (
            ["train.wave=5", "data.context=80", "model.segment_length=32"],
            ["segment_length (32)", "train.wave=0", "multiple of 160"],
        ),
    ],
)
def test_a_wave_that_cannot_run_is_refused_with_a_remedy(tmp_path, overrides, words):
    with pytest.raises(RecipeError) as error:
        load(tmp_path, WAVE, *overrides)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("mixer", "wave", "context", "said"),
    [
        ("titans", 2, 128, None),
        ("titans", 4, 128, "multiples of model.chunk_size (64); use train.wave=2, or a data.context that is a multiple of 256"),
        ("comba", 5, 15, None),
        ("comba", 4, 15, "two tokens or more; use train.wave=3, or a data.context that is a multiple of 8"),
        ("comba", 8, 8, "two tokens or more; use train.wave=4, or a data.context that is a multiple of 16"),
    ],
)
def test_pieces_of_a_wave_are_whole_chunks_of_the_memory_where_it_has_them(mixer, wave, context, said):
    model = {"mixer": mixer, "hidden_size": 32, "num_heads": 2, "positions": "window"}
    sections = {"model": model, "data": {"path": "some/folder", "context": context}, "train": {"steps": 1, "wave": wave}}
    if said is None:
        assert make_recipe(sections).train.wave == wave
    else:
        with pytest.raises(RecipeError) as error:
            make_recipe(sections)
        assert said in str(error.value)

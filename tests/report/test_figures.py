import numpy as np
import pytest
from PIL import Image

from proteus_lm.report import figures
from proteus_lm.report.figures import draw_loss_by_position, draw_memory, draw_training, running_mean

from .doubles import run_report


def colours_in(path) -> dict[tuple[int, int, int], float]:
    """Share of the picture that each colour takes."""
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    colours, counts = np.unique(pixels, axis=0, return_counts=True)
    return {tuple(int(v) for v in c): n / len(pixels) for c, n in zip(colours, counts)}


def rgb(colour: str) -> tuple[int, int, int]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


@pytest.mark.parametrize("draw", [draw_loss_by_position, draw_training])
def test_every_run_is_drawn_in_its_own_colour(draw, tmp_path):
    runs = [run_report("e1", 1), run_report("e8", 8, worse=0.3), run_report("e4", 4, worse=0.6)]
    draw(runs, tmp_path / "figure.png")
    found = colours_in(tmp_path / "figure.png")
    assert {rgb(c) for c in figures.colours(runs)} <= found.keys()


def test_a_single_run_can_be_drawn(tmp_path):
    run = [run_report("e1", 1)]
    for draw in (draw_loss_by_position, draw_training, draw_memory):
        draw(run, tmp_path / "figure.png")
        assert Image.open(tmp_path / "figure.png").size[0] > 500


def test_locked_blocks_are_grey_in_the_picture_of_the_memory(tmp_path):
    draw_memory([run_report("e1", 1)], tmp_path / "one.png")
    draw_memory([run_report("e1", 1), run_report("e8", 8)], tmp_path / "two.png")
    # Letters are smoothed with a few grey pixels; half of one of two pictures is locked.
    assert colours_in(tmp_path / "one.png").get(rgb("#d9d9d9"), 0) < 0.001
    assert colours_in(tmp_path / "two.png")[rgb("#d9d9d9")] > 0.05


def test_metrics_without_losses_still_give_a_figure(tmp_path):
    draw_training([run_report(metrics=[{"step": 1, "loss": None}])], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").exists()


def test_a_figure_that_cannot_be_written_names_its_path_and_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match=r"no-folder/figure\.png"):
        draw_training([run_report()], tmp_path / "no-folder" / "figure.png")
    assert list(tmp_path.iterdir()) == []


def test_the_running_mean_is_of_the_values_up_to_each_step():
    assert running_mean(np.array([1.0, 2.0, 3.0, 4.0]), 2).tolist() == [1.0, 1.5, 2.5, 3.5]

"""metrics.jsonl holds each step once, whatever was cut short; the console is lines where there is no terminal."""

from __future__ import annotations

import io
import json
import math
import threading

import pytest
from rich.console import Console
from tensorboard.summary.writer.record_writer import RecordWriter

from proteus_lm.run import read_metrics
from proteus_lm.train.metrics import Metrics, Screen, perplexity, said_once


def record(step, **more):
    return {"step": step, "loss": 2.0 + step, "lr": 0.1, "gradient_norm": 1.0, **more}


def write(tmp_path, start, steps, **more):
    metrics = Metrics(tmp_path, start, tensorboard=False)
    for step in steps:
        metrics.write(record(step, **more))
    metrics.close()


def test_lines_after_the_checkpoint_go_so_that_none_is_doubled(tmp_path):
    write(tmp_path, 0, range(1, 8))
    write(tmp_path, 5, range(6, 9))
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 9))


def test_a_last_line_cut_short_by_a_kill_is_left_out_and_then_replaced(tmp_path):
    write(tmp_path, 0, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-7])
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    write(tmp_path, 2, [3])
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


def test_a_spoilt_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2 of"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path):
    write(tmp_path, 0, [1], validation_loss=math.nan, memory_norm=[[math.inf, 1.0]])
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert json.loads(text)["validation_loss"] is None and json.loads(text)["memory_norm"] == [[None, 1.0]]


def test_tensorboard_gets_every_number_and_the_memory_by_layer_and_block(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(tmp_path, 0, tensorboard=True)
    metrics.write(record(1, memory_norm=[[1.0, 2.0], [3.0, 4.0]], tokens_per_second=5.0))
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    names = set(events.Tags()["scalars"])
    assert {"loss", "lr", "gradient_norm", "tokens_per_second", "memory_norm/layer-1/block-0"} <= names
    assert events.Scalars("memory_norm/layer-1/block-0")[0].value == 3.0


def test_elsewhere_than_on_a_terminal_there_are_plain_lines_at_log_steps():
    out = io.StringIO()
    screen = Screen(10, console=Console(file=out, width=200))
    screen.step(record(1), line=False)
    screen.step(record(2), line=True)
    screen.step(record(3, validation_loss=1.5), line=False)
    screen.close()
    lines = out.getvalue().splitlines()
    assert [line.split("  loss")[0] for line in lines] == ["step  2/10", "step  3/10"]
    assert "validation 1.5000" in lines[1] and "\x1b" not in out.getvalue()


def test_a_terminal_shows_a_bar():
    out = io.StringIO()
    screen = Screen(10, console=Console(file=out, force_terminal=True, width=120))
    screen.step(record(4), line=True)
    screen.close()
    assert "4/10" in out.getvalue() and "\x1b" in out.getvalue()


def test_perplexity_of_a_huge_loss_is_infinite_and_of_no_number_none():
    assert perplexity(1000.0) == math.inf and math.isnan(perplexity(math.nan))


class FullFile(io.StringIO):
    def flush(self):
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_named_with_the_file(tmp_path):
    metrics = Metrics(tmp_path, 0, tensorboard=False)
    metrics._file.close()
    metrics._file = FullFile()
    with pytest.raises(OSError, match=r"could not write .*metrics\.jsonl .*No space left.*make space"):
        metrics.write(record(1))


def test_a_write_that_fails_in_tensorboards_thread_is_raised_and_not_printed(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(threading, "excepthook", lambda failure: shown.append(failure.exc_type))
    with said_once():
        metrics = Metrics(tmp_path, 0, tensorboard=True)
        monkeypatch.setattr(RecordWriter, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            metrics.write(record(1))
            metrics.close()
        other = threading.Thread(target=lambda: 1 / 0)
        other.start()
        other.join()
    assert shown == [ZeroDivisionError]


def test_wandb_gets_every_number_and_is_named_when_missing(tmp_path, monkeypatch):
    import sys
    from types import SimpleNamespace

    logged, opened = [], []
    run = SimpleNamespace(log=lambda numbers, step: logged.append((step, numbers)), finish=lambda: logged.append("finished"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: opened.append(options) or run))
    metrics = Metrics(tmp_path, 0, tensorboard=False, wandb="memory")
    metrics.write({"step": 1, "loss": 2.5})
    metrics.close()
    assert opened[0]["project"] == "memory" and opened[0]["id"] == tmp_path.name
    assert logged[0][0] == 1 and 2.5 in logged[0][1].values() and logged[-1] == "finished"
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"proteus-lm\[wandb\]"):
        Metrics(tmp_path, 0, tensorboard=False, wandb="memory")

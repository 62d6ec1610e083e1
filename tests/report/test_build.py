from pathlib import Path

import pytest

from proteus_lm.report.build import run_names


def test_runs_are_called_by_their_folders_or_by_what_tells_them_apart():
    assert run_names([Path("runs/a"), Path("runs/b")]) == ["a", "b"]
    assert run_names([Path("x/run"), Path("y/run")]) == ["x/run", "y/run"]


def test_no_run_and_a_run_given_twice_are_refused():
    with pytest.raises(ValueError, match="no run to report"):
        run_names([])
    with pytest.raises(ValueError, match="is given twice"):
        run_names([Path("runs/a"), Path("runs/../runs/a")])

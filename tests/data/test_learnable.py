"""What the planted model promises to learners: the demo recipe gets nearly all of the gain."""

import pytest

from tests.data.run_command import run


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "options"), [(0, []), (4, ["--weights"])])
def test_the_demo_recipe_reaches_nine_tenths_of_the_gain_on_500k_rows(tmp_path, seed, options):
    made = run("data", "synth", tmp_path / "logs", "--rows", 500_000, "--seed", seed, *options)
    data = [f"--set=data.{part}={tmp_path / 'logs' / part}" for part in ("train", "test")]
    trained = run("train", "pipelines/recipes/demo.toml", *data, "--out", tmp_path / "run")
    share = (trained["auc"] - 0.5) / (made["best_auc"] - 0.5)
    assert share >= 0.90  # 0.967 and 0.975 when this was written
    assert share < 1.02  # more than that would be a leak

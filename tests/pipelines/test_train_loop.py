"""The loop: masked loss, schedule on both optimizers, early stopping, and positions that add up."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipelines.evaluation import evaluate
from pipelines.feed import DeviceFeed
from pipelines.position import Position
from pipelines.reading import SourceBatch
from pipelines.step import EagerStep, masked_log_loss, torch_optimizer
from pipelines.train_loop import Callbacks, TrainConfig, TrainLoop, total_steps
from pipelines.training_state import TrainingState
from tests.pipelines.conftest import SCHEMA, click_rows
from tpurec.embeddings import fused_collections, to_torch
from tpurec.errors import TpurecError
from tpurec.features import Ladder, pack
from tpurec.features.transform import Transformer
from tpurec.models import ModelConfig, TablesConfig, build_model, table_optimizer
from tpurec.sharding.checkpoint import Checkpointer

LADDER = Ladder.for_batch(32)
TABLES = TablesConfig(embedding_dim=4, learning_rate=0.1)
MODEL = ModelConfig("dlrm", dense_hidden_sizes=[8], over_hidden_sizes=[8])


def a_model(tables=TABLES):
    return build_model(MODEL, tables, SCHEMA, seed=1, optimizer=table_optimizer(tables))


def batches(count: int, rows: int = 32, seed: int = 0) -> list[SourceBatch]:
    columns = Transformer(SCHEMA)(click_rows(count * rows, seed))
    return [SourceBatch(pack(columns.slice(n * rows, (n + 1) * rows), 32, LADDER)) for n in range(count)]


def a_step(model, config):
    return EagerStep(model, torch_optimizer(model, config.optimizer, config.learning_rate, config.weight_decay))


def a_loop(model, config=None, batches_per_epoch=10, every=1000, rate=0.1, step=None):
    config = config or TrainConfig(batch_size=32, learning_rate=0.01)
    return TrainLoop(step or a_step(model, config), config, rate, batches_per_epoch, every)


def ready(packed):
    return next(DeviceFeed()([SourceBatch(packed)]))


def nothing(*_):
    return None


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_row_with_a_missing_label_leaves_loss_gradient_and_metrics_and_is_counted():
    """case 32: labels [1, NaN, 0]"""
    logits = torch.tensor([0.3, 5.0, -0.2], requires_grad=True)
    columns = Transformer(SCHEMA)(click_rows(3).set_column(0, "click", [[1.0, float("nan"), 0.0]]))
    batch = to_torch(packed := pack(columns, 3, LADDER))
    loss = masked_log_loss(logits, batch.labels, batch.valid, torch.tensor(2.0))
    loss.backward()
    expected = F.binary_cross_entropy_with_logits(torch.tensor([0.3, -0.2]), torch.tensor([1.0, 0.0]))
    assert loss.item() == pytest.approx(float(expected))
    assert logits.grad[1] == 0 and (logits.grad[[0, 2]] != 0).all()
    assert packed.num_missing_labels == 1
    position = Position()
    loop = a_loop(a_model(), batches_per_epoch=1)
    loop.run([SourceBatch(packed)], position, Callbacks(nothing, None, nothing))
    assert (position.rows_seen, position.missing_labels, position.label_range) == (3, 1, [0.0, 1.0])


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_padding_changes_nothing(rows):
    """cases 2, 11: an empty masked batch trains nothing, a short one trains as if it were not padded"""
    columns = Transformer(SCHEMA)(click_rows(5)).slice(0, rows)
    models = [a_model(), a_model()]
    before = weights(models[0])
    for model, size in zip(models, (max(rows, 1), 32), strict=True):
        loop = a_loop(model)
        loop.step(ready(pack(columns, size, LADDER)), Position())
    for name, tensor in weights(models[0]).items():
        torch.testing.assert_close(tensor, weights(models[1])[name], rtol=0, atol=1e-6)
        if rows == 0:
            assert torch.equal(tensor, before[name])


def test_rows_that_a_batch_does_not_look_up_stay_as_they_are():
    """case 16"""
    model = a_model()
    before = weights(model)
    packed = batches(1)[0].packed
    a_loop(model).step(ready(packed), Position())
    for table in ("user", "item", "tags"):
        name = f"sparse_arch.embedding_bag_collection.embedding_bags.{table}.weight"
        touched = np.unique(packed.sparse[table].rows[packed.sparse[table].rows >= 0])
        moved = (model.state_dict()[name] != before[name]).any(1).nonzero().squeeze(1).numpy()
        assert moved.tolist() == touched.tolist()


def test_the_first_adagrad_step_is_finite_with_accumulator_0_and_eps_1e_8():
    """case 15"""
    for optimizer in ("row_wise_adagrad", "adagrad"):
        tables = dataclasses.replace(TABLES, optimizer=optimizer, eps=1e-8)
        model = a_model(tables)
        a_loop(model).step(ready(batches(1)[0].packed), Position())
        assert all(torch.isfinite(tensor).all() for tensor in weights(model).values())


def test_warm_up_and_decay_move_both_learning_rates():
    model = a_model()
    config = TrainConfig(batch_size=32, epochs=1, learning_rate=0.02, warmup_steps=4, decay="linear")
    step = a_step(model, config)
    loop = a_loop(model, config, batches_per_epoch=8, step=step)
    seen = []

    def progress(rows, loss):
        tables = next(collection for _, collection in fused_collections(model))
        seen.append((step.dense_optimizer.param_groups[0]["lr"], tables.learning_rate))

    loop.run(batches(8), Position(), Callbacks(nothing, None, nothing, progress))
    factors = [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert [dense for dense, _ in seen] == pytest.approx([0.02 * factor for factor in factors])
    assert [table for _, table in seen] == pytest.approx([0.1 * factor for factor in factors])


def test_epochs_steps_and_lines_add_up():
    lines, saved = [], []
    config = TrainConfig(batch_size=32, epochs=2, log_every_steps=3)
    position = Position()
    loop = a_loop(a_model(), config, batches_per_epoch=5, every=4)
    loop.run(batches(10), position, Callbacks(lines.append, None, lambda at, score: saved.append(at.step)))
    assert (position.step, position.epoch, position.batch, position.finished) == (10, 2, 0, True)
    assert [line["step"] for line in lines] == [3, 6, 9, 10]
    assert lines[-1]["rows_seen"] == position.rows_seen == 320
    assert saved == [4, 8, 10]
    assert total_steps(TrainConfig(epochs=2, max_steps=7), 5) == 7


def test_max_steps_ends_in_mid_epoch():
    position = Position()
    config = TrainConfig(batch_size=32, epochs=3, max_steps=7)
    a_loop(a_model(), config, batches_per_epoch=5).run(batches(15), position, Callbacks(nothing, None, nothing))
    assert (position.step, position.epoch, position.batch) == (7, 1, 2)


def run_with_validations(losses, patience, monitor="log_loss", epochs=10, items=None):
    values = iter(losses)
    saved = []
    config = TrainConfig(batch_size=32, epochs=epochs, patience=patience, monitor=monitor)
    position = Position()
    callbacks = Callbacks(
        nothing,
        lambda: {
            "log_loss": (value := next(values)),
            "auc": value,
            "eval_rows": 9,
            "missing_labels": 0,
            "mean_label": 0,
        },
        lambda at, score: saved.append((at.step, score, at.finished)),
    )
    a_loop(a_model(), config, batches_per_epoch=1).run(items or batches(epochs), position, callbacks)
    return position, saved


def test_patience_stops_after_so_many_validations_without_a_better_one():
    position, saved = run_with_validations([0.5, 0.4, 0.41, 0.39, 0.39, 0.4, 0.1], patience=2)
    assert (position.step, position.best_step, position.stopped_early) == (6, 4, True)
    assert saved[-1] == (6, -0.4, True)


def test_monitor_auc_takes_higher_as_better():
    position, _ = run_with_validations([0.5, 0.6, 0.55, 0.58], patience=2, monitor="auc")
    assert (position.step, position.best_step) == (4, 2)


def test_without_patience_all_epochs_are_trained():
    position, _ = run_with_validations([0.5, 0.6, 0.7], patience=0, epochs=3)
    assert (position.step, position.best_step, position.stopped_early) == (3, 1, False)


def test_a_validation_that_defines_no_metric_says_what_to_do():
    with pytest.raises(TpurecError, match=r"do not define auc.*Set data.validation_share higher"):
        run_with_validations([None], patience=0, monitor="auc")


def test_more_validation_rows_are_no_remedy_where_all_labels_are_equal():
    (item,) = batches(1)
    item.packed.labels[:] = 0
    with pytest.raises(
        TpurecError, match=r"do not define auc.*All labels trained on, too, are 0: give rows with other"
    ):
        run_with_validations([None], patience=0, monitor="auc", items=[item])


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step():
    model = a_model()
    with torch.no_grad():
        next(model.over_arch.parameters()).fill_(math.inf)
    with pytest.raises(TpurecError, match=r"the loss is (nan|inf) at step 1\. Lower train\.learning_rate"):
        a_loop(model).run(batches(1), Position(), Callbacks(nothing, None, nothing))


def test_data_that_end_too_early_are_an_error_not_a_shorter_run():
    with pytest.raises(TpurecError, match="ended at step 3 of 10"):
        a_loop(a_model()).run(batches(3), Position(), Callbacks(nothing, None, nothing))


@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "sgd"])
@pytest.mark.parametrize("tables", ["row_wise_adagrad", "adagrad", "sgd"])
def test_a_checkpoint_between_steps_changes_no_bit(tmp_path, optimizer, tables):
    """case 25: weights, both optimizer states, schedule and loss sums go on as if nothing had happened"""
    config = TrainConfig(batch_size=32, optimizer=optimizer, learning_rate=0.01, decay="cosine", log_every_steps=4)
    tables_config = dataclasses.replace(TABLES, optimizer=tables)
    data = batches(10)
    lines = {"whole": [], "parts": []}

    whole = a_model(tables_config)
    loop = a_loop(whole, config, rate=0.1)
    loop.run(data, Position(), Callbacks(lines["whole"].append, None, nothing))

    class Killed(Exception):
        pass

    def kill_at_6(rows, loss):
        if position.step == 6:
            TrainingState(step).save(Checkpointer(tmp_path, 1), position, None, {})
            raise Killed

    step, position = a_step(a_model(tables_config), config), Position()
    loop = a_loop(None, config, rate=0.1, step=step)
    with pytest.raises(Killed):
        loop.run(data, position, Callbacks(lines["parts"].append, None, nothing, kill_at_6))

    second = build_model(MODEL, tables_config, SCHEMA, seed=99, optimizer=table_optimizer(tables_config))
    step = a_step(second, config)
    loop = a_loop(second, config, rate=0.1, step=step)
    resumed = TrainingState(step).load(next(tmp_path.iterdir()))
    assert resumed == position
    loop.run(data[6:], resumed, Callbacks(lines["parts"].append, None, nothing))
    assert same(weights(whole), weights(second))
    without_rate = [
        [{key: value for key, value in line.items() if key != "rows_per_second"} for line in kind]
        for kind in lines.values()
    ]
    assert without_rate[0] == without_rate[1]


def test_a_checkpoint_of_another_optimizer_is_refused_by_name(tmp_path):
    """case 23"""
    step = a_step(a_model(), TrainConfig(batch_size=32))
    a_loop(None, step=step).step(ready(batches(1)[0].packed), Position())
    folder = TrainingState(step).save(Checkpointer(tmp_path, 1), Position(step=1), None, {})
    other = a_step(a_model(), TrainConfig(optimizer="adagrad"))
    with pytest.raises(TpurecError, match=r"lacks 'optimizer\.dense_arch.*\.sum'.* has 'optimizer.*\.exp_avg'"):
        TrainingState(other).load(folder)


def test_training_learns_and_is_the_same_to_the_bit_when_repeated():
    losses = []
    for _ in range(2):
        model, seen = a_model(), []
        loop = a_loop(model, batches_per_epoch=80)
        loop.run(
            batches(80), Position(), Callbacks(nothing, None, nothing, lambda rows, loss, seen=seen: seen.append(loss))
        )
        losses.append(seen)
    assert losses[0] == losses[1]
    assert np.mean(losses[0][-10:]) < np.mean(losses[0][:10]) - 0.05


def test_scores_that_are_not_finite_are_an_error_not_a_metric():
    model = a_model()
    with torch.no_grad():
        next(model.over_arch.parameters()).fill_(math.nan)
    with pytest.raises(TpurecError, match="32 of 32 scores of a batch are not finite"):
        evaluate(model, batches(1))

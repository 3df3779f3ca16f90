"""data.redraw: other rows each epoch, the same ones for a seed, also in a run that goes on."""

from functools import partial

from datasets import Dataset, DatasetDict

from raoe_train.losses import CoSENTLoss
from raoe_train.training.trainer import Trainer
from raoe_train.training.training_data import redraw
from tests.tiny import tiny_encoder
from tests.training.small_runs import arguments

ROWS = 12


def epochs(folder, numbers, seed=42, sizes=(40,), rows=ROWS):
    """The rows of each batch of these epochs, as a trainer that has done no other ones draws them."""
    data = {
        f"set{size}": Dataset.from_list(
            [{"sentence1": f"{size} {n}", "sentence2": "a man", "score": n / size} for n in range(size)]
        )
        for size in sizes
    }
    args = arguments(folder, per_device_train_batch_size=5, seed=seed, batch_sampler=partial(redraw, rows=rows))
    trainer = Trainer(tiny_encoder(), args, DatasetDict(data), loss=CoSENTLoss)
    loader, result = trainer.get_train_dataloader(), {}
    texts = [text for dataset in data.values() for text in dataset["sentence1"][:]]
    for number in numbers:
        loader.batch_sampler.set_epoch(number)
        result[number] = [[texts[row] for row in batch] for batch in loader.batch_sampler]
    return result


def drawn(batches):
    return [text for batch in batches for text in batch]


def test_each_epoch_draws_other_rows(tmp_path):
    result = epochs(tmp_path, range(4))
    for batches in result.values():
        assert [len(batch) for batch in batches] == [5, 5, 2]
        assert len(set(drawn(batches))) == ROWS
    assert len({tuple(drawn(batches)) for batches in result.values()}) == 4
    assert len({text for batches in result.values() for text in drawn(batches)}) > 2 * ROWS  # of all 40
    # a run that goes on in its fourth epoch draws that epoch's; another seed draws others
    assert epochs(tmp_path, [3])[3] == result[3]
    assert epochs(tmp_path, [3], seed=7)[3] != result[3]


def test_rows_per_source(tmp_path):
    (batches,) = epochs(tmp_path, [0], sizes=(40, 9, 30)).values()
    counts = {name: sum(text.split()[0] == name for text in drawn(batches)) for name in ("40", "9", "30")}
    assert counts == {"40": ROWS, "9": 9, "30": ROWS}

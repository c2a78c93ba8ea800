"""What tests of the planner's commands share: the command in this process, a table list, and training data."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.sharding.problems import TABLE_LIST
from tpurec import cli

SCHEMA = """
name = "small"
[label]
column = "label"
[[dense]]
name = "age"
transform = "log1p"
[[sparse]]
name = "user_id"
kind = "integer"
num_embeddings = 1000
[[sparse]]
name = "tags"
kind = "integer"
num_embeddings = 50
transform = "identity"
multi_valued = true
"""


@pytest.fixture
def run(capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            cli.main(["plan", *map(str, arguments)])
        captured = capsys.readouterr()
        return caught.value.code, captured.out, captured.err

    return call


@pytest.fixture
def tables(tmp_path):
    path = tmp_path / "tables.toml"
    path.write_text(TABLE_LIST)
    return path


@pytest.fixture
def parquet(tmp_path):
    from tpurec.features.schema import Schema

    schema = Schema.from_text(SCHEMA)
    rows = pa.table(
        {
            "label": [0.0, 1.0] * 50,
            "age": [1.0] * 100,
            "user_id": list(range(10)) * 10,
            "tags": [[1, 2, 3], []] * 50,
        },
        schema=schema.arrow_schema(),
    )
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(rows, folder / "part-0.parquet", row_group_size=20)
    return folder

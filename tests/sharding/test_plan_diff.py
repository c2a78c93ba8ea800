"""`tpurec plan-diff` as people and scripts use it."""

import json

import pytest

from tpurec import cli


def test_plan_diff_says_what_moves(run, tables, tmp_path, capsys):
    for name, slice_ in (("a", "v6e-4"), ("b", "v6e-8")):
        assert run(tables, "--slice", slice_, "--out", tmp_path / f"{name}.json")[0] == 0

    def compare(*arguments):
        with pytest.raises(SystemExit) as caught:
            cli.main(["plan-diff", *map(str, arguments)])
        return caught.value.code, capsys.readouterr().out

    code, out = compare(tmp_path / "a.json", tmp_path / "a.json", "--json")
    assert code == 0 and json.loads(out)["bytes_moved"] == 0
    code, out = compare(tmp_path / "a.json", tmp_path / "b.json", "--json")
    found = json.loads(out)
    assert 0 < found["bytes_moved"] <= found["bytes_total"]
    assert sum(table["bytes_moved"] for table in found["tables"]) == found["bytes_moved"]
    out = compare(tmp_path / "a.json", tmp_path / "b.json")[1]
    assert "2 of 2 tables change" in out and "to move" in out and "on 4 ranks" in out and "…" not in out
    out = compare(tmp_path / "a.json", tmp_path / "b.json", "--max-tables", "1")[1]
    assert "The table that moves most" in out and ("user" in out) != ("item" in out)
    assert "No table changes and nothing moves (2 tables)" in compare(tmp_path / "a.json", tmp_path / "a.json")[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "is a folder, a plan file is expected"),
        (b"", "not valid JSON"),
        (b"\xff\xfe", "is not a sharding plan"),
        (b"{}", "is not a sharding plan"),
        (b'{"format": "tpurec.plan", "version": 1}', "bad.json: slice 'None' is not understood"),
        (b'{"format": "tpurec.plan", "version": 9}', "plan version 9"),
    ],
)
def test_plan_diff_names_the_file_that_is_no_plan(tmp_path, capsys, text, says):
    path = tmp_path / "bad.json"
    path.mkdir() if text is None else path.write_bytes(text)
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan-diff", str(path), str(path)])
    err = capsys.readouterr().err
    assert caught.value.code == 1 and says in err and "bad.json" in err and "ake" in err and err.count("\n") == 1

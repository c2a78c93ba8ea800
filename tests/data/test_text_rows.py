"""Text files: which lines are rows, which are padded, which are refused and why; the same for any block size."""

import gzip

import numpy as np
import pyarrow as pa
import pytest

from pipelines.data import text_lines
from pipelines.data.inputs import InputFile, find_inputs
from pipelines.data.text_layout import TextLayout, find_layout
from pipelines.data.text_lines import count_lines, first_line, line_blocks, line_ranges
from pipelines.data.text_rows import read_text
from tpurec.errors import DataError
from tpurec.features import DenseFeature, LabelColumn, Schema, SparseFeature, TextInput

NAMES = ("y", "a", "b", "c")
TSV = TextLayout(NAMES, header=False, delimiter="\t", quoted=False, min_fields=3)
CSV = TextLayout(NAMES, header=True, delimiter=",", quoted=True, min_fields=4)


def write(path, data: bytes):
    path.write_bytes(data)
    return find_inputs([path])[0]


def read(file, layout, **options):
    """All pieces: rows as tuples by line number, reasons by line number, padded rows."""
    rows, unreadable, padded = {}, {}, 0
    for piece in read_text(file, layout, list(NAMES), **options):
        values = zip(*(piece.table[name].to_pylist() for name in NAMES), strict=True)
        rows.update(zip(piece.numbers.tolist(), values, strict=True))
        unreadable.update({row.number: row.reason for row in piece.unreadable})
        padded += piece.padded
    return rows, unreadable, padded


LINES = (
    b"1\t2\t3\t4\n"  # 1
    b"1\t2\t3\n"  # 2: lost its last tab
    b"1\t2\n"  # 3: lost too much
    b"1\t2\t\n"  # 4: short, but ends in a tab, so nothing was stripped
    b"\n"  # 5
    b"1\t2\t3\t4\t5\n"  # 6
    b"\t\t\t\n"  # 7: all blank
    b"1\t\t-3\t\xff\n"  # 8: not UTF-8
    b'"1\t2\t3"\t4\r\n'  # 9: a quote is only a character in TSV; CRLF
    b"1\t2\r2\t3\t4\n"  # 10
    b"\xc3\xa9\t2\t3"  # 11: short, without newline at the end of the file
)


@pytest.mark.parametrize("block_bytes", [1, 7, 16, 1 << 20])
def test_each_line_is_a_row_padded_or_refused_with_its_reason(tmp_path, block_bytes):
    rows, unreadable, padded = read(write(tmp_path / "a.tsv", LINES), TSV, block_bytes=block_bytes)
    assert rows == {
        1: ("1", "2", "3", "4"),
        2: ("1", "2", "3", None),
        7: (None, None, None, None),
        9: ('"1', "2", '3"', "4"),
        11: ("é", "2", "3", None),
    }
    assert unreadable == {
        3: "too_few_fields",
        4: "too_few_fields",
        5: "empty_line",
        6: "too_many_fields",
        8: "not_utf8",
        10: "stray_carriage_return",
    }
    assert padded == 2


def test_short_rows_are_refused_where_the_layout_pads_none(tmp_path):
    layout = TextLayout(NAMES, header=False, delimiter="\t", quoted=False, min_fields=4)
    rows, unreadable, padded = read(write(tmp_path / "a.tsv", LINES), layout)
    assert sorted(rows) == [1, 7, 9]
    assert (unreadable[2], unreadable[11], padded) == ("too_few_fields", "too_few_fields", 0)


@pytest.mark.parametrize("block_bytes", [1, 9, 1 << 20])
def test_csv_quotes(tmp_path, block_bytes):
    text = b'\xef\xbb\xbfy,a,b,c\r\n1,"x,y",3,4\r\n1,"say ""hi""",,4\r\n1,"open,3,4\r\n1,2,"\xc3\xbc",4\r\n1,in"ch,3,4'
    rows, unreadable, _ = read(write(tmp_path / "a.csv", text), CSV, block_bytes=block_bytes)
    assert rows == {
        2: ("1", "x,y", "3", "4"),
        3: ("1", 'say "hi"', None, "4"),
        5: ("1", "2", "ü", "4"),
        6: ("1", 'in"ch', "3", "4"),
    }
    assert unreadable == {4: "bad_quotes"}


def test_random_lines_agree_with_a_plain_python_reading(tmp_path):
    rng = np.random.default_rng(0)
    fields = [b"", b"7", b"-1", b"abcd", b"\xc3\xa4"]
    lines = [b"\t".join(fields[i] for i in rng.integers(0, 5, rng.integers(1, 7))) for _ in range(3_000)]
    want, short, padded = {}, 0, 0
    for number, line in enumerate(lines, 1):
        split = [field.decode() or None for field in line.split(b"\t")]
        pad = len(split) == 3 and split[-1] is not None
        if line and (len(split) == 4 or pad):
            want[number] = tuple(split + [None] * (4 - len(split)))
            padded += pad
        else:
            short += 1
    for block_bytes in (50, 1_000, 1 << 20):
        rows, unreadable, found_padded = read(
            write(tmp_path / "a.tsv", b"\n".join(lines) + b"\n"), TSV, block_bytes=block_bytes
        )
        assert rows == want
        assert (len(unreadable), found_padded) == (short, padded)


def test_ranges_of_a_plain_file_hold_every_line_once(tmp_path):
    data = b"".join(b"%d\t\n" % number * (number % 5) for number in range(300)) + b"end"
    file = write(tmp_path / "a.tsv", data)
    for range_bytes in (1, 2, 17, 400, 10_000):
        ranges = line_ranges(file, range_bytes)
        pieces = [b"".join(line_blocks(file, start, stop, block_bytes=13)) for start, stop in ranges]
        assert b"".join(pieces) == data
        assert all(piece.endswith(b"\n") for piece in pieces[:-1])
        assert count_lines(file, ranges[-1][0]) == data[: ranges[-1][0]].count(b"\n")


@pytest.mark.parametrize("ending", ["tsv.gz", "tsv.zst"])
def test_compressed_files_of_several_members_read_like_plain_ones_and_cut_ones_fail(tmp_path, ending):
    pack = gzip.compress if ending == "tsv.gz" else lambda data: pa.compress(data, "zstd", asbytes=True)
    packed = pack(LINES[:20]) + pack(LINES[20:])
    file = write(tmp_path / f"a.{ending}", packed)
    assert read(file, TSV, block_bytes=11) == read(write(tmp_path / "a.tsv", LINES), TSV)
    assert line_ranges(file, 1) == [(0, None)]
    cut = write(tmp_path / f"cut.{ending}", packed[:-5])
    with pytest.raises(DataError, match=r"cut\..*cut short"):
        read(cut, TSV)
    with pytest.raises(DataError, match=r"no\..*cannot be read"):
        read(write(tmp_path / f"no.{ending}", b"1\t2\t3\t4\n"), TSV)


def test_a_file_without_newlines_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(text_lines, "MAX_LINE_BYTES", 1_000)
    file = write(tmp_path / "a.tsv", b"x" * 5_000)
    with pytest.raises(DataError, match="longer than"):
        list(line_blocks(file, block_bytes=100))


SHOP = Schema(
    name="shop",
    label=LabelColumn("y"),
    dense=(DenseFeature("a"),),
    sparse=(SparseFeature("b", 10), SparseFeature("c", 10)),
    input=TextInput(columns=NAMES, short_rows="blank", min_fields=3),
)


@pytest.mark.parametrize(
    ("line", "header"),
    [(b"c,b,a,y,more", True), (b"1,2,3,4", False), (b"b,1,2,3", False), (b'"y","a","b","c"', True)],
)
def test_header_is_recognised(tmp_path, line, header):
    layout = find_layout(write(tmp_path / "a.csv", line + b"\n1,2,3,4,5\n"), SHOP)
    assert layout.header is header
    assert layout.columns[0] == {b"c": "c"}.get(line[:1], "y")
    # A file that names its columns is not in the layout that lost its trailing blanks.
    assert layout.min_fields == (len(layout.columns) if header else 3)


def test_case_29_missing_column_is_named_with_the_file(tmp_path):
    """case 29"""
    with pytest.raises(DataError, match=r"a\.csv: no column 'c' \(sparse feature 'c' of the schema\)"):
        find_layout(write(tmp_path / "a.csv", b"y,a,b\n1,2,3\n"), SHOP)
    with pytest.raises(DataError, match=r"b\.csv: column 'b' is there 2 times"):
        find_layout(write(tmp_path / "b.csv", b"y,a,b,b,c\n"), SHOP)
    find_layout(write(tmp_path / "c.csv", b"a,b,c\n"), SHOP, labels=False)


def test_a_file_that_names_nothing_under_a_schema_that_says_nothing_is_refused(tmp_path):
    schema = Schema(name="shop", label=LabelColumn("y"), dense=(DenseFeature("a"),))
    with pytest.raises(DataError, match=r"a\.csv: the first line names no columns"):
        find_layout(write(tmp_path / "a.csv", b"1,2\n"), schema)
    with pytest.raises(DataError, match=r"empty\.csv"):
        find_layout(write(tmp_path / "empty.csv", b""), schema)


def test_lists_without_a_separator_cannot_come_from_text(tmp_path):
    schema = Schema(name="shop", sparse=(SparseFeature("tags", 10, multi_valued=True),), input=TextInput(header=True))
    with pytest.raises(DataError, match="separator"):
        find_layout(write(tmp_path / "a.csv", b"tags\n1\n"), schema, labels=False)


def test_inputs_are_found_by_file_folder_and_pattern_each_once(tmp_path):
    for name in ("b.tsv", "a.csv", "c.txt.gz", "d.tsv.zst", "e.parquet", "day_0.gz", "day_1", "notes.md"):
        (tmp_path / name).write_bytes(b"x")
    for name in (".hidden.tsv", "_SUCCESS.csv", "sub/f.tsv", ".cache/g.tsv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = find_inputs([tmp_path / "b.tsv", tmp_path, f"{tmp_path}/a*.csv"])
    names = ["b.tsv", "a.csv", "c.txt.gz", "d.tsv.zst", "day_0.gz", "e.parquet", "sub/f.tsv"]
    assert [file.path.relative_to(tmp_path).as_posix() for file in found] == names
    kinds = {file.path.name: (file.format, file.compression, file.delimiter) for file in found}
    assert kinds["a.csv"] == ("text", None, ",")
    assert kinds["c.txt.gz"] == ("text", "gzip", "\t")
    assert kinds["d.tsv.zst"] == ("text", "zstd", "\t")
    assert kinds["e.parquet"][0] == "parquet"
    assert find_inputs([tmp_path / "day_1"])[0].delimiter == "\t"
    assert find_inputs([tmp_path / "notes.md"], delimiter=";") == [InputFile(tmp_path / "notes.md", "text", None, ";")]
    for place, message in (("none", "no such file"), ("notes.md", "not a known kind"), ("*.orc", "no such file")):
        with pytest.raises(DataError, match=message):
            find_inputs([tmp_path / place])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="in this folder"):
        find_inputs([tmp_path / "empty"])


def test_first_line_has_no_mark_and_no_line_end(tmp_path):
    assert first_line(write(tmp_path / "a.csv", b"\xef\xbb\xbfy,a\r\n1,2\r\n")) == b"y,a"

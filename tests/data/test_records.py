"""Files of records: their tasks, and what a damaged, changed or foreign file does."""

import gzip
import os
import pickle
import random
import subprocess
import sys

import pyarrow
import pytest
from support import record_files
from support.record_files import TOTAL, UNIT, WRITERS, number_of

from horovodlike.data import DynamicPartition, RecordReader, StaticPartition, list_records
from horovodlike.errors import DamagedRecordsError

FORMATS = list(WRITERS)
OF_ROWS = (".parquet", ".arrow")


@pytest.fixture(params=FORMATS)
def suffix(request):
    return request.param


@pytest.fixture
def folder(tmp_path, suffix):
    return record_files.write_folder(tmp_path, suffix)


def read(records, batch_size=7, prefetch=2, **options):
    partition = StaticPartition(records.tasks(), batch_size, rank=0, size=1, **options)
    return [
        number_of(record) for batch in RecordReader(records, partition, prefetch=prefetch) for record in batch.records
    ]


def flip(path, content):
    """Change a bit in the middle of a record's content."""
    data = bytearray(path.read_bytes())
    at = bytes(data).index(content) + len(content) // 2
    data[at] ^= 1
    path.write_bytes(data)


def test_every_record_is_read_once_and_in_order(folder, suffix):
    records = list_records(folder)
    assert len(records) == TOTAL
    assert read(records, shuffle=False) == list(range(TOTAL))
    assert sorted(read(pickle.loads(pickle.dumps(records)))) == list(range(TOTAL))


def test_the_order_is_that_of_the_seed(folder):
    records = list_records([folder / name for name in sorted(os.listdir(folder))])
    tasks = records.tasks(5)
    orders = [
        [number_of(record) for batch in RecordReader(records, partition) for record in batch.records]
        for partition in (StaticPartition(tasks, 4, seed=seed, rank=0, size=1) for seed in (1, 1, 2))
    ]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == list(range(TOTAL))


def test_tasks_are_row_groups_or_a_number_of_records(folder, suffix):
    records = list_records(folder)
    first = [(start, end) for source, start, end in records.tasks() if source.endswith(f"a{suffix}")]
    assert first == ([(0, 20), (20, 40), (40, 60), (60, 70)] if suffix in OF_ROWS else [(0, 70)])
    for source, start, end in records.tasks(8):
        assert 0 < end - start <= 8 and os.path.dirname(source) == str(folder)
        assert suffix not in OF_ROWS or start // UNIT == (end - 1) // UNIT
    assert sum(end - start for _, start, end in records.tasks(8)) == TOTAL
    with pytest.raises(ValueError, match="samples_per_task"):
        records.tasks(0)


def test_one_rank_reads_with_few_records_in_memory_what_a_batch_needs(folder):
    records = list_records(folder)
    partition = StaticPartition(records.tasks(), 50, shuffle=False, rank=0, size=1)  # a batch spans units and files
    batches = list(RecordReader(records, partition, prefetch=0))
    assert [len(batch) for batch in batches] == [len(batch.records) for batch in batches] == [50, 50, 3]
    assert number_of(batches[1].records[20]) == 70


@pytest.mark.slow  # imports TensorFlow
def test_tensorflow_writes_the_same(tmp_path):
    import tensorflow as tf

    record_files.write_tfrecord(tmp_path / "ours.tfrecord", range(30))
    with tf.io.TFRecordWriter(str(tmp_path / "theirs.tfrecord")) as writer:
        for number in range(30):
            writer.write(record_files.content_of(number))
    assert (tmp_path / "ours.tfrecord").read_bytes() == (tmp_path / "theirs.tfrecord").read_bytes()


@pytest.mark.parametrize("suffix", [".parquet", ".tfrecord", ".array_record"], indirect=True)
def test_a_checksum_that_does_not_match_names_the_records(folder, suffix):
    path = folder / f"a{suffix}"
    flip(path, record_files.content_of(26))
    records = list_records(folder)
    reader = RecordReader(records, StaticPartition(records.tasks(1), 1, shuffle=False, rank=0, size=1))
    got = []
    with pytest.raises(DamagedRecordsError, match="lost") as caught:
        got.extend(number_of(batch.records[0]) for batch in reader)
    lost = {".parquet": (20, 40), ".tfrecord": (26, 27), ".array_record": (25, 26)}[suffix]
    assert (caught.value.file, caught.value.start, caught.value.end) == (str(path), *lost)
    assert got == list(range(lost[0]))
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
    rest = [task for task in records.tasks(1) if task.start >= 40 or task.source != str(path)]
    others = RecordReader(records, StaticPartition(rest, 3, shuffle=False, rank=0, size=1))
    assert [number_of(record) for batch in others for record in batch.records] == list(range(40, TOTAL))


@pytest.mark.parametrize("suffix", [".parquet", ".tfrecord", ".array_record"], indirect=True)
def test_whatever_bit_is_wrong_no_other_record_is_read(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    WRITERS[suffix](path, range(45))
    content = path.read_bytes()
    footer = len(content) - 1500 if suffix == ".parquet" else len(content)  # Parquet has no checksum of its own for it
    expected = read(list_records(path), shuffle=False)
    chance = random.Random(suffix)
    damaged = 0
    for _ in range(150):
        at = chance.randrange(len(content))
        changed = bytearray(content)
        changed[at] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        try:
            assert read(list_records(path), shuffle=False) == expected or at >= footer
        except DamagedRecordsError:
            damaged += 1
    assert damaged > 5


def test_array_records_of_a_damaged_group_are_all_named(tmp_path):
    path = tmp_path / "a.array_record"
    record_files.write_array_record(path, range(70))
    flip(path, record_files.content_of(26))
    records = list_records(path)
    reader = RecordReader(records, StaticPartition(records.tasks(), 70, rank=0, size=1))
    with pytest.raises(DamagedRecordsError, match="records 25 to 29 are lost") as caught:
        list(reader)
    assert (caught.value.start, caught.value.end) == (25, 30)


def test_arrow_offsets_that_are_wrong_name_the_batch(tmp_path):
    path = tmp_path / "a.arrow"
    record_files.write_arrow(path, range(70))
    content = path.read_bytes()
    offsets = b"".join(number.to_bytes(4, "little") for number in range(0, 21 * 306, 306))
    at = content.index(offsets, content.index(offsets) + 1)  # those of the second record batch
    path.write_bytes(content[: at + 8] + b"\xff" * 4 + content[at + 12 :])
    with pytest.raises(DamagedRecordsError, match="records 20 to 39 are lost"):
        read(list_records(path))


@pytest.mark.parametrize("kept", [0, 1, 3, 0.4, 0.99])
def test_a_truncated_file_is_named_when_it_is_listed(folder, suffix, kept):
    path = folder / f"b{suffix}"
    content = path.read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(DamagedRecordsError, match=r"is damaged, and .* lost .*: restore") as caught:
        list_records(folder)
    assert caught.value.file == str(path)
    first = int(kept * 33) if suffix == ".tfrecord" and isinstance(kept, float) else 0
    assert (caught.value.start, caught.value.end) == (first, None)


def test_a_file_without_records_is_damaged(tmp_path, suffix):
    WRITERS[suffix](tmp_path / f"a{suffix}", [])
    with pytest.raises(DamagedRecordsError, match=r"no records|is empty"):
        list_records(tmp_path)


def test_a_damaged_length_of_a_tfrecord_loses_the_rest(tmp_path):
    path = tmp_path / "a.tfrecord"
    record_files.write_tfrecord(path, range(10))
    content = bytearray(path.read_bytes())
    content[4 * (306 + 16)] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedRecordsError, match=r"the records from 4 on are lost \(the checksum of a length"):
        list_records(path)


def test_a_missing_shard_is_named(tmp_path):
    for number in (0, 2):
        record_files.write_tfrecord(tmp_path / f"x-0000{number}-of-00003.tfrecord", range(3))
    with pytest.raises(DamagedRecordsError, match="x-00001-of-00003.tfrecord.*missing beside"):
        list_records(tmp_path)
    assert len(list_records(sorted(tmp_path.iterdir()))) == 6


@pytest.mark.parametrize("change", ["has changed", "is gone"])
def test_a_file_that_changes_after_it_was_listed(folder, suffix, change):
    records = list_records(folder)
    path = folder / f"a{suffix}"
    if change == "is gone":
        path.unlink()
    else:
        WRITERS[suffix](path, range(71))
    with pytest.raises(RuntimeError, match=f"a{suffix} {change} since its tasks were made: list the records again"):
        read(records)


def test_an_arrow_stream_has_no_records_that_can_be_found(tmp_path):
    rows = record_files.table(range(10))
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", rows.schema) as file:
        file.write_table(rows)
    with pytest.raises(ValueError, match=r"a\.arrow has Arrow's format for streams.*new_file"):
        list_records(tmp_path)


def test_a_compressed_tfrecord_file_says_so(tmp_path):
    record_files.write_tfrecord(tmp_path / "a.tfrecord", range(10))
    content = (tmp_path / "a.tfrecord").read_bytes()
    (tmp_path / "a.tfrecord").write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match="is compressed"):
        list_records(tmp_path)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "has no records"),
        (["_SUCCESS", ".hidden.parquet"], "has no records"),
        (["a.csv"], r"a\.csv has an unknown format: known names end in \.parquet, \.arrow"),
        (["a.png"], "a folder for each label"),
        (["a.parquet", "b.tfrecord"], "different formats: .*a.parquet, .*b.tfrecord"),
        (["a.parquet", "cat/1.png"], "has folders.* and the file .*a.parquet"),
        (["cat/1.png", "dog/"], "label .*dog has no images"),
        (["cat/1.png", "cat/notes.txt"], r"notes\.txt is no image: the names of images end in \.bmp"),
        (["cat/1.png", "cat/more/2.png"], "more is no image"),
    ],
)
def test_folders_that_cannot_be_listed_say_why(tmp_path, names, words):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=words):
        list_records(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"), [("[", "cannot be read"), ('{"cat": 0}', "not a list"), ("[1]", "not a list")]
)
def test_names_of_labels_that_are_none(tmp_path, text, words):
    record_files.write_tfrecord(tmp_path / "a.tfrecord", range(4))
    (tmp_path / "_labels.json").write_text(text)
    with pytest.raises(ValueError, match=f"_labels.json .*{words}"):
        list_records(tmp_path)


def test_lists_of_files_that_cannot_be_used_say_why(tmp_path):
    path = tmp_path / "a.TFRECORD"
    record_files.write_tfrecord(path, range(4))
    assert len(list_records(str(path))) == 4
    with pytest.raises(ValueError, match="no files"):
        list_records([])
    with pytest.raises(ValueError, match="a.TFRECORD was given 2 times"):
        list_records([path, path])
    with pytest.raises(FileNotFoundError, match="none.parquet"):
        list_records(tmp_path / "none.parquet")


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        (".parquet", ["pyarrow", "pyarrow.parquet"]),
        (".arrow", ["pyarrow"]),
        (".tfrecord", ["google_crc32c"]),
        (".array_record", ["array_record", "array_record.python", "array_record.python.array_record_module"]),
    ],
)
def test_a_library_that_is_missing_names_the_extra(tmp_path, monkeypatch, name, modules):
    WRITERS[name](tmp_path / f"a{name}", range(3))
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"needs {modules[0]}: pip install 'horovodlike\[records\]'"):
        list_records(tmp_path)


def test_tasks_of_other_records_are_refused(tmp_path):
    record_files.write_tfrecord(tmp_path / "a.tfrecord", range(4))
    records = list_records(tmp_path)
    for task, words in [
        (("b.tfrecord", 0, 1), "is not listed"),
        ((str(tmp_path / "a.tfrecord"), 0, 5), "has 4 records"),
    ]:
        with pytest.raises(ValueError, match=words):
            list(RecordReader(records, StaticPartition([task], 2, rank=0, size=1)))


def test_an_empty_batch_has_no_records(tmp_path):
    record_files.write_tfrecord(tmp_path / "a.tfrecord", range(1))
    records = list_records(tmp_path)
    partition = DynamicPartition(records.tasks(), 2, record="manual", rank=1, size=2)
    (batch,) = RecordReader(records, partition)
    assert (batch.records, batch.total, bool(batch)) == ((), 1, False)


def test_importing_brings_no_library():
    code = (
        "import sys, horovodlike.data; "
        "print({'pyarrow', 'PIL', 'array_record', 'google_crc32c', 'rich', 'numpy', 'tensorflow'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

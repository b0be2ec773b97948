"""convert_images and hvdrun-records: shards of a folder of labelled images, all of them or none."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
from PIL import Image

from horovodlike.data import RecordReader, StaticPartition, convert_images, list_records
from horovodlike.errors import DamagedRecordsError

LABELS = {"cat": 5, "dog": 4, "eel": 2}
NAME = "images-00000-of-00001.parquet"
COMMAND = Path(sys.executable).parent / "hvdrun-records"


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    for label, (name, count) in enumerate(LABELS.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (9, 7), (label, number, 0)).save(
                folder / name / f"{number}.{'PNG' if number % 2 else 'bmp'}"
            )
    return folder


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


def read(records, decode=None):
    partition = StaticPartition(records.tasks(2), 3, shuffle=False, rank=0, size=1)
    return [record for batch in RecordReader(records, partition, decode) for record in batch.records]


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def left_beside(output):
    return sorted(path.name for path in output.parent.iterdir() if path.name != "images")


def run(*words, limit="", **options):
    command = ["sh", "-c", f'{limit} exec "$@"', "sh", COMMAND, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def test_shards_have_the_records_of_the_folder(images, output):
    progress = []
    files = convert_images(images, output, 4, on_progress=lambda *numbers: progress.append(numbers))
    assert [path.name for path in files] == [f"images-0000{number}-of-00003.parquet" for number in range(3)]
    assert [pyarrow.parquet.read_metadata(path).num_rows for path in files] == [4, 4, 3]
    assert progress == [(4, 11), (8, 11), (11, 11)]
    folder, shards = list_records(images), list_records(output)
    assert folder.labels == shards.labels == tuple(LABELS)
    assert read(folder) == read(shards)
    assert [record["name"] for record in read(shards)][4:6] == ["cat/4.bmp", "dog/0.bmp"]
    pixels = read(shards, lambda record: (record["label"], Image.open(io.BytesIO(record["image"])).getpixel((0, 0))))
    assert pixels == [(label, (label, i, 0)) for label, count in enumerate(LABELS.values()) for i in range(count)]
    assert left_beside(output) == ["out"]


def test_the_same_seed_makes_the_same_bytes(images, output):
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        convert_images(images, output.with_name(name), 4, shuffle=True, seed=seed)
    first, again, other = (bytes_of(output.with_name(name)) for name in ("first", "again", "other"))
    assert first == again != other
    names = [record["name"] for record in read(list_records(output.with_name("first")))]
    assert names != sorted(names) and sorted(names) == [record["name"] for record in read(list_records(images))]


def test_large_shards_have_row_groups_that_fit_the_memory(images, output):
    for number in range(300):
        os.link(images / "cat" / "0.bmp", images / "cat" / f"more{number}.bmp")
    (file,) = convert_images(images, output)
    groups = pyarrow.parquet.ParquetFile(file).metadata
    assert [groups.row_group(number).num_rows for number in range(groups.num_row_groups)] == [256, 55]


def test_a_damaged_shard_is_detected(images, output):
    files = convert_images(images, output, 4)
    content = files[1].read_bytes()
    pixels = (images / "dog" / "0.bmp").read_bytes()
    assert pixels in content
    files[1].write_bytes(content.replace(pixels, pixels[:-1] + b"?"))
    with pytest.raises(DamagedRecordsError, match="of-00003.parquet is damaged, and the records 0 to 3 are lost"):
        read(list_records(output))
    files[2].unlink()
    with pytest.raises(DamagedRecordsError, match="images-00002-of-00003.parquet.*missing"):
        list_records(output)


def test_an_image_that_changes_after_it_was_listed(images):
    records = list_records(images)
    (images / "dog" / "1.PNG").write_bytes(b"something else")
    with pytest.raises(RuntimeError, match="dog/1.PNG has changed since its tasks were made"):
        read(records)


def test_an_image_that_is_empty(images):
    (images / "dog" / "1.PNG").write_bytes(b"")
    with pytest.raises(DamagedRecordsError, match="dog/1.PNG is damaged, and record 1 is lost .the file is empty"):
        list_records(images)


@pytest.mark.parametrize("content", [b"no image", None])
def test_an_image_that_cannot_be_decoded_is_named_and_nothing_is_left(images, output, content):
    path = images / "eel" / "1.PNG"
    path.write_bytes(path.read_bytes()[:45] if content is None else content)
    with pytest.raises(DamagedRecordsError, match="eel/1.PNG is damaged, and record 1 is lost"):
        convert_images(images, output, 2)
    assert left_beside(output) == []


@pytest.mark.parametrize("number", [0, -1])
def test_a_shard_has_records(images, output, number):
    with pytest.raises(ValueError, match=f"records_per_shard must be at least 1, got {number}"):
        convert_images(images, output, number)


def test_outputs_that_cannot_be_used(images, output):
    output.mkdir()
    convert_images(images, output)  # an empty one can
    before = bytes_of(output)
    for path, error, words in [
        (output, FileExistsError, "out exists and is not an empty folder"),
        (output / "_labels.json", FileExistsError, "exists and is not an empty folder"),
        (output / "a" / "b", FileNotFoundError, "cannot be made, since .*out/a does not exist"),
        (images / "out", ValueError, "is in the folder of the images"),
    ]:
        with pytest.raises(error, match=words):
            convert_images(images, path)
    assert bytes_of(output) == before
    assert left_beside(output) == ["out"]


def test_a_folder_without_labels_is_refused(images, output):
    convert_images(images, output)
    with pytest.raises(ValueError, match="out has no folders of images, one for each label"):
        convert_images(output, output.with_name("again"))


def test_a_crash_leaves_nothing_that_a_reader_takes_for_whole(images, output):
    code = (
        "import os, signal, sys; from horovodlike.data import convert_images\n"
        "kill = lambda done, total: done == 6 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "convert_images(sys.argv[1], sys.argv[2], 3, on_progress=kill)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code, images, output], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert left_beside(output) == [".out.partial"]
    with pytest.raises(DamagedRecordsError):
        list_records(output.with_name(".out.partial"))
    assert run(images, output).returncode == 0
    assert left_beside(output) == ["out"] and sorted(bytes_of(output)) == ["_labels.json", NAME]


def test_one_process_at_a_time_writes_an_output(images, output):
    def run_another(done, total):
        if done == 3:
            refused.append(run(images, output))

    refused = []
    convert_images(images, output, 3, on_progress=run_another)
    (done,) = refused
    assert done.returncode == 1 and "another process is writing the output" in done.stderr
    assert left_beside(output) == ["out"] and len(list_records(output)) == sum(LABELS.values())


def test_the_command(images, output):
    done = run(images, output, "--records-per-shard", "4", "--shuffle", "--seed", "7")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"3 shards in {output}\n", "")
    convert_images(images, output.with_name("same"), 4, shuffle=True, seed=7)
    assert bytes_of(output) == bytes_of(output.with_name("same"))
    assert json.loads((output / "_labels.json").read_text()) == list(LABELS)


def test_the_command_has_a_progress_bar_on_a_terminal(images, output):
    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0) as terminal:
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
        with subprocess.Popen(
            [COMMAND, images, output], stderr=theirs, stdout=subprocess.DEVNULL, env=environment
        ) as job:
            os.close(theirs)
            shown = b""
            while data := _read(terminal):
                shown += data
        assert job.returncode == 0
    assert b"11/11" in shown


def _read(terminal):
    try:
        return terminal.read(4096)
    except OSError:  # the other end is closed
        return b""


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--records-per-shard", "-4"], 2, "records_per_shard must be at least 1, got -4"),
        (["--records-per-shard", "few"], 2, "invalid int value"),
        (["--sead", "1"], 2, "unrecognized arguments"),
    ],
)
def test_the_command_names_bad_arguments(images, output, words, code, text):
    done = run(images, output, *words)
    assert done.returncode == code
    assert done.stderr.splitlines()[-1].startswith("hvdrun-records: ") and text in done.stderr
    assert left_beside(output) == []


def test_the_command_says_what_is_wrong_with_the_files(images, output):
    (images / "fox").mkdir()
    done = run(images, output)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == f"hvdrun-records: the folder of the label {images}/fox has no images: add some, or remove it\n"
    )
    (images / "fox" / "1.png").write_bytes(b"no image")
    done = run(images, output)
    assert done.returncode == 1
    assert done.stderr.startswith(f"hvdrun-records: {images}/fox/1.png is damaged, and record 0 is lost (")
    assert left_beside(output) == []


def test_a_disk_that_is_full(images, output):
    Image.frombytes("RGB", (200, 200), os.urandom(120_000)).save(images / "cat" / "large.bmp")
    done = run(images, output, limit="ulimit -f 100;")  # in blocks of 512 bytes
    assert done.returncode == 1
    assert done.stderr == f"hvdrun-records: [Errno 27] File too large, so nothing was written: '{output}'\n"
    assert left_beside(output) == []


@pytest.mark.parametrize(("module", "package"), [("pyarrow.parquet", "pyarrow"), ("PIL.Image", "PIL")])
def test_a_library_that_is_missing_names_the_extra(images, output, monkeypatch, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"needs {package}: pip install 'horovodlike\[records\]'"):
        convert_images(images, output)
    assert left_beside(output) == []


def test_a_command_that_is_told_to_end_leaves_nothing(images, output):
    code = (
        "import os, signal, sys; from horovodlike.launcher.tools import records\n"
        "from horovodlike.data.records import convert\n"
        "write = convert._write_shard\n"
        "def stopped(*arguments):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return write(*arguments)\n"
        "convert._write_shard = stopped\n"
        "sys.exit(records.main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code, images, output], check=False, timeout=60)
    assert done.returncode == 128 + signal.SIGTERM
    assert left_beside(output) == []

import gzip
import hashlib
import io
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler
from http.server import SimpleHTTPRequestHandler
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pooch
import pytest
import torch
from torch.utils.data import DataLoader

from labkit import data

pytestmark = pytest.mark.timeout(60)

SHARED = Path(__file__).parents[2] / "shared" / "data"
CLOSED_PORT = "http://127.0.0.1:9/"


@pytest.fixture(autouse=True)
def local_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No LABKIT_DATA, no mirror that answers, an empty cache. Returns the cache."""
    monkeypatch.delenv("LABKIT_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    cache = tmp_path / "cache"
    monkeypatch.setattr(pooch, "os_cache", lambda project: cache / project)
    for name, source in data.SOURCES.items():
        offline = replace(source, mirrors=(CLOSED_PORT, CLOSED_PORT + "mirror/"))
        monkeypatch.setitem(data.SOURCES, name, offline)
    return cache / "labkit"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that LABKIT_DATA names."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("LABKIT_DATA", str(folder))
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """A web server: its URL, the folder it serves, and the paths asked for so far."""
    served = tmp_path / "served"
    served.mkdir()
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            asked.append(self.path)

    handler = partial(Handler, directory=str(served))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}/", served, asked
        httpd.shutdown()


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
    return header + array.tobytes()


def make_idx(
    folder: Path, *, prefix: str = "t10k", num_samples: int = 5, packed: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Writes the image and label file into the folder; returns what is in them."""
    rng = np.random.default_rng(num_samples)
    images = rng.integers(0, 256, (num_samples, 28, 28), dtype=np.uint8)
    labels = rng.integers(0, 10, num_samples, dtype=np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    for kind, array in {"images-idx3": images, "labels-idx1": labels}.items():
        raw = idx_bytes(array)
        name = f"{prefix}-{kind}-ubyte"
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(raw))
        else:
            (folder / name).write_bytes(raw)
    return images, labels


def make_cifar() -> dict[str, bytes]:
    """The six files by name, three samples each, labelled by their batch."""
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    rng = np.random.default_rng(0)
    files = {}
    for batch, name in enumerate(names):
        records = rng.integers(0, 256, (3, 3073), dtype=np.uint8)
        records[:, 0] = batch
        files[name] = records.tobytes()
    return files


def make_cifar_archive(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, raw in files.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))


def serve_as(
    monkeypatch: pytest.MonkeyPatch, name: str, folder: Path, *mirrors: str
) -> None:
    """Points a dataset at these mirrors, with the checksums of the folder's files."""
    md5 = {p.name: hashlib.md5(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    source = replace(data.SOURCES[name], mirrors=mirrors, md5=md5)
    monkeypatch.setitem(data.SOURCES, name, source)


def test_nothing_is_downloaded_in_the_clear() -> None:
    assert "http://" not in Path(data.__file__).read_text()


def test_digits_are_scaled_images_in_two_disjoint_even_splits() -> None:
    train, test, both = (data.digits(split) for split in ("train", "test", "all"))
    assert (len(train), len(test), len(both)) == (1438, 359, 1797)
    images, labels = both.tensors
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert (images.min(), images.max()) == (0, 1)
    for i, whole in enumerate(both.tensors):
        assert torch.equal(torch.cat([train.tensors[i], test.tensors[i]]), whole)
    counts = [35, 36, 34, 37, 37, 37, 37, 36, 33, 37]
    assert test.tensors[1].bincount().tolist() == counts
    train_images = {image.numpy().tobytes() for image in train.tensors[0]}
    assert not any(image.numpy().tobytes() in train_images for image in test.tensors[0])


@pytest.mark.parametrize(
    ("load", "allowed"),
    [
        (data.digits, "train, test, all"),
        (data.mnist, "train, test"),
        (data.fashion_mnist, "train, test"),
        (data.cifar10, "train, test"),
        (partial(data.text, __file__, 8), "train, test"),
    ],
)
def test_unknown_split_names_the_known_ones(load, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"split is 'val'; choose one of {allowed}$"):
        load(split="val")


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs MNIST's files in {SHARED}")
def test_mnist_test_set_is_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_DATA", str(SHARED))
    images, labels = data.mnist("test").tensors
    assert images.shape == (10_000, 1, 28, 28)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)
    assert images.mean().item() == pytest.approx(0.1325, abs=1e-4)
    assert labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    counts = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert labels.bincount().tolist() == counts


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs MNIST's files in {SHARED}")
def test_real_mnist_is_not_taken_for_fashion_mnist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LABKIT_DATA", str(SHARED))
    with pytest.raises(RuntimeError, match="of fashion_mnist"):
        data.fashion_mnist("test")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("load", "subfolder"),
    [
        (data.mnist, "."),
        (data.mnist, "mnist"),
        (data.mnist, "MNIST/raw"),
        (data.fashion_mnist, "."),
        (data.fashion_mnist, "fashion_mnist"),
        (data.fashion_mnist, "FashionMNIST/raw"),
    ],
)
def test_idx_files_are_found_and_read(
    folder: Path, load, subfolder: str, packed: bool
) -> None:
    images, labels = make_idx(folder / subfolder, prefix="train", packed=packed)
    read_images, read_labels = load("train").tensors
    assert read_images.shape == (5, 1, 28, 28)
    assert read_images.dtype == torch.float32
    assert torch.equal((read_images[:, 0] * 255).round().byte(), torch.tensor(images))
    assert read_labels.dtype == torch.int64
    assert read_labels.tolist() == labels.tolist()


def test_subfolder_comes_before_the_top_of_the_folder(folder: Path) -> None:
    make_idx(folder, num_samples=5)
    make_idx(folder / "fashion_mnist", num_samples=7)
    assert len(data.mnist("test")) == 5
    assert len(data.fashion_mnist("test")) == 7


IMAGES, LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
THREE_IMAGES = idx_bytes(np.zeros((3, 28, 28), np.uint8))


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        (IMAGES, THREE_IMAGES[:-1], r"has 2351 bytes of data, expected 2352 for the"),
        (IMAGES, THREE_IMAGES + b"x", r"has 2353 bytes of data, expected 2352"),
        (IMAGES, THREE_IMAGES[:10], r"has 10 bytes .* expected at least 16"),
        (IMAGES, b"", r"has 0 bytes that start with ''"),
        (IMAGES, b"<html>", r"start with '3c 68 74 6d', .* with '00 00 08 03'"),
        (LABELS, THREE_IMAGES, r"start with '00 00 08 03', .* with '00 00 08 01'"),
        (
            IMAGES,
            THREE_IMAGES,
            r"shape \(3, 28, 28\), expected \(5, 28, 28\) for the 5",
        ),
        (IMAGES, idx_bytes(np.zeros((5, 8, 8), np.uint8)), r"shape \(5, 8, 8\)"),
        (
            IMAGES,
            gzip.compress(THREE_IMAGES, mtime=0)[:-20],
            r"is damaged: .*; get it again",
        ),
        (
            IMAGES,
            gzip.compress(THREE_IMAGES, mtime=0)[:-8] + bytes(8),
            r"is damaged: CRC",
        ),
        (IMAGES, b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 9, r"is damaged"),
    ],
)
def test_damaged_idx_file_is_named(
    folder: Path, name: str, raw: bytes, message: str
) -> None:
    make_idx(folder, packed=False)
    (folder / name).write_bytes(raw)
    with pytest.raises(ValueError, match=message) as caught:
        data.mnist("test")
    assert str(folder / name) in str(caught.value)


@pytest.mark.parametrize("subfolder", [".", "cifar10"])
@pytest.mark.parametrize("packed", [True, False])
def test_cifar10_is_read_from_archive_or_folder(
    folder: Path, packed: bool, subfolder: str
) -> None:
    files = make_cifar()
    place = folder / subfolder
    place.mkdir(exist_ok=True)
    if packed:
        # Not in the order of their numbers, which the reader must restore.
        shuffled = dict(sorted(files.items(), reverse=True))
        make_cifar_archive(place / "cifar-10-binary.tar.gz", shuffled)
    else:
        (place / "cifar-10-batches-bin").mkdir()
        for name, raw in files.items():
            (place / "cifar-10-batches-bin" / name).write_bytes(raw)
    images, labels = data.cifar10("train").tensors
    assert images.shape == (15, 3, 32, 32)
    assert images.dtype == torch.float32
    assert labels.tolist() == [batch for batch in range(5) for _ in range(3)]
    second_record = files["data_batch_1.bin"][3073 : 2 * 3073]
    assert (images[1] * 255).round().byte().numpy().tobytes() == second_record[1:]
    assert data.cifar10("test").tensors[1].tolist() == [5, 5, 5]


def test_cifar10_archive_is_not_unpacked_on_disk(folder: Path) -> None:
    make_cifar_archive(folder / "cifar-10-binary.tar.gz", make_cifar())
    data.cifar10("test")
    assert [path.name for path in folder.iterdir()] == ["cifar-10-binary.tar.gz"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (bytes(3072), r"test_batch.bin has 3072 bytes, expected a multiple of 3073"),
        (b"", r"test_batch.bin has 0 bytes"),
        (b"\x0a" + bytes(3072), r"test_batch.bin has the label 10, expected 0 to 9"),
    ],
)
def test_damaged_cifar10_file_is_named(folder: Path, raw: bytes, message: str) -> None:
    (folder / "cifar-10-batches-bin").mkdir()
    (folder / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(raw)
    with pytest.raises(ValueError, match=message):
        data.cifar10("test")


def test_damaged_cifar10_archive_is_named(folder: Path) -> None:
    archive = folder / "cifar-10-binary.tar.gz"
    make_cifar_archive(archive, make_cifar())
    whole = archive.read_bytes()
    for raw in (whole[: len(whole) // 2], whole[:5], b"<html>", b""):
        archive.write_bytes(raw)
        with pytest.raises(ValueError, match=r"is damaged: |holds no") as caught:
            data.cifar10("test")
        assert str(archive) in str(caught.value)
        assert str(caught.value).endswith("; get it again")
    make_cifar_archive(archive, {"data_batch_1.bin": b""})
    with pytest.raises(ValueError, match=r"holds no test_batch\.bin"):
        data.cifar10("test")


def test_labkit_data_that_is_no_folder_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path / "typo"))
    for load in (data.mnist, data.cifar10):
        with pytest.raises(ValueError, match=r"typo, which is not a folder"):
            load()


@pytest.mark.parametrize(
    ("load", "files", "subfolder"),
    [
        (data.mnist, [f"{IMAGES}.gz", f"{LABELS}.gz"], "mnist"),
        (data.fashion_mnist, [f"{IMAGES}.gz", f"{LABELS}.gz"], "fashion_mnist"),
        (data.cifar10, ["cifar-10-binary.tar.gz"], "cifar10"),
    ],
)
def test_offline_error_says_what_to_do(load, files: list[str], subfolder: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        load("test")
    message = str(caught.value)
    assert f"cannot download {files[0]} of {subfolder}" in message
    assert f"{CLOSED_PORT}{files[0]}: " in message
    assert f"{CLOSED_PORT}mirror/{files[0]}: " in message
    assert "Connection refused" in message
    assert f"Put {' and '.join(files)} into the folder" in message
    assert f"LABKIT_DATA names (now not set), in its subfolder {subfolder};" in message
    assert "labkit.data.digits()" in message
    assert isinstance(caught.value.__cause__, OSError)


def test_offline_error_says_that_labkit_data_was_looked_in(folder: Path) -> None:
    make_idx(folder, prefix="train")
    with pytest.raises(RuntimeError) as caught:
        data.mnist("test")
    assert f"(now {folder}, where they are not)" in str(caught.value)


def test_download_is_checked_cached_and_shows_its_progress(
    server, local_only: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    url, served, asked = server
    _, labels = make_idx(served)
    serve_as(monkeypatch, "mnist", served, CLOSED_PORT, url)  # the second one answers
    assert data.mnist("test").tensors[1].tolist() == labels.tolist()
    assert asked == [f"/{IMAGES}.gz", f"/{LABELS}.gz"]
    assert "100%" in capfd.readouterr().err
    assert len(data.mnist("test")) == 5
    assert len(asked) == 2
    names = sorted(path.name for path in (local_only / "mnist").iterdir())
    assert names == [f"{IMAGES}.gz", f"{LABELS}.gz"]


def test_cifar10_is_downloaded(server, monkeypatch: pytest.MonkeyPatch) -> None:
    url, served, _ = server
    make_cifar_archive(served / "cifar-10-binary.tar.gz", make_cifar())
    serve_as(monkeypatch, "cifar10", served, url)
    assert len(data.cifar10("train")) == 15


def test_wrong_checksum_is_refused(
    server, local_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, served, _ = server
    make_idx(served)
    serve_as(monkeypatch, "mnist", served, url)
    (served / f"{IMAGES}.gz").write_bytes(b"a login page")
    with pytest.raises(RuntimeError, match="does not match the known hash") as caught:
        data.mnist("test")
    assert f"{url}{IMAGES}.gz: " in str(caught.value)
    assert list((local_only / "mnist").iterdir()) == []


def test_download_that_is_cut_off_is_an_error(
    local_only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"x" * 10)

        def log_message(self, *args: object) -> None:
            pass

    make_idx(tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{httpd.server_port}/"
        serve_as(monkeypatch, "mnist", tmp_path, url)
        with pytest.raises(RuntimeError, match=f"cannot download {IMAGES}"):
            data.mnist("test")
        httpd.shutdown()
    assert not [*local_only.rglob("*ubyte*")]


def test_file_that_the_server_lacks_is_an_error(
    server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, served, _ = server
    make_idx(served)
    serve_as(monkeypatch, "mnist", served, url)
    (served / f"{LABELS}.gz").unlink()
    with pytest.raises(RuntimeError, match=rf"download {LABELS}.gz(.|\n)*404"):
        data.mnist("test")


def test_simultaneous_downloads_all_succeed(
    server, local_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, served, _ = server
    make_idx(served, num_samples=500)
    serve_as(monkeypatch, "mnist", served, url)
    lengths: list[int] = []
    start = threading.Barrier(4)

    def rank() -> None:
        start.wait(timeout=10)
        lengths.append(len(data.mnist("test")))

    threads = [threading.Thread(target=rank) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert lengths == [500] * 4
    assert len(list((local_only / "mnist").iterdir())) == 2


def test_text_windows_are_bytes_with_targets_one_ahead(tmp_path: Path) -> None:
    file = tmp_path / "text.bin"
    file.write_bytes(bytes(range(256)))
    windows = data.text(file, 5)
    assert windows.vocab_size == 256
    assert len(windows) == 51  # 255 bytes have a next one
    x, y = windows[50]
    assert x.dtype == y.dtype == torch.int64
    assert x.tolist() == [250, 251, 252, 253, 254]
    assert y.tolist() == [251, 252, 253, 254, 255]
    assert torch.equal(windows[-1][0], x)
    with pytest.raises(IndexError):
        windows[51]
    assert sum(1 for _ in windows) == 51
    assert windows.data.dtype == torch.uint8
    xs, ys = next(iter(DataLoader(windows, batch_size=4)))
    assert xs.shape == ys.shape == (4, 5)


def test_text_stride_sets_the_overlap(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"abcdefgh")
    windows = data.text(str(file), 3, stride=2)
    xs = [bytes(x.tolist()) for x, _ in windows]
    assert xs == [b"abc", b"cde", b"efg"]


def test_text_splits_share_no_byte(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(100)))
    train, test = data.text(file, 2, "train"), data.text(file, 2, split="test")
    assert train.data.tolist() == list(range(90))
    assert test.data.tolist() == list(range(90, 100))


def test_text_errors_say_what_was_found(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"0123456789")
    assert len(data.text(file, 9)) == 1
    message = r"all of it has 10 bytes, one window needs block_size \+ 1 = 11"
    with pytest.raises(ValueError, match=message):
        data.text(file, 10)
    with pytest.raises(ValueError, match="test has 1 bytes"):
        data.text(file, 1, "test")
    with pytest.raises(ValueError, match="block_size is 0; choose 1 or more"):
        data.text(file, 0)
    with pytest.raises(ValueError, match="stride is -1; choose 1 or more"):
        data.text(file, 2, stride=-1)
    with pytest.raises(FileNotFoundError, match="missing is not a file; give"):
        data.text(tmp_path / "missing", 2)
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="has 0 bytes"):
        data.text(file, 1)


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs tinyshakespeare in {SHARED}")
def test_tinyshakespeare_is_windowed_whole() -> None:
    windows = data.text(SHARED / "tinyshakespeare.txt", 128)
    assert len(windows) == 1_115_393 // 128
    assert bytes(windows[0][0][:13].tolist()) == b"First Citizen"
    joined = torch.cat([x for x, _ in windows])
    assert torch.equal(joined.byte(), windows.data[: len(joined)])


def test_import_needs_no_notebook_and_no_download_library() -> None:
    heavy = ["IPython", "ipyparallel", "matplotlib", "sklearn", "pooch"]
    code = f"import sys, labkit.data; print([m for m in {heavy} if m in sys.modules])"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert ran.stdout == "[]\n", ran.stderr


def test_without_a_file_the_text_is_prose_that_python_has() -> None:
    windows = data.text(block_size=64)
    x, y = windows[10]
    assert x.tolist()[1:] == y.tolist()[:-1]
    everything = bytes(int(byte) for x, _ in windows for byte in x).decode("utf-8", "?")
    words = everything.split()
    assert len(everything) > 300_000
    assert words.count("the") > 2_000
    assert len(data.text(split="train")) > 8 * len(data.text(split="test")) > 0

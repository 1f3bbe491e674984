"""Small real datasets for the notebooks and tests, as map-style PyTorch datasets.

`digits` ships with scikit-learn and needs no download. `mnist`, `fashion_mnist` and
`cifar10` are read from the folder named by the environment variable `LABKIT_DATA`,
else downloaded once into the user's cache folder. `text` windows the bytes of a
file, or of prose that comes with Python.

`LABKIT_DATA` is read by the process that calls: set it before the cluster starts, so
that every rank sees it. Images are float32 from 0 to 1; each rank holds them in memory.
"""

import gzip
import hashlib
import os
import tarfile
import zlib
from collections.abc import Iterable
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data import TensorDataset

from labkit.checks import absolute

__all__ = ["ByteWindows", "cifar10", "digits", "fashion_mnist", "mnist", "text"]


@dataclass(frozen=True)
class Source:
    """Where the files of one dataset come from."""

    mirrors: tuple[str, ...]
    """Addresses to put a file's name behind, tried in this order."""
    folders: tuple[str, ...]
    """Folders inside `LABKIT_DATA` to look in, in this order."""
    md5: dict[str, str]
    """Checksum of each file, by its name."""


# The checksums are those that torchvision and the datasets' authors publish.
SOURCES = {
    "mnist": Source(
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        folders=("mnist", "MNIST/raw", "."),  # MNIST/raw is torchvision's layout
        md5={
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fashion_mnist": Source(
        mirrors=(
            "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        folders=("fashion_mnist", "FashionMNIST/raw", "."),
        md5={
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    "cifar10": Source(
        mirrors=(
            "https://www.cs.toronto.edu/~kriz/",
            "https://cave.cs.toronto.edu/kriz/",
        ),
        folders=("cifar10", "."),
        md5={"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
    ),
}


def digits(split: str = "train") -> TensorDataset:
    """Load the 8x8 handwritten digits that ship with scikit-learn; no download.

    The samples come writer by writer, so the test set is other people's handwriting;
    its ten classes are even (33 to 37 samples each).

    Parameters
    ----------
    split : {"train", "test", "all"}, default "train"
        The first 1,438 samples, the last 359, or both.

    Returns
    -------
    TensorDataset
        Images, float32 (N, 1, 8, 8) from 0 to 1, and labels, int64 (N,).

    Raises
    ------
    ValueError
        For another split.

    Examples
    --------
    >>> images, labels = digits().tensors
    >>> images.shape, labels.dtype
    (torch.Size([1438, 1, 8, 8]), torch.int64)
    """
    from sklearn.datasets import load_digits

    ranges = {"train": slice(1438), "test": slice(1438, None), "all": slice(None)}
    _check_split(split, ranges)
    bunch = load_digits()
    images, labels = bunch.images[ranges[split]], bunch.target[ranges[split]]
    return _image_dataset(images[:, None], labels, max_value=16)


def mnist(split: str = "train") -> TensorDataset:
    """Load MNIST's handwritten digits.

    Reads the IDX files, packed (.gz) or not, from `LABKIT_DATA` (`mnist/`, `MNIST/raw/`
    or its top), else downloads them.

    Parameters
    ----------
    split : {"train", "test"}, default "train"
        60,000 or 10,000 samples.

    Returns
    -------
    TensorDataset
        Images, float32 (N, 1, 28, 28) from 0 to 1, and labels, int64 (N,).

    Raises
    ------
    ValueError
        For another split, or a damaged file.
    RuntimeError
        Where the download fails.
    """
    return _idx_dataset("mnist", split)


def fashion_mnist(split: str = "train") -> TensorDataset:
    """Load Fashion-MNIST, ten kinds of clothes.

    Like `mnist`; the folders are `fashion_mnist/` and `FashionMNIST/raw/`. The files
    have the same names as MNIST's: better not keep either at the top of `LABKIT_DATA`.

    Parameters
    ----------
    split : {"train", "test"}, default "train"
        60,000 or 10,000 samples.

    Returns
    -------
    TensorDataset
        Images, float32 (N, 1, 28, 28) from 0 to 1, and labels, int64 (N,).

    Raises
    ------
    ValueError
        For another split, or a damaged file.
    RuntimeError
        Where the download fails.
    """
    return _idx_dataset("fashion_mnist", split)


def cifar10(split: str = "train") -> TensorDataset:
    """Load CIFAR-10's photographs.

    Reads the binary version, which needs no unpickling, from `LABKIT_DATA` or its
    subfolder `cifar10/`: the folder `cifar-10-batches-bin/` or
    `cifar-10-binary.tar.gz`; else downloads it.

    Parameters
    ----------
    split : {"train", "test"}, default "train"
        50,000 samples (586 MiB as float32) or 10,000.

    Returns
    -------
    TensorDataset
        RGB images, float32 (N, 3, 32, 32) from 0 to 1, and labels, int64 (N,).

    Raises
    ------
    ValueError
        For another split, or a damaged file.
    RuntimeError
        Where the download fails.
    """
    batches = {
        "train": [f"data_batch_{i}.bin" for i in range(1, 6)],
        "test": ["test_batch.bin"],
    }
    _check_split(split, batches)
    folders, archive = SOURCES["cifar10"].folders, ["cifar-10-binary.tar.gz"]
    unpacked = [f"{folder}/cifar-10-batches-bin" for folder in folders]
    found = chain(
        _local_files(unpacked, batches[split]), _local_files(folders, archive)
    )
    paths = next(found, None) or _download("cifar10", archive)
    if paths[0].suffix == ".bin":
        contents = [(str(path), path.read_bytes()) for path in paths]
    else:
        contents = _read_tar(paths[0], batches[split])
    records = np.concatenate([_cifar_records(name, raw) for name, raw in contents])
    images = records[:, 1:].reshape(-1, 3, 32, 32)
    return _image_dataset(images, records[:, 0], max_value=255)


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows over bytes; item i is (x, y), int64 (block_size,) each, y one ahead.

    Window i starts at byte `i * stride`; a last window that would be short is left out.

    Parameters
    ----------
    data : Tensor
        The bytes, uint8 (num_bytes,).
    block_size : int
        Bytes of a window.
    stride : int
        Bytes from the start of one window to that of the next.
    """

    vocab_size = 256

    def __init__(self, data: Tensor, block_size: int, stride: int) -> None:
        self.data = data
        self.block_size = block_size
        self.stride = stride

    def __len__(self) -> int:
        return max(0, (len(self.data) - self.block_size - 1) // self.stride + 1)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = range(len(self))[index] * self.stride  # IndexError past the end
        window = self.data[start : start + self.block_size + 1].long()
        return window[:-1], window[1:]


def text(
    path: str | os.PathLike[str] | None = None,
    block_size: int = 128,
    split: str | None = None,
    *,
    stride: int | None = None,
) -> ByteWindows:
    """Window the bytes of any file, for next-byte prediction.

    Parameters
    ----------
    path : str or path, optional
        The file; by default some 400 kB of English prose that every Python has: what
        `help()` says of the language, from `pydoc_data.topics`.
    block_size : int, default 128
        Bytes of a window.
    split : {"train", "test"}, optional
        The text's first 90%, or the rest; by default all of it.
    stride : int, optional
        Bytes from the start of one window to that of the next; by default
        `block_size`, which has no overlap.

    Returns
    -------
    ByteWindows
        Item i is (x, y), int64 (block_size,) each, y one byte ahead.

    Raises
    ------
    FileNotFoundError
        Where there is no such file.
    ValueError
        Where not one window fits, and for sizes below 1.
    """
    stride = block_size if stride is None else stride
    for name, value in {"block_size": block_size, "stride": stride}.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; choose 1 or more")
    if split is not None:
        _check_split(split, ("train", "test"))
    if path is None:
        name = "the text of pydoc_data.topics"
        prose = "\n\n".join(topics[each] for each in sorted(topics))
        data = torch.frombuffer(bytearray(prose.encode()), dtype=torch.uint8)
    else:
        file = Path(path).expanduser()
        if not file.is_file():
            raise FileNotFoundError(
                f"{absolute(path)} is not a file; give the path of one"
            )
        name = str(file)
        data = torch.from_numpy(np.fromfile(file, dtype=np.uint8))
    boundary = len(data) * 9 // 10
    if split is not None:
        data = data[:boundary] if split == "train" else data[boundary:]
    windows = ByteWindows(data, block_size, stride)
    if len(windows) == 0:
        raise ValueError(
            f"{name}: {split or 'all of it'} has {len(data)} bytes, one window needs "
            f"block_size + 1 = {block_size + 1}; choose a smaller block_size or a "
            "longer text"
        )
    return windows


def _check_split(split: str, allowed: Iterable[str]) -> None:
    if split not in allowed:
        raise ValueError(f"split is {split!r}; choose one of {', '.join(allowed)}")


def _image_dataset(
    images: np.ndarray, labels: np.ndarray, *, max_value: int
) -> TensorDataset:
    return TensorDataset(
        torch.from_numpy(images.astype(np.float32)).div_(max_value),
        torch.from_numpy(labels.astype(np.int64)),
    )


def _idx_dataset(name: str, split: str) -> TensorDataset:
    prefixes = {"train": "train", "test": "t10k"}
    _check_split(split, prefixes)
    prefix = prefixes[split]
    files = [f"{prefix}-images-idx3-ubyte.gz", f"{prefix}-labels-idx1-ubyte.gz"]
    source = SOURCES[name]
    # MNIST and Fashion-MNIST name their files alike: never take one for the other.
    others = {s.md5.get(files[1]) for s in SOURCES.values() if s is not source}
    found = _local_files(source.folders, files)
    found = (paths for paths in found if _md5(paths[1]) not in others)
    images_path, labels_path = next(found, None) or _download(name, files)
    images = _read_idx(images_path, num_dims=3)
    labels = _read_idx(labels_path, num_dims=1)
    if images.shape != (len(labels), 28, 28):
        raise ValueError(
            f"{images_path} holds images of shape {images.shape}, expected "
            f"{(len(labels), 28, 28)} for the {len(labels)} labels in {labels_path}; "
            "get both again"
        )
    return _image_dataset(images[:, None], labels, max_value=255)


def _md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def _read_idx(path: Path, *, num_dims: int) -> np.ndarray:
    """The unsigned bytes of an IDX file, packed or not, in the shape its header says.

    IDX: two zero bytes, the type (8: unsigned byte), the number of dimensions, each
    dimension as a big-endian 32-bit number, then the data.
    """
    raw = path.read_bytes()
    if raw.startswith(b"\x1f\x8b"):
        try:
            raw = gzip.decompress(raw)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is damaged: {error}; get it again") from error
    magic, header_bytes = bytes((0, 0, 8, num_dims)), 4 + 4 * num_dims
    if not raw.startswith(magic) or len(raw) < header_bytes:
        raise ValueError(
            f"{path} is no IDX file of {num_dims}-dimensional bytes: it has {len(raw)} "
            f"bytes that start with '{raw[:4].hex(' ')}', expected at least "
            f"{header_bytes} that start with '{magic.hex(' ')}'; get it again"
        )
    shape = tuple(np.frombuffer(raw, ">u4", count=num_dims, offset=4).tolist())
    if len(raw) != header_bytes + prod(shape):
        raise ValueError(
            f"{path} has {len(raw) - header_bytes} bytes of data, expected "
            f"{prod(shape)} for the shape {shape} in its header; get it again"
        )
    return np.frombuffer(raw, np.uint8)[header_bytes:].reshape(shape)


def _read_tar(path: Path, names: list[str]) -> list[tuple[str, bytes]]:
    """(description, bytes) of the members with these names; nothing is unpacked."""
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as tar:
            for member in tar:  # in file order, so that gzip never has to rewind
                name = Path(member.name).name
                file = tar.extractfile(member) if name in names else None
                if file is not None:
                    contents[name] = file.read()
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}; get it again") from error
    if missing := [name for name in names if name not in contents]:
        raise ValueError(f"{path} holds no {', '.join(missing)}; get it again")
    return [(f"{name} in {path}", contents[name]) for name in names]


def _cifar_records(name: str, raw: bytes) -> np.ndarray:
    """One row of 3,073 bytes a sample: the label, then the red, green, blue planes."""
    if not raw or len(raw) % 3073:
        raise ValueError(
            f"{name} has {len(raw)} bytes, expected a multiple of 3073 "
            "(a label and a 3x32x32 image); get it again"
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, 3073)
    if (largest := records[:, 0].max()) > 9:
        raise ValueError(
            f"{name} has the label {largest}, expected 0 to 9; get it again"
        )
    return records


def _local_files(folders: Iterable[str], files: list[str]) -> Iterator[list[Path]]:
    """The paths of `files`, once for each folder in LABKIT_DATA that has them all."""
    value = os.environ.get("LABKIT_DATA")
    if not value:
        return
    root = Path(value).expanduser()
    if not root.is_dir():
        raise ValueError(
            f"LABKIT_DATA is {value}, which is not a folder; name one that exists, or "
            "unset it to download"
        )
    for folder in folders:
        packed = [root / folder / file for file in files]
        paths = [
            p if p.is_file() else p.with_name(p.name.removesuffix(".gz"))
            for p in packed
        ]
        if all(path.is_file() for path in paths):
            yield paths


def _download(name: str, files: list[str]) -> list[Path]:
    """The paths of `files` in the user's cache folder, downloaded where not yet there.

    Ranks may do this at the same time: pooch downloads to a temporary file of its own
    in that folder, checks it, and renames it into place. At worst each rank downloads.
    """
    import pooch

    source = SOURCES[name]
    paths = []
    for file in files:
        failures: dict[str, Exception] = {}
        for mirror in source.mirrors:
            url = mirror + file
            try:
                path = pooch.retrieve(
                    url,
                    known_hash=f"md5:{source.md5[file]}",
                    fname=file,
                    path=pooch.os_cache("labkit") / name,
                    progressbar=True,
                )
            # requests' errors are OSErrors; a wrong checksum is a ValueError.
            except (OSError, ValueError) as error:
                failures[url] = error
            else:
                paths.append(Path(path))
                break
        else:
            reasons = "\n".join(f"  {url}: {error}" for url, error in failures.items())
            folder = os.environ.get("LABKIT_DATA")
            now = f"{folder}, where they are not" if folder else "not set"
            raise RuntimeError(
                f"cannot download {file} of {name}:\n{reasons}\n"
                f"Put {' and '.join(files)} into the folder that the environment "
                f"variable LABKIT_DATA names (now {now}), in its subfolder "
                f"{source.folders[0]}; or use labkit.data.digits(), which needs no "
                "download."
            ) from failures[url]
    return paths

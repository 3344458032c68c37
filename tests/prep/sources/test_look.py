"""The look at the names of class folders: layouts of public data sets that are read, and those that are asked about."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest

from resolute.errors import ResoluteError
from resolute.prep.sources.detect import open_source
from resolute.prep.sources.folders.look import Look
from tests.support.source_formats import jpeg, names, pack_table, pack_tar, pack_zip

Prep = Callable[..., Any]


def photos(folders: str, name: str = "{:04d}.jpg", count: int = 6) -> list[str]:
    """Photos in each of the folders, whose names are separated by commas."""
    return [f"{folder.strip()}/{name.format(i)}" for folder in folders.split(",") for i in range(count)]


def texts(folders: str, *stems: str, suffix: str = "jpg") -> list[str]:
    return [f"{folder.strip()}/{stem}.{suffix}" for folder in folders.split(",") for stem in stems]


def listed_in(folder: str, numbers: Sequence[int]) -> list[str]:
    return [f"{folder}/{number}.jpg" for number in numbers]


def question(listed: Sequence[str], tables: Sequence[str] = (), **options: object) -> str:
    """What prep asks about the source `data`, after its path; "" if it asks nothing."""
    look = Look("data", **options)  # type: ignore[arg-type]
    for name in listed:
        look.photo(name)
    for name in tables:
        look.other_file(name)
    try:
        look.check()
    except ResoluteError as error:
        return str(error).removeprefix("data: ")
    return ""


READ = {
    "ImageNet": photos("n01440764, n01443537, n02102040"),
    "ImageNet, a few": photos("n00, n01"),
    "Tiny ImageNet's train": photos("n01443537/images, n01629819/images"),
    "CIFAR-10": photos("airplane, automobile, bird, ship, truck"),
    "VOC's classes": photos("aeroplane, bicycle, car, train, tvmonitor"),
    "trains and cars": photos("train, car"),
    "whole words": photos("trains, test tube, training shoe, valley, devil, Express train"),
    "a test tube and a train": photos("train, test tube, cat"),
    "Caltech-101": photos("BACKGROUND_Google, Faces, Faces_easy, accordion", "image_{:04d}.jpg"),
    "Caltech-256": photos("001.ak47, 002.american-flag, 257.clutter"),
    "Food-101": photos("apple_pie, baby_back_ribs, baklava"),
    "EuroSAT": photos("AnnualCrop, Forest, SeaLake"),
    "GTSRB": photos("0, 1, 2, 42"),
    "GTSRB of 2011": photos("00000, 00001, 00042"),
    "Stanford Dogs": photos("n02085620-Chihuahua, n02085782-Japanese_spaniel"),
    "CUB-200": photos("001.Black_footed_Albatross, 002.Laysan_Albatross"),
    "Oxford Flowers, sorted": photos("1, 2, 10, 102", "image_{:05d}.jpg"),
    "UC Merced": photos("agricultural, airplane, denseresidential"),
    "MIT Indoor-67": photos("airport_inside, artstudio, trainstation, winecellar"),
    "iNaturalist 2021": photos("00000_Animalia_Annelida, 00001_Animalia_Annelida, 00002_Animalia_Arthropoda"),
    "LFW": [f"{person}/{person}_{i:04d}.jpg" for person in ("Aaron_Eckhart", "Zico") for i in range(1, 4)],
    "VGGFace2": photos("n000002, n000003", "{:04d}_01.jpg"),
    "Kvasir": photos("dyed-lifted-polyps, esophagitis, normal-cecum"),
    "AID": photos("Airport, BareLand, Beach"),
    "RESISC45": photos("airplane, railway, railway_station"),
    "Intel's scenes": photos("buildings, forest, glacier, sea"),
    "State Farm": photos("c0, c1, c9"),
    "dogs and cats": photos("cat, dog"),
    "ISIC": [f"{('benign', 'malignant')[i % 3 == 0]}/ISIC_{i:07d}.jpg" for i in range(0, 900, 7)],
    "chest X-rays": photos("NORMAL, PNEUMONIA"),
    "brain tumours": photos("glioma, meningioma, notumor, pituitary"),
    "face masks": photos("with_mask, without_mask, mask_weared_incorrect", "{}.png"),
    "a mask and no mask": photos("mask, no_mask", "{}.png"),
    "mask and nomask": photos("Mask, NoMask", "{}.png"),
    "deep fakes": photos("original, fake"),
    "PACS as styles": photos("photo, sketch, cartoon"),
    "the alphabet": photos("A, B, C, del, nothing, space"),
    "class_0": photos("class_0, class_1"),
    "labels": photos("label1, label2"),
    "categories": photos("category-3, category-4"),
    "types": photos("type 2, type 3"),
    "grades": photos("grade1, grade2"),
    "stages": photos("stage_1, stage_2"),
    "coins": photos("1 euro, 2 euro"),
    "folders in class folders": photos("cat, cat/more, dog, dog/old, dog/new"),
    "the same folders beside the photos of a class": photos("cat, cat/a, cat/b, dog, dog/a, dog/b"),
    "photos that are counted in each folder": photos("left turn, right turn, straight on", "img ({}).jpg"),
    "photos named a and b": texts("cat, dog", "a", "b"),
    "views of many articles": texts(", ".join("abcdefghijkl"), "front", "back", "side"),
}


@pytest.mark.parametrize("layout", READ)
def test_good_class_folders_are_read_without_a_question(layout: str) -> None:
    assert not question(READ[layout])
    assert not question(READ[layout][::-1])


SPLITS, PARTS, TWICE = "holds splits, got ", "differ only in a number", "the same folders "
ASKED: dict[str, tuple[list[str], Sequence[str], str, str]] = {
    # layout: photos, tables, what is seen, the first settings
    "chest_xray on Kaggle": (
        photos("train/N, train/P, val/N, val/P, test/N, test/P, chest_xray/train/N, chest_xray/train/P"),
        (),
        f"{SPLITS}train, val and test beside chest_xray",
        "SRC=data/train VAL=data/val",
    ),
    "torchvision's ImageNet": (
        photos("train/n00, train/n01, val/n00, val/n01"),
        (),
        f"{SPLITS}train and val",
        "SRC=data/train VAL=data/val",
    ),
    "Tiny ImageNet": (
        photos("train/n01/images, train/n02/images, val/images, test/images"),
        ("wnids.txt", "words.txt", "val/val_annotations.txt"),
        SPLITS,
        "SRC=data/train VAL=data/val VAL_LABELS=data/val/val_annotations.txt",
    ),
    "Stanford Cars": (
        photos("cars_train, cars_test"),
        ("train.csv",),
        SPLITS,
        "SRC=data/cars_train LABELS=data/train.csv",
    ),
    "APTOS": (
        photos("train_images, test_images"),
        ("train.csv", "test.csv", "sample_submission.csv"),
        SPLITS,
        "SRC=data/train_images LABELS=data/train.csv,",
    ),
    "dogs-vs-cats": (photos("train, test1"), ("sampleSubmission.csv",), SPLITS, "SRC=data/train LABELS=TABLE"),
    "Hugging Face": (
        photos("train, test"),
        ("train/metadata.csv", "test/metadata.csv"),
        SPLITS,
        "SRC=data/train VAL=data/test,",
    ),
    "Intel's scenes, unpacked": (
        photos(
            "seg_train/seg_train/sea, seg_train/seg_train/ice, seg_test/seg_test/sea, seg_test/seg_test/ice, "
            "seg_pred/seg_pred"
        ),
        (),
        SPLITS,
        "SRC=data/seg_train/seg_train VAL=data/seg_test/seg_test",
    ),
    "COCO": (
        photos("train2017, val2017"),
        ("instances_train2017.json",),
        SPLITS,
        "LABELS=data/instances_train2017.json",
    ),
    "STL-10": (photos("train, unlabeled"), (), SPLITS, "SRC=data/train"),
    "SVHN": (photos("train, test, extra"), (), SPLITS, "SRC=data/train"),
    "Market-1501": (photos("bounding_box_train, bounding_box_test, query"), (), SPLITS, "SRC=data/bounding_box_train"),
    "Fruits-360": (
        photos("Training/Kiwi, Training/Plum, Test/Kiwi, Test/Plum"),
        (),
        SPLITS,
        "SRC=data/Training VAL=data/Test",
    ),
    "Train_set and eval-set": (
        photos("Train_set/a, Train_set/b, eval-set/a, eval-set/b"),
        (),
        SPLITS,
        "SRC=data/Train_set VAL=data/eval-set",
    ),
    "words without a mark between": (photos("cartrain, cartest"), (), SPLITS, "SRC=data/cartrain"),
    "a holdout": (photos("train, holdout"), (), SPLITS, "SRC=data/train"),
    "classes and splits in one name": (photos("train_cat, train_dog, test_cat, test_dog"), (), SPLITS, "SRC=LIST"),
    "train beside screenshots": (
        photos("train/cat, train/dog, docs"),
        (),
        f"{SPLITS}train beside docs",
        "SRC=data/train,",
    ),
    "splits in one of the folders": (
        photos("fruits/Train/a, fruits/Train/b, fruits/Test/a, papers"),
        (),
        f"{SPLITS}Train and Test in fruits",
        "SRC=data/fruits/Train",
    ),
    "splits in a single folder": (
        photos("archive/train/cat, archive/train/dog, archive/valid/cat, archive/valid/dog"),
        (),
        SPLITS,
        "SRC=data/archive/train VAL=data/archive/valid",
    ),
    "splits in each class": (
        photos("cat/train, cat/test, dog/train, dog/test"),
        (),
        f"{SPLITS}train and test in cat",
        "SRC=data/cat",
    ),
    "PlantVillage": (
        photos("color/a, color/b, grayscale/a, grayscale/b, segmented/a, segmented/b"),
        (),
        "versions of the same photos",
        "SRC=data/color,",
    ),
    "Office-31": (
        photos("amazon/images/mug, amazon/images/pen, webcam/images/mug, webcam/images/pen"),
        (),
        f"{TWICE}in each, got mug and pen in amazon and webcam",
        "SRC=data/amazon/images for one of them",
    ),
    "parts of classes": (photos("part1/cat, part1/dog, part2/cat, part2/dog"), (), TWICE, "SRC=data/part1 for"),
    "folds": (photos("fold1/a, fold1/b, fold2/a, fold2/b"), (), TWICE, "SRC=data/fold1 for"),
    "years": (photos("2019/a, 2019/b, 2020/a, 2020/b"), (), TWICE, "SRC=data/2019 for"),
    "brain tumours twice": (
        photos("yes, no, brain_tumor_dataset/yes, brain_tumor_dataset/no"),
        (),
        f"{TWICE}twice, got yes and no",
        "SRC=data/brain_tumor_dataset,",
    ),
    "NIH": (
        photos("images_001/images, images_002/images"),
        ("Data_Entry_2017.csv", "train_val_list.txt"),
        PARTS,
        "SRC=data LABELS=data/Data_Entry_2017.csv",
    ),
    "HAM10000": (
        photos("HAM10000_images_part_1, HAM10000_images_part_2"),
        ("HAM10000_metadata.csv",),
        PARTS,
        "SRC=data LABELS=data/HAM10000_metadata.csv",
    ),
    "batches": (photos("batch_01, batch_02, batch_03"), (), PARTS, "SRC=data LABELS=TABLE"),
    "parts by letter, beside another": (photos("part-a, part-b, misc"), (), PARTS, "SRC=data LABELS=TABLE"),
    "patients": (photos("patient12, patient13"), (), PARTS, "KIND=folders"),
    "ORL": (photos("s1, s2, s40"), (), PARTS, "KIND=folders"),
    "dates": (photos("2019-05-01, 2019-05-02"), (), PARTS, "KIND=folders"),
    "magnifications": (photos("40X, 100X"), (), PARTS, "KIND=folders"),
    "SUN397": (photos("a/abbey, a/airport, b/beach, b/barn"), (), "folders of folders", "SRC=data/a for"),
    "iNaturalist 2018": (photos("Aves/1, Aves/2, Plantae/3, Plantae/4"), (), "folders of folders", "SRC=data/Aves for"),
    "BreakHis": (
        photos("benign/SOB/adenosis, benign/SOB/tubular, malignant/SOB/ductal, malignant/SOB/lobular"),
        (),
        "folders of folders, got benign/SOB/adenosis",
        "SRC=data/benign/SOB for",
    ),
    "an odd test": (photos("cat, dog, test_images"), (), f"{SPLITS}test_images beside cat and dog", "SRC=FOLDER"),
    "pix2pix": (photos("input, target"), (), "masks or annotations", "SRC=data/input"),
    "copies of a folder": (photos("New folder, New folder (2)"), (), PARTS, "KIND=folders"),
    "masks": (photos("images, masks"), (), "masks or annotations beside photos", "SRC=data/images LABELS=TABLE"),
    "Oxford Pets": (photos("images, annotations/trimaps", "pug_{}.jpg"), (), "masks or annotations", "SRC=data/images"),
    "Carvana": (photos("train, train_masks"), (), "masks or annotations", "SRC=data/train"),
    "masks of a class": (photos("cats, cats_masks, dogs"), (), "masks or annotations", "KIND=folders"),
    "YOLO": (photos("images, labels"), (), "masks or annotations", "SRC=data/images"),
    "masks of counted photos": (
        photos("street, mask"),
        (),
        "photos of the same names in two folders",
        "SRC=data/street",
    ),
    "VOC": (
        photos("JPEGImages, SegmentationClass, SegmentationObject"),
        (),
        "folders that are no classes",
        "SRC=data/JPEGImages",
    ),
    "augmented photos": (photos("original, augmented"), (), "versions of the same photos", "SRC=data/original"),
    "two sides": (texts("left, right", "house", "tree", "street"), (), "photos of the same names", "SRC=data/left"),
    "masks under other names": (
        [*texts("a", "house", "tree"), *texts("b", "house_mask", "tree_mask", suffix="png")],
        (),
        "photos of the same names",
        "SRC=data/a",
    ),
    "times of day": (
        [f"{folder}/{name}.jpg" for folder in ("rgbd", "thermal") for name in ("100519", "100931", "114203", "171109")],
        (),
        "photos of the same names",
        "SRC=data/rgbd",
    ),
    "CUB-200, one level too high": (
        photos("images/001.A, images/002.B"),
        ("images.txt",),
        "too few classes",
        "SRC=data/images",
    ),
    "DTD, one level too high": (photos("images/banded, images/dotted"), (), "too few classes", "SRC=data/images"),
    "folders around the class folders": (photos("a/b/c/cat, a/b/c/dog"), (), "too few classes", "SRC=data/a/b/c"),
    "a folder of photos and a table": (
        photos("images"),
        ("labels.csv",),
        "too few classes",
        "SRC=data/images LABELS=data/labels.csv",
    ),
    "photos and a table": (
        ["a.jpg", "b.jpg"],
        ("labels.csv", "README.txt"),
        "no class folders",
        "SRC=data LABELS=data/labels.csv",
    ),
    "photos and several tables": (
        ["a.jpg"],
        ("train.csv", "labels.csv"),
        "no class",
        "SRC=data LABELS=data/labels.csv or LABELS=data/train.csv",
    ),
    "two folders and a table": (
        photos("cat, dog"),
        ("labels.csv",),
        "a table beside the folders",
        "SRC=data LABELS=data/labels.csv,",
    ),
    "photos outside folders": (
        [f"{i}.jpg" for i in range(50)] + photos("thumbnail, crop"),
        (),
        "more photos outside",
        "SRC=data LABELS=TABLE",
    ),
}


@pytest.mark.parametrize("layout", ASKED)
def test_folders_that_may_be_no_classes_are_asked_about_with_the_settings_to_use(layout: str) -> None:
    listed, tables, seen, settings = ASKED[layout]
    asked = question(listed, tables)
    assert seen in asked
    assert settings in f"{asked.partition('; use ')[2]},"


@pytest.mark.parametrize(
    "table",
    [
        "README.txt",
        "classes.txt",
        "class_names.csv",
        "labels.txt",
        "wnids.txt",
        "words.txt",
        "requirements.txt",
        "data.yaml",
    ],
)
def test_files_that_hold_no_labels_raise_no_question_beside_class_folders(table: str) -> None:
    assert not question(photos("cat, dog"), [table])


def test_a_table_beside_many_class_folders_raises_no_question() -> None:
    assert not question(photos("ant, bee, cat, dog"), ["labels.csv"])


def test_class_folders_that_are_classes_already_raise_no_question() -> None:
    listed = photos("part1, part2")
    assert question(listed, known=["part1"])
    assert not question(listed, known=["part1", "part2", "part3"])


def test_the_question_about_val_names_the_settings_of_val() -> None:
    both = photos("train/a, train/b, val/a, val/b")
    assert "; use VAL=data/val, or KIND=folders" in question(both, setting="VAL")
    flat = question(photos("images"), ["val_annotations.txt"], setting="VAL")
    assert flat.endswith("; use VAL=data/images VAL_LABELS=data/val_annotations.txt")


def test_a_table_is_also_found_above_a_folder_of_photos(tmp_path: Path, work: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(jpeg(1))
    pack_table(tmp_path / "labels.csv", [("a.jpg", "cat")])
    with pytest.raises(ResoluteError, match=f"use SRC={tmp_path}/photos LABELS={tmp_path}/labels.csv"):
        names(open_source(str(tmp_path / "photos"), scan_cache=work))
    with pytest.raises(ResoluteError, match=f"use VAL={tmp_path}/photos VAL_LABELS={tmp_path}/labels.csv"):
        names(open_source(str(tmp_path / "photos"), setting="VAL", scan_cache=work))


def in_a_folder(tmp_path: Path, listed: Sequence[str]) -> str:
    for name in listed:
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / name).write_bytes(b"x")
    return str(tmp_path / "p")


def in_a_store(tmp_path: Path, listed: Sequence[str]) -> str:
    for name in listed:
        fsspec.filesystem("memory").pipe(f"/look/{tmp_path.name}/{name}", b"x")
    return f"memory://look/{tmp_path.name}"


def in_a_zip(tmp_path: Path, listed: Sequence[str]) -> str:
    return str(pack_zip(tmp_path / "p.zip", [(f"top/{name}", b"x") for name in listed]))


def in_a_tar(tmp_path: Path, listed: Sequence[str]) -> str:
    return str(pack_tar(tmp_path / "p.tar.gz", [(name, b"x") for name in listed], "gz"))


@pytest.mark.parametrize("make", [in_a_folder, in_a_store, in_a_zip, in_a_tar])
def test_every_kind_of_source_is_looked_at_unless_its_kind_is_given(
    tmp_path: Path, work: Path, make: Callable[[Path, Sequence[str]], str]
) -> None:
    listed = photos("train/cat, train/dog, val/cat, val/dog")
    src = make(tmp_path, listed)
    place = src.removesuffix(".zip").removesuffix(".tar.gz")
    kind = "archive" if place != src else "folders"
    use = "; use" if kind == "folders" else "; unpack it and use"
    with pytest.raises(
        ResoluteError, match=rf"{use} SRC={place}/train VAL={place}/val, or KIND={kind} if train and val"
    ):
        names(open_source(src, scan_cache=work))
    assert names(open_source(src, kind=kind, scan_cache=work)) == listed
    assert names(open_source(src, named_classes=["train", "val"], scan_cache=work)) == listed


def test_archives_that_are_splits_are_named_in_the_question(tmp_path: Path, work: Path) -> None:
    for split in ("train", "test"):
        pack_zip(tmp_path / f"{split}.zip", [(f"{i}.jpg", b"x") for i in range(4)])
    with pytest.raises(ResoluteError, match=f"holds splits.*; use SRC={tmp_path}/train.zip"):
        names(open_source(f"{tmp_path}/*.zip", scan_cache=work))


def in_parts(photos: Path) -> Path:
    for i, name in enumerate(("apple", "bee", "cat")):
        (photos / name).rename(photos / f"part{i}")
    return photos


def test_a_question_costs_nothing_but_a_line_and_a_kind_or_names_of_classes_answer_it(
    tmp_path: Path, prep: Prep, photos: Path
) -> None:
    arguments = ("--src", in_parts(photos), "--out", tmp_path / "set", "--res", 32, "--dry")
    asked = prep(*arguments)
    assert asked.status == 2
    assert "got part0, part1 and part2, expected names of classes; use" in asked.err
    assert prep(*arguments, "--kind", "folders").status == 0
    (tmp_path / "classes.txt").write_text("part0\npart1\npart2\n")
    assert prep(*arguments, "--classes", tmp_path / "classes.txt").status == 0


def test_a_set_whose_classes_would_be_asked_about_today_stays_as_it_is(
    tmp_path: Path, prep: Prep, photos: Path
) -> None:
    arguments = ("--src", in_parts(photos), "--out", tmp_path / "set", "--res", 32)
    assert prep(*arguments, "--kind", "folders").status == 0
    assert "nothing to do" in prep(*arguments).out


def test_a_sample_of_the_names_decides_as_all_names_do_in_any_order() -> None:
    numbers = random.Random(1).sample(range(10**9), 60_000)
    listed = listed_in("left", numbers) + listed_in("right", numbers)
    asked = question(listed)
    assert "photos of the same names in two folders" in asked
    random.Random(2).shuffle(listed)
    assert question(listed).partition(", got ")[0] == asked.partition(", got ")[0]
    assert not question([f"{folder}/{i}.jpg" for folder in ("left", "right") for i in range(0, 600_000, 5)])
    other = random.Random(3).sample(range(10**9, 2 * 10**9), 60_000)
    assert not question(listed_in("left", numbers) + listed_in("right", other))


def test_a_question_is_one_line_whatever_names_hold() -> None:
    assert "\n" not in question(photos("part\n1, part\n2"))


@pytest.mark.timing
@pytest.mark.parametrize(("folders", "each"), [(2, 100_000), (200, 1000), (100_000, 2)])
def test_a_million_names_would_be_looked_at_in_a_few_seconds(folders: int, each: int) -> None:
    listed = [f"{i} things/{j * 37 % 999_983}.jpg" for i in range(folders) for j in range(each)]
    began = time.process_time()
    question(listed)
    assert time.process_time() - began < 1

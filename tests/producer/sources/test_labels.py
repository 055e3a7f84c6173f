"""Labels of images from files and functions: types, class ids, boxes, and every way images and labels can differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock_common.errors import SourceError
from penstock_producer.sources.config import ImagesConfig
from penstock_producer.sources.images import ImagesSource
from tests.contracts.source import read
from tests.producer.sources.conftest import UserModule

NAMES = ("a.png", "b.png", "sub/c.png")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three images, one of them in a sub-folder."""
    root = tmp_path / "pictures"
    for name in NAMES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2)).save(root / name)
    return root


def labelled(pictures: Path, text: str, suffix: str = ".csv", **options: Any) -> ImagesSource:
    """The pictures with a labels file of this text."""
    file = pictures.parent / f"labels{suffix}"
    file.write_text(text, encoding="utf-8")
    return ImagesSource(ImagesConfig(path=str(pictures), labels=str(file), **options))


def values(images: ImagesSource, name: str) -> list[Any]:
    """One tensor of all samples."""
    return [np.asarray(read(images, index)[name]).tolist() for index in range(len(images))]


def test_csv_columns_become_typed_tensors(pictures: Path) -> None:
    """Numbers must arrive as numbers and names as class ids, without a schema."""
    text = 'image,label,age,score,at\nb.png,dog,7,0.5,"[1, 2]"\na.png,cat,8,1,"[3, 4]"\nsub/c.png,cat,9,2,"[5, 6]"\n'
    images = labelled(pictures, text)
    assert images.spec == {
        "x": ("uint8", (2, 2, 3)),
        "label": ("int64", ()),
        "age": ("int64", ()),
        "score": ("float32", ()),
        "at": ("int64", (2,)),
    }
    assert images.info["classes"] == {"label": ["cat", "dog"]}
    assert values(images, "label") == [0, 1, 0]
    assert values(images, "age") == [8, 7, 9]
    assert values(images, "score") == [1.0, 0.5, 2.0]
    assert values(images, "at") == [[3, 4], [1, 2], [5, 6]]


def test_tab_separated_files_and_byte_order_marks_are_read(pictures: Path) -> None:
    """Spreadsheets write both."""
    assert values(labelled(pictures, "\ufefffile\ty\na.png\t1\nb.png\t2\nsub/c.png\t3\n", ".tsv"), "y") == [1, 2, 3]


def test_json_lines_carry_boxes_of_any_number(pictures: Path) -> None:
    """Detection: images with no, one and several boxes."""
    rows = [
        {"file": "a.png", "boxes": [[1, 2, 3, 4], [5, 6, 7, 8]], "tags": ["red", "big"]},
        {"file": "b.png", "boxes": [], "tags": []},
        {"file": "./sub/c.png", "boxes": [[0.5, 0, 1, 1]], "tags": ["big"]},
    ]
    images = labelled(pictures, "\n".join(map(json.dumps, rows)) + "\n\n", ".jsonl")
    assert images.spec["boxes"] == ("float32", (None, 4))
    assert images.spec["tags"] == ("int64", (None,))
    assert images.info["classes"] == {"tags": ["big", "red"]}
    assert [read(images, index)["boxes"].shape for index in range(3)] == [(2, 4), (0, 4), (1, 4)]
    assert values(images, "boxes")[2] == [[0.5, 0, 1, 1]]
    assert values(images, "tags") == [[1, 0], [], [0]]


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".JSON"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_of_objects_is_a_label_table(pictures: Path, suffix: str, indent: int | None) -> None:
    """Annotation tools export one array, on one line or on many."""
    labels = ("dog", "cat", "dog")
    rows = [{"file": NAMES[n], "label": labels[n], "boxes": [[1, 2, 3, 4]] * n} for n in range(3)]
    images = labelled(pictures, "\n" + json.dumps(rows, indent=indent), suffix)
    assert images.info["classes"] == {"label": ["cat", "dog"]}
    assert values(images, "label") == [1, 0, 1]
    assert [read(images, index)["boxes"].shape for index in range(3)] == [(0, 4), (1, 4), (2, 4)]


def test_boxes_are_ragged_even_where_all_images_have_equally_many(pictures: Path) -> None:
    """The next epoch's images may have others."""
    rows = [{"file_name": name, "boxes": [[1, 2, 3, 4]]} for name in NAMES]
    assert labelled(pictures, "\n".join(map(json.dumps, rows)), ".jsonl").spec["boxes"] == ("float32", (None, 4))
    empty = [{"file_name": name, "boxes": []} for name in NAMES]
    assert labelled(pictures, "\n".join(map(json.dumps, empty)), ".jsonl").spec["boxes"] == ("float32", (None, 4))


def test_unlabelled_images_are_refused_or_skipped(pictures: Path) -> None:
    """One folder with a file of labels per split is common; a forgotten label is too."""
    text = "file,y\nsub/c.png,5\na.png,4\n"
    with pytest.raises(
        SourceError, match=r"labels\.csv has no labels for 1 image \(b\.png\); add them, or leave them out"
    ):
        labelled(pictures, text)
    images = labelled(pictures, text, unlabelled="skip")
    assert images.info["files"] == ["a.png", "sub/c.png"]
    assert values(images, "y") == [4, 5]


@pytest.mark.parametrize(
    ("text", "suffix", "message"),
    [
        ("file,y\na.png,1\nb.png,2\nsub/c.png,3\nz.png,4\n", ".csv", r"names 1 image \(z\.png\) not among the images"),
        ("file,y\na,1\nb,2\n", ".csv", r"names 2 images \(a, \.\.\.\) not among .* named like 'a\.png'"),
        ("a.png,1\nb.png,2\n", ".csv", "has no header: found 'a.png,1'; expected a first line like file,label"),
        ("", ".csv", "has no header"),
        ("file;y\na.png;1\n", ".csv", "the separator ';': found 'file;y'; expected a comma .*, as in 'file,y'"),
        ("file,y\na.png,1\n", ".tsv", "the separator ',': found 'file,y'; expected a tab between columns"),
        (
            f"file,y\na.png,1\nb.png,{2**63}\n",
            ".csv",
            rf"labels\.csv, row 3: 'y' is {2**63}; expected a whole",
        ),
        (
            f"file,y\na.png,1.5\nb.png,{2**64}\nsub/c.png,2\n",
            ".csv",
            rf"labels\.csv, row 3: 'y' is {2**64}; expected a whole",
        ),
        (
            f"file,y\na.png,1.5\nb.png,{2**24 + 1}\nsub/c.png,2\n",
            ".csv",
            r"labels\.csv: 'y' holds 16777217 among decimals, and float32 does not hold .* at most 16777216, or whole",
        ),
        ("file,y\na.png,1\nb.png,nan\nsub/c.png,2\n", ".csv", "row 3: 'y' is nan; expected a finite number"),
        ("file,y\na.png,-inf\nb.png,1\nsub/c.png,2\n", ".csv", "row 2: 'y' is -inf; expected a finite number"),
        ("file,y\na.png,1.5\nb.png,1e39\nsub/c.png,2\n", ".csv", r"row 3: 'y' is 1e\+39; expected a finite number"),
        (
            "file,age\na.png,10\nb.png,?\nsub/c.png,9\n",
            ".csv",
            r"row 3: 'age' is '\?', and 2 of the 3 rows have a number; expected a number in each: .*--skip-unlabelled",
        ),
        ("file\tage\na.png\t1.5\nb.png\t2\nsub/c.png\tn/a\n", ".tsv", "row 4: 'age' is 'n/a', and 2 of the 3 rows"),
        ("file,age,y,age\na.png,1,2,3\n", ".csv", r"labels\.csv has two columns 'age'; give each column a name"),
        ("file,y\n", ".csv", "holds no rows"),
        ("file,y\na.png,1\na.png,2\n", ".csv", "names 'a.png' twice; give one row per image"),
        ("file,y\na.png,1\nb.png,\n", ".csv", r"row 3: found \['b.png', ''\]; expected a value for each"),
        ("file,y\na.png,1,2\n", ".csv", "row 2: found"),
        ("file,x\na.png,1\nb.png,1\nsub/c.png,1\n", ".csv", "'x' is the image itself"),
        ('file,y\na.png,"[1, 2]"\nb.png,"[1"\nsub/c.png,[]', ".csv", "'y' holds a list that is not JSON"),
        (f"file,y\na.png,{'[' * 5000}\n", ".csv", "'y' holds a list that is not JSON: maximum recursion depth"),
        ('{"file": "a.png"', ".jsonl", "line 1 is not JSON"),
        ('{"name": "a.png"}', ".jsonl", 'line 1: found {"name": "a.png"}; expected an object like {"file": "a.jpg"'),
        ("1", ".jsonl", "line 1: found 1; expected an object"),
        ('[{"file": "a.png"}, 1]', ".json", 'row 2: found 1; expected an object like {"file": "a.jpg"'),
        ('[{"name": "a.png"}]', ".json", 'row 1: found {"name": "a.png"}; expected an object'),
        ('[\n{"file": "a.png"},\n', ".json", r"labels\.json is not JSON: .*line 3"),
        ("[]", ".json", "holds no rows; expected one per image"),
        ("[" * 10**5, ".json", "is not JSON"),
    ],
)
def test_a_wrong_labels_file_says_where(pictures: Path, text: str, suffix: str, message: str) -> None:
    """Users write labels, and each mistake gives one line that names the place."""
    with pytest.raises(SourceError, match=message) as caught:
        labelled(pictures, text, suffix)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["1", '"one"', "2"], "'y' holds int and str; expected numbers only"),
        (["1", "null", "2"], "'y' holds a missing value and int"),
        (["1", "[1]", "2"], "'y' mixes values and lists"),
        (["1", str(2**70), "2"], "'y': .* too (large|big)"),
        (["[[1], [1, 2]]", "[[1]]", "[[1]]"], "'y': .*inhomogeneous"),
    ],
)
def test_columns_that_are_no_tensor_say_why(pictures: Path, cells: list[str], message: str) -> None:
    """A missing or stray value must not become NaN or a class of its own."""
    rows = [f'{{"file": "{name}", "y": {cell}}}' for name, cell in zip(NAMES, cells, strict=True)]
    with pytest.raises(SourceError, match=message):
        labelled(pictures, "\n".join(rows), ".jsonl")


def test_class_names_may_be_numbers(pictures: Path) -> None:
    """A text beside numbers is a class where the user names the classes, or where most cells are texts."""
    text = "file,label,age\na.png,1,3\nb.png,unknown,1\nsub/c.png,0,2\n"
    with pytest.raises(SourceError, match=r"'label' is 'unknown', and 2 of the 3 rows .* or all names in --classes"):
        labelled(pictures, text)
    images = labelled(pictures, text, classes=("0", "1", "unknown"))
    assert (values(images, "label"), values(images, "age")) == ([1, 2, 0], [3, 1, 2])
    most = labelled(pictures, "file,model\na.png,911\nb.png,Boxster\nsub/c.png,Cayenne\n")
    assert most.info["classes"] == {"model": ["911", "Boxster", "Cayenne"]}


def test_numbers_with_decimals_are_float32_if_it_holds_the_whole_ones(pictures: Path) -> None:
    """A count of 16777217 must not become 16777216 because another row has a decimal."""
    images = labelled(pictures, f"file,y\na.png,0.1\nb.png,{2**24}\nsub/c.png,{3 * 2**30}\n")
    assert images.spec["y"] == ("float32", ())
    assert values(images, "y") == [float(np.float32(0.1)), 2**24, 3 * 2**30]
    rows = [{"file": name, "y": [0.5, 2**24 + 1]} for name in NAMES]
    with pytest.raises(SourceError, match="'y' holds 16777217 among decimals"):
        labelled(pictures, "\n".join(map(json.dumps, rows)), ".jsonl")


def test_boxes_need_four_numbers(pictures: Path) -> None:
    """A box of five is some other format's."""
    rows = [json.dumps({"file": name, "boxes": [[1, 2, 3, 4, 5]]}) for name in NAMES]
    with pytest.raises(SourceError, match=r"expected lists of \[x, y, width, height\]"):
        labelled(pictures, "\n".join(rows), ".jsonl")


def test_rows_need_the_same_columns(pictures: Path) -> None:
    """A tensor that only some samples have cannot be batched."""
    rows = [json.dumps({"file": name, "y": 1} | ({"z": 1} if name == "a.png" else {})) for name in NAMES]
    with pytest.raises(SourceError, match=r"rows differ: \['y', 'z'\] and \['y'\]"):
        labelled(pictures, "\n".join(rows), ".jsonl")


def test_labels_that_are_no_text_or_absent_say_so(pictures: Path) -> None:
    """The labels file's path is a path too."""
    with pytest.raises(SourceError, match=r"labels file .*none.csv: No such file"):
        ImagesSource(ImagesConfig(path=str(pictures), labels=str(pictures / "none.csv")))
    with pytest.raises(SourceError, match="is not UTF-8"):
        ImagesSource(ImagesConfig(path=str(pictures), labels=str(pictures / "a.png")))


def test_changed_labels_change_the_fingerprint(pictures: Path) -> None:
    """Other labels make other samples of the same images."""
    texts = [f"file,y\na.png,{y}\nb.png,2\nsub/c.png,3\n" for y in (1, 2)]
    assert labelled(pictures, texts[0]).fingerprint != labelled(pictures, texts[1]).fingerprint


def test_a_function_of_the_path_labels_images(pictures: Path, user_module: UserModule) -> None:
    """Labels often hide in file names."""
    name = user_module(
        """
        def letter(path): return path.removeprefix("sub/")[0]
        def both(path): return {"y": len(path), "deep": "/" in path}
        def fails(path): return {"a.png": 1}[path]
        """
    )
    images = ImagesSource(ImagesConfig(path=str(pictures), label=f"{name}:letter"))
    assert images.info["classes"] == {"y": ["a", "b", "c"]}
    assert values(images, "y") == [0, 1, 2]
    both = ImagesSource(ImagesConfig(path=str(pictures), label=f"{name}:both"))
    assert both.spec["deep"] == ("bool", ())
    assert values(both, "y") == [5, 5, 9]
    with pytest.raises(SourceError, match=rf"{name}:fails failed on 'b\.png': KeyError: 'b\.png' \({name}\.py:4\)"):
        ImagesSource(ImagesConfig(path=str(pictures), label=f"{name}:fails"))

"""Folders of labelled images: a folder for each label."""

from __future__ import annotations

import os
from typing import Any

from horovodlike.data.records.source import RecordFile, RecordSource, check_unchanged, damage
from horovodlike.errors import DamagedRecordsError

__all__ = ["ImageFolder"]


class ImageFolder(RecordFile):
    """The images of one label, sorted by name. The index is the label's number, and the names of the images.

    A record is a dictionary, as in the shards that ``convert_images`` makes: ``image``, the bytes of the file;
    ``label``, the label's number; ``name``, the path of the file below the folder of all labels.
    """

    suffixes = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")

    def __init__(self, source: RecordSource) -> None:
        """Open nothing: images are compared with their stamps when they are read."""
        self._source = source

    @classmethod
    def scan(cls, path: str, label: int = 0) -> RecordSource:
        """List the images of a label.

        Raises:
            DamagedRecordsError: An image is empty.
            ValueError: There are no images, or something else.
        """
        with os.scandir(path) as folder:
            found = sorted(
                (each for each in folder if not each.name.startswith((".", "_"))), key=lambda each: each.name
            )
        if not found:
            raise ValueError(f"the folder of the label {path} has no images: add some, or remove it")
        stamps = []
        for number, each in enumerate(found):
            if not each.is_file() or os.path.splitext(each.name)[1].lower() not in cls.suffixes:
                raise ValueError(f"{each.path} is no image: the names of images end in {', '.join(cls.suffixes)}")
            stamps.append((each.stat().st_size, each.stat().st_mtime_ns))
            if not stamps[-1][0]:
                raise DamagedRecordsError(each.path, number, number + 1, "the file is empty")
        index = label, tuple(each.name for each in found)
        return RecordSource(path, cls, (len(found),), tuple(stamps), index)

    def path_of(self, number: int) -> str:
        """Return the path of an image."""
        name: str = self._source.index[1][number]
        return os.path.join(self._source.path, name)

    def read(self, start: int, end: int) -> list[Any]:
        """Return images as they are in their files."""
        return [self._record(number) for number in range(start, end)]

    def _record(self, number: int) -> dict[str, Any]:
        path = self.path_of(number)
        check_unchanged(path, self._source.stamps[number])
        with open(path, "rb") as file, damage(path, number, number + 1, OSError):
            content = file.read()
        label, name = os.path.split(path)
        return {"image": content, "label": self._source.index[0], "name": f"{os.path.basename(label)}/{name}"}

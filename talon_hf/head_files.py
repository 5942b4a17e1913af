"""Files of a draft head: a folder or a Hub repository, config.json and weights, in one file or in shards.

Raw JSON and raw tensors are read, since the classes that a head's config.json names (a Llama) are not what its weights
are. A file that cannot be read is an error that names the head, the file and the remedy; nothing in a file is run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError
from safetensors.torch import load_file
from torch import Tensor

INDEX = ".index.json"
WEIGHT_FILES = ("model.safetensors", f"model.safetensors{INDEX}", "pytorch_model.bin", f"pytorch_model.bin{INDEX}")
WEIGHTS = "model.safetensors or pytorch_model.bin"
SUFFIXES = (".json", ".safetensors", ".bin")
HEAD_FILES = f"config.json and {WEIGHTS}"
AGAIN = "Download or save it again."
# What stands at the start of a file that is something else than its name says.
LFS_POINTER = b"version https://git-lfs"
WEB_PAGE = b"<"


class HeadFiles:
    """Where a head's files are.

    Args:
        source: folder, or Hub id; a folder of a repository is "org/repository/folder".
        subfolder: below it.
        hub: `revision`, `token`, `cache_dir`, `local_files_only` and the like, as in `hf_hub_download`.

    Raises:
        OSError: `source` is a file, or written as a path and no folder.
    """

    def __init__(
        self, source: str | os.PathLike[str], subfolder: str | os.PathLike[str] | None = None, **hub: Any
    ) -> None:
        self.source = os.fsdecode(source)
        self._subfolder, self._hub = os.fspath(subfolder) if subfolder else None, hub
        if not self.source:
            raise FileNotFoundError(f"The head is an empty string: it is a folder with {HEAD_FILES}, or a Hub id.")
        if Path(self.source).is_file():
            raise NotADirectoryError(f"{self.source!r} is a file: a head is the folder around it, with {HEAD_FILES}.")
        is_written_as_path = re.search(r"^[./~]|^\w:/|\\|//|/$", self.source) is not None
        self.is_folder = Path(self.source).is_dir()
        if (isinstance(source, os.PathLike) or is_written_as_path) and not self.is_folder:
            raise FileNotFoundError(
                f"The folder {self.source!r} does not exist (the working directory is {os.getcwd()!r}). An EAGLE-3 "
                f"head is a folder with {HEAD_FILES}, or a Hub id such as 'org/head' or 'org/repository/head'."
            )

    def stamp(self) -> Hashable:
        """What changes when a folder's files do, or another folder is meant; the name alone for a Hub id."""
        if not self.is_folder:
            return self.source
        folder = Path(self.source, self._subfolder or "").resolve()
        files = [path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file()]
        # A copy may keep the time of its last change and a file written in place its inode; not both and the size.
        stats = ((path.name, path.stat()) for path in files)
        return folder, frozenset((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats)

    def find(self, names: tuple[str, ...], called: str) -> Path:
        """The first file that is there, downloaded from the Hub if need be; `called` names it in the error."""
        if self.is_folder:
            folder = Path(self.source, self._subfolder or "")
            for name in names:
                if (folder / name).is_file():
                    return folder / name
            raise FileNotFoundError(
                f"No {called} in {str(folder)!r}: an EAGLE-3 head is a folder with {HEAD_FILES}. Has all of it been "
                "copied or downloaded?"
            )
        owner, *rest = self.source.split("/")
        repository = "/".join([owner, *rest[:1]])
        below = "/".join([*rest[1:], *([self._subfolder] if self._subfolder else [])]) or None
        absent: Exception | None = None
        for name in names:
            try:
                return Path(hf_hub_download(repository, name, subfolder=below, **self._hub))
            except GatedRepoError:
                raise  # it says what to do
            except EntryNotFoundError as error:
                absent = error
            except RepositoryNotFoundError as error:
                absent = error
                break
            except HFValidationError as error:
                raise FileNotFoundError(
                    f"{self.source!r} is neither a folder nor a Hub id such as 'org/head' or 'org/repository/head'."
                ) from error
        raise FileNotFoundError(
            f"No {called} under {self.source!r} on the Hub, or the Hub is out of reach and the local cache lacks it; "
            f"and there is no folder of that name. An EAGLE-3 head is a folder with {HEAD_FILES}; a private "
            "repository needs `token`."
        ) from absent

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json and the tensors by name, on the CPU whatever the default device is.

        Raises:
            OSError: a file is missing.
            ValueError: a file is not what its name says.
        """
        with torch.device("cpu"):
            config = self._json(self.find(("config.json",), "config.json"))
            path = self.find(WEIGHT_FILES, WEIGHTS)
            return config, self._shards(path) if path.name.endswith(INDEX) else self._tensors(path)

    def _shards(self, index: Path) -> dict[str, Tensor]:
        places = self._json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise self._broken(index, "has no `weight_map` of tensor names and files")
        for name in places.values():
            # A name is one of the head's own files: no path leads out of its folder.
            if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*\.(safetensors|bin)", name):
                raise self._broken(index, f"names {name!r}, which is no weights file beside it")
        tensors: dict[str, Tensor] = {}
        for name in dict.fromkeys(places.values()):
            shard = self._tensors(self.find((name,), f"{name}, which {index.name} names,"))
            twice = sorted(shard.keys() & tensors.keys())
            if twice:
                raise self._broken(index, f"names files that both hold {', '.join(twice)}")
            tensors |= shard
        lost = sorted(places.keys() - tensors.keys())
        if lost:
            raise self._broken(index, f"names tensors that its files do not hold: {', '.join(lost)}")
        return tensors

    def _json(self, path: Path) -> dict[str, Any]:
        self._check_kind(path)
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise self._broken(path, f"is no JSON ({error})") from error
        if not isinstance(content, dict):
            raise self._broken(path, f"is a JSON {type(content).__name__}, not an object of names and values")
        return content

    def _tensors(self, path: Path) -> dict[str, Tensor]:
        self._check_kind(path)
        content: Any
        try:
            if path.suffix == ".safetensors":
                # Copies: the file stays mapped otherwise, and the head would change when it is written anew.
                return {name: tensor.clone() for name, tensor in load_file(path, device="cpu").items()}
            content = torch.load(path, map_location="cpu", weights_only=True)
        except MemoryError:
            raise
        except Exception as error:  # as many kinds as there are ways to spoil a file
            if "weights_only" in str(error):
                # Not passed on: what torch advises here is to run the code in the file.
                what = "is damaged, or holds more than tensors, and nothing else is loaded"
                raise self._broken(path, what, f"{AGAIN} A state dict holds tensors alone.") from None
            raise self._broken(path, f"is damaged or cut short ({type(error).__name__}: {_line(error)})") from None
        if not isinstance(content, dict):
            raise self._broken(path, f"holds a {type(content).__name__}, no tensors by name")
        for name, tensor in content.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                what = f"holds a {type(tensor).__name__} as {name!r}, not a tensor"
                raise self._broken(path, what, "Save the head's state dict.")
        return {name: tensor.detach() for name, tensor in content.items()}

    def _check_kind(self, path: Path) -> None:
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
        if not start:
            raise self._broken(path, "is empty")
        if start == LFS_POINTER:
            raise self._broken(
                path, "is a git-lfs pointer, not the file itself", "Run `git lfs pull` there, or download the file."
            )
        if start.startswith(WEB_PAGE):
            raise self._broken(path, "is a web page, not the file itself")

    def _broken(self, path: Path, what: str, remedy: str = AGAIN) -> ValueError:
        return ValueError(f"The head {self.source!r} cannot be read: {str(path)!r} {what}. {remedy}")


def _line(error: Exception) -> str:
    """The first line of its message, without the advice that may follow."""
    return (str(error).splitlines() or [""])[0].split(". ")[0][:200]

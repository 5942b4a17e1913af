"""The Hub repository of TALON: what goes into it, the rules its code must obey, and how it is uploaded.

transformers loads `custom_generate/generate.py` of such a repository together with the siblings that it imports
relatively. So the shipped modules are copied byte for byte, and `check_loader_rules` refuses what would not load.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .pair import DRAFT

PACKAGE = Path(__file__).parents[1]
ENTRY = "generate.py"
DEMO_HEAD_FILES = ("config.json", "model.safetensors", "README.md")
REQUIREMENTS = "transformers>=4.57\ntorch>=2.6\n"
# transformers itself depends on the last three, so whoever can call `generate` has them.
ALLOWED_PACKAGES = ("torch", "transformers", "huggingface_hub", "safetensors", "packaging")

# The loader's own patterns (transformers/dynamic_module_utils.py). They read text, so they also match in docstrings.
RELATIVE_IMPORT = re.compile(r"^\s*(?:from\s+\.(\S+)\s+import|import\s+\.(\S+)\s*$)", re.MULTILINE)
# The loader reads one clause a line: it drops what follows a comma or a space, and fails on "~=" and extras.
REQUIREMENT = re.compile(r"[A-Za-z0-9_-]+((==|!=|>=|<=|<|>)[0-9.]+)?")

# What the Hub accepts: letters, digits, `_`, `-` and `.`, without a double mark, a mark at an end, or a `.git` ending.
REPO_ID = re.compile(r"(?!.*(?:--|\.\.|\.git$))\w(?:[\w.-]*\w)?/\w(?:[\w.-]{0,94}\w)?", re.ASCII)

BUNDLE_MARK = "<!-- written by `talon-hf bundle` -->"
MODEL_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
tags:
- custom_generate
- speculative-decoding
- eagle3
---
{mark}

# TALON: the same text in fewer forwards

## Description

Speculative decoding with confidence-aware draft trees (TALON, [arXiv 2601.07353](https://arxiv.org/abs/2601.07353)).
A small drafter proposes a tree of continuations, deep where it is sure and wide where it is not; the model checks the
whole tree in one forward and keeps the tokens that it would have chosen itself. Greedy output equals plain `generate`,
(in half precision except where two logits tie within rounding) and sampled output has its distribution, whatever the
drafter and the options below: they change speed only.

## Base model

Works with the model that you call it on. `drafter/` holds a draft head for
[HuggingFaceTB/SmolLM2-135M-Instruct](https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), to try it out.

## Model compatibility

Decoder-only models of transformers 4.57 and later with full, sliding-window or chunked attention. What cannot be
verified as a tree (encoder-decoder and recurrent models, beam search) raises an error before any token.

## Additional Arguments

- `assistant_model` (`str` or `EagleDraft`): an EAGLE-3 head made for this model, as folder, Hub id or loaded.
- `talon_node_budget` (`int`, *optional*, defaults to 60): the nodes of a draft tree, its root counted.
- `talon_mu` (`float`, *optional*, defaults to 0.03): a node stays if its path probability is at least this fraction of
  the best one in its layer. Larger makes deeper and narrower trees.
- `talon_top_k` (`int`, *optional*, defaults to 10): the nodes of a tree's first layer.

## Output Type changes

None, but with `return_dict_in_generate=True` the output has one more field, `talon_stats`: what the call did.

## Example usage

```python
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
drafter = snapshot_download("{repo_id}", allow_patterns="drafter/*") + "/drafter"

chat = [{{"role": "user", "content": "Write a haiku about rivers."}}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
out = model.generate(
    **inputs,
    custom_generate="{repo_id}",
    assistant_model=drafter,
    trust_remote_code=True,
    talon_node_budget=60,
    talon_mu=0.03,
    max_new_tokens=64,
)
print(tokenizer.decode(out[0], skip_special_tokens=True))
```

Every such call asks the Hub whether the code has changed. To run one version and ask nothing, pin it and load it once
(`COMMIT` stands for a commit id of this repository):

```python
talon = model.load_custom_generate("{repo_id}", revision="COMMIT", trust_remote_code=True)
out = talon(model=model, **inputs, assistant_model=drafter, max_new_tokens=64)
```
"""


def bundle(directory: str | Path, *, repo_id: str = "org/talon") -> list[Path]:
    """Writes the Hub repository into `directory` and returns its files. `repo_id` is the name that the card uses.

    Raises:
        FileExistsError: `directory` holds something that an earlier `bundle` did not write.
        ValueError: a shipped module breaks a rule of the transformers loader.
    """
    directory = Path(directory)
    _clear_for_bundle(directory)
    code, drafter = directory / "custom_generate", directory / "drafter"
    sources = {code / module.name: module for module in shipped_modules()}
    sources |= {drafter / name: DRAFT / name for name in DEMO_HEAD_FILES}
    for target, source in sources.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    texts = {
        code / "requirements.txt": REQUIREMENTS,
        directory / "README.md": MODEL_CARD.format(mark=BUNDLE_MARK, repo_id=repo_id),
    }
    for target, text in texts.items():
        target.write_text(text, encoding="utf-8", newline="\n")
    check_loader_rules(code)
    return sorted([*sources, *texts])


def shipped_modules() -> list[Path]:
    """The modules that go to the Hub: `generate.py` and all that it imports relatively, directly or not."""
    found: dict[str, Path] = {}
    waiting = [ENTRY.removesuffix(".py")]
    while waiting:
        path = PACKAGE / f"{waiting.pop()}.py"
        if path.name in found or not path.is_file():  # check_loader_rules reports a missing one, with its line
            continue
        found[path.name] = path
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
                waiting.append(node.module)
    return [found[name] for name in sorted(found)]


def check_loader_rules(directory: str | Path) -> None:
    """Checks the modules and the requirements in `directory` against what transformers' loader can load.

    Raises:
        ValueError: lists every breach, one a line, as "file:line: what is wrong, and what to write instead".
    """
    directory = Path(directory)
    breaches = [] if (directory / ENTRY).is_file() else [f"{directory / ENTRY}:1: the loader starts at this file"]
    for path in sorted(directory.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        found = [*_text_breaches(text, directory), *_code_breaches(text)]
        breaches += [f"{path}:{line}: {what}" for line, what in sorted(set(found))]
    requirements = directory / "requirements.txt"
    if requirements.is_file():
        for line, entry in enumerate(requirements.read_text(encoding="utf-8").splitlines(), start=1):
            if not REQUIREMENT.fullmatch(entry):
                breaches.append(f"{requirements}:{line}: {entry!r} must be one plain clause such as torch>=2.6")
    if breaches:
        raise ValueError("transformers could not load this custom_generate code:\n" + "\n".join(breaches))


def publish(repo_id: str, *, private: bool = False, dry_run: bool = False, token: str | None = None) -> str:
    """Uploads the bundle to the Hub repository `repo_id`, creating it if needed, and returns its URL.

    With `dry_run` it contacts nothing and returns the list of files with their sizes instead. Modules that an earlier
    version left in the repository's `custom_generate/` are deleted.

    Raises:
        ValueError: `repo_id` is not "org/name", or `private` is asked for a repository that is already public.
        PermissionError: there is no token, or the Hub does not let it write to `repo_id`.
    """
    if not REPO_ID.fullmatch(repo_id):
        raise ValueError(f'`repo_id` must be "org/name", such as "my-org/talon", got {repo_id!r}.')
    with tempfile.TemporaryDirectory() as folder:
        if dry_run:
            return _listing(repo_id, Path(folder), bundle(folder, repo_id=repo_id))
        return _upload(repo_id, folder, private, token)


def _upload(repo_id: str, folder: str, private: bool, token: str | None) -> str:
    # Imported here so that `bundle` and a dry run stay free of anything that could reach the network.
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    token = token or get_token()
    if not token:
        raise PermissionError(
            f"publishing {repo_id!r} needs a Hub token with write access: run `hf auth login`, or set HF_TOKEN."
        )
    bundle(folder, repo_id=repo_id)
    api = HfApi(token=token)
    try:
        # None leaves a new repository to the organisation's default, which may be private.
        url = api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.model_info(repo_id).private:  # create_repo ignores `private` if the repository exists
            raise ValueError(
                f"{repo_id!r} exists and is public, so nothing was uploaded: make it private in its settings on the "
                "Hub, or publish without --private."
            )
        old = "custom_generate/*"
        api.upload_folder(repo_id=repo_id, folder_path=folder, delete_patterns=old, commit_message="Publish TALON")
    except HfHubHTTPError as error:
        if error.response is None or error.response.status_code not in (401, 403):
            raise
        raise PermissionError(
            f"the Hub does not let this token write to {repo_id!r} (HTTP {error.response.status_code}): run `hf auth "
            f"login` or set HF_TOKEN with a token that may write to {repo_id.split('/')[0]!r}, or choose a namespace "
            "of your own."
        ) from error
    return str(url)


def add_commands(subparsers: Any) -> None:
    """Adds `bundle` and `publish` to the `talon-hf` command. Each sets `run`, which takes the parsed arguments."""
    parser = subparsers.add_parser("bundle", help="write the Hub repository into a folder")
    parser.add_argument("directory", metavar="DIR", help="an empty or new folder, or an earlier bundle")
    parser.set_defaults(run=_run_bundle)
    parser = subparsers.add_parser("publish", help="create the Hub repository and upload it")
    parser.add_argument("repo_id", metavar="ORG/NAME", help="the repository on the Hub")
    parser.add_argument("--private", action="store_true", help="only the organisation can see it")
    parser.add_argument("--dry-run", action="store_true", help="show what would go up, contact nothing")
    parser.set_defaults(run=_run_publish)


def _run_bundle(args: argparse.Namespace) -> None:
    print(*bundle(args.directory), sep="\n")


def _run_publish(args: argparse.Namespace) -> None:
    print(publish(args.repo_id, private=args.private, dry_run=args.dry_run))


def _clear_for_bundle(directory: Path) -> None:
    """Removes the modules of an earlier bundle, so that none outlives its source; refuses any other content."""
    card = directory / "README.md"
    if card.is_file() and BUNDLE_MARK in card.read_text(encoding="utf-8"):
        for module in (directory / "custom_generate").glob("*.py"):
            module.unlink()
    elif directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} is not empty and not an earlier bundle: choose a new or an empty folder.")


def _listing(repo_id: str, folder: Path, files: list[Path]) -> str:
    sizes = [path.stat().st_size for path in files]
    rows = [f"{size:>12,}  {path.relative_to(folder).as_posix()}" for size, path in zip(sizes, files, strict=True)]
    return "\n".join([*rows, f"{sum(sizes):>12,}  bytes in {len(files)} files would go to {repo_id}"])


def _text_breaches(text: str, directory: Path) -> Iterator[tuple[int, str]]:
    """(line, what) for each relative import that the loader's patterns find, in code or not, and cannot follow."""
    for match in RELATIVE_IMPORT.finditer(text):
        module = match[1] or match[2]
        line = text.count("\n", 0, match.start(match.lastindex or 0)) + 1
        if module.startswith("."):
            yield line, "an import from a parent package; only siblings are fetched, write `from .module import name`"
        elif "." in module:
            yield line, f"an import from the sub-package `.{module}`; only flat siblings are fetched, move it beside"
        elif not (directory / f"{module}.py").is_file():
            yield line, f"`from .{module} import` names no sibling here; the loader reads text, so reword a docstring"


def _code_breaches(text: str) -> Iterator[tuple[int, str]]:
    """(line, what) for each import statement that the loader does not see, or whose package may be missing."""
    tree = ast.parse(text)
    seen = {match[1] for match in RELATIVE_IMPORT.finditer(text)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and node.module is None:
            yield node.lineno, "the loader does not see `from . import name`, write `from .module import name`"
        elif isinstance(node, ast.ImportFrom) and node.level and "." * (node.level - 1) + str(node.module) not in seen:
            yield node.lineno, f"the loader does not see this import of `.{node.module}`, start a line with it"
    for line, package in _absolute_imports(tree):
        if package not in sys.stdlib_module_names and package not in ALLOWED_PACKAGES:
            allowed = ", ".join(ALLOWED_PACKAGES)
            yield line, f"`{package}` would have to be installed; shipped code imports the standard library, {allowed}"


def _absolute_imports(node: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of the absolute imports below `node`. Like the loader, it does not look into `try`."""
    if isinstance(node, ast.Import):
        yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and not node.level:
        yield node.lineno, str(node.module).split(".")[0]
    for child in [] if isinstance(node, ast.Try) else ast.iter_child_nodes(node):
        yield from _absolute_imports(child)

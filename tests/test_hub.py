"""The Hub repository: what `bundle` writes, what the loader lint refuses, what `publish` uploads, and that the result
works for someone who has transformers and no `talon_hf`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from hub_stand_in import READ_TOKEN, WRITE_TOKEN, HubStandIn, StandInRepo, serve_hub
from packaging.version import Version
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, dynamic_module_utils

import talon_hf.tools.hub
from talon_hf.config import TalonConfig
from talon_hf.tools.hub import add_commands, bundle, check_loader_rules, publish, shipped_modules

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "talon_hf"


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    bundle(folder)
    return folder


@pytest.fixture(scope="module")
def tiny_target() -> LlamaForCausalLM:
    """Eight layers, so that EAGLE-3's three feature layers are distinct; wide weights, so that its text varies."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        bos_token_id=1,
        pad_token_id=0,
        initializer_range=0.4,
    )
    model = LlamaForCausalLM(config)
    model.eval()
    return model


# --- the bundle ---


def test_bundle_is_code_requirements_card_and_demo_head_and_nothing_else(tmp_path: Path) -> None:
    written = bundle(tmp_path / "new")
    code = [f"custom_generate/{path.name}" for path in shipped_modules()]
    head = ["drafter/config.json", "drafter/model.safetensors", "drafter/README.md"]
    expected = sorted(["README.md", "custom_generate/requirements.txt", *code, *head])
    assert sorted(path.relative_to(tmp_path / "new").as_posix() for path in written) == expected
    assert sorted(files_of(tmp_path / "new")) == expected


def test_bundled_modules_and_head_are_byte_copies(bundled: Path) -> None:
    for path in (bundled / "custom_generate").glob("*.py"):
        assert path.read_bytes() == (PACKAGE / path.name).read_bytes(), path.name
    for path in (bundled / "drafter").iterdir():
        assert path.read_bytes() == (PACKAGE / "assets" / "smollm2-135m-eagle3" / path.name).read_bytes(), path.name


def test_shipped_set_is_what_the_loader_would_fetch(bundled: Path) -> None:
    entry = bundled / "custom_generate" / "generate.py"
    fetched = {Path(path).name for path in dynamic_module_utils.get_relative_import_files(entry)} | {"generate.py"}
    assert {path.name for path in shipped_modules()} == fetched
    assert {"generate.py", "decoding.py"} <= fetched
    assert not {"__init__.py", "pair.py", "hub.py", "cli.py"} & fetched


def test_requirements_satisfy_the_loader_and_equal_those_in_git(bundled: Path) -> None:
    dynamic_module_utils.check_python_requirements(bundled, requirements_file="custom_generate/requirements.txt")
    in_git = (ROOT / "custom_generate" / "requirements.txt").read_bytes()
    assert (bundled / "custom_generate" / "requirements.txt").read_bytes() == in_git


def test_card_lists_the_repo_as_custom_generate_and_names_real_options(bundled: Path) -> None:
    card = huggingface_hub.ModelCard.load(bundled / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.license == "apache-2.0"
    assert card.data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert {"custom_generate", "speculative-decoding", "eagle3"} <= set(card.data.tags)
    for section in ("Description", "Base model", "Model compatibility", "Additional Arguments", "Example usage"):
        assert f"\n## {section}\n" in card.text
    defaults = TalonConfig()
    for option in ("node_budget", "mu", "top_k"):
        assert f"- `talon_{option}` (" in card.text
        assert f"defaults to {getattr(defaults, option)})" in card.text.split(f"- `talon_{option}`")[1].split("\n")[0]


def test_card_names_the_repository_it_is_written_for(tmp_path: Path) -> None:
    bundle(tmp_path, repo_id="me/mine")
    card = (tmp_path / "README.md").read_text()
    assert 'custom_generate="me/mine"' in card
    assert "org/talon" not in card


def test_bundle_leaves_a_foreign_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(FileExistsError, match="not empty and not an earlier bundle"):
        bundle(tmp_path)
    assert files_of(tmp_path) == {"README.md": b"mine"}


def test_bundle_over_an_earlier_one_drops_modules_that_are_gone(tmp_path: Path) -> None:
    bundle(tmp_path)
    before = files_of(tmp_path)
    (tmp_path / "custom_generate" / "gone.py").write_text("")
    (tmp_path / "custom_generate" / "generate.py").write_text("old")
    bundle(tmp_path)
    assert files_of(tmp_path) == before


def test_bundle_refuses_modules_that_the_loader_cannot_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "generate.py").write_text("from .missing import x\n")
    monkeypatch.setattr(talon_hf.tools.hub, "PACKAGE", package)
    with pytest.raises(ValueError, match=r"generate\.py:1: `from \.missing import` names no sibling"):
        bundle(tmp_path / "out")


# --- the loader's rules ---

FINE = "def generate(model, **kwargs):\n    return 'generated'\n"
LOADS = {
    "a sibling": {"generate.py": "from .core import x\n" + FINE, "core.py": "x = 1\n"},
    "parentheses": {"generate.py": "from .core import (\n    x,\n)\n" + FINE, "core.py": "x = 1\n"},
    "inside a function": {"generate.py": FINE + "def f():\n    from .core import x\n", "core.py": "x = 1\n"},
    "a cycle": {
        "generate.py": "from .a import x\nfrom .b import y\n" + FINE,
        "a.py": "x = 1\nfrom .b import y\n",
        "b.py": "y = 1\nfrom .a import x\n",
    },
    "an optional package": {"generate.py": "try:\n    import no_such_package\nexcept ImportError:\n    pass\n" + FINE},
    "prose about an import": {"generate.py": '"""Not at a line start: from .ghost import x."""\n' + FINE},
    "the allowed packages": {
        "generate.py": "import json, torch, transformers, huggingface_hub, safetensors, packaging\n" + FINE
    },
}
BREAKS = {
    "from . import": (
        {"generate.py": "\nfrom . import core\n" + FINE, "core.py": ""},
        "generate.py:2",
        "from .module",
    ),
    "from . import in try": (
        {"generate.py": "try:\n    from . import core\nfinally:\n    pass\n" + FINE, "core.py": ""},
        "generate.py:2",
        "from .module",
    ),
    "a sub-package": (
        {"generate.py": "from .pkg.mod import x\n" + FINE, "pkg/mod.py": "x = 1\n"},
        "generate.py:1",
        "flat",
    ),
    "a parent": (
        {"generate.py": "import os\nfrom ..core import x\n" + FINE, "../core.py": "x = 1\n"},
        "generate.py:2",
        "parent",
    ),
    "a docstring": (
        {"generate.py": '"""Say\n\n    from .ghost import x\n"""\n' + FINE},
        "generate.py:3",
        "reads text",
    ),
    "a docstring of a sibling": (
        {"generate.py": "from .core import x\n" + FINE, "core.py": 'x = """\nimport .ghost\n"""\n'},
        "core.py:2",
        "reads text",
    ),
    "a missing sibling": ({"generate.py": "from .ghost import x\n" + FINE}, "generate.py:1", "no sibling"),
    "an import after a semicolon": (
        {"generate.py": "import os; from .core import x\n" + FINE, "core.py": "x = 1\n"},
        "generate.py:1",
        "start a line",
    ),
    "a package": ({"generate.py": "import no_such_package.sub\n" + FINE}, "generate.py:1", "`no_such_package`"),
    "a package in a function": (
        {"generate.py": FINE + "def f():\n    from no_such_package import x\n"},
        "generate.py:4",
        "`no_such_package`",
    ),
    "a package for type checkers": (
        {"generate.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import no_such_package\n" + FINE},
        "generate.py:3",
        "`no_such_package`",
    ),
    "no generate.py": ({"core.py": FINE}, "generate.py:1", "starts at this file"),
    "two clauses": (
        {"generate.py": FINE, "requirements.txt": "torch>=2.6\ntransformers ~= 4.57\n"},
        "requirements.txt:2",
        "one plain clause",
    ),
    "an extra": (
        {"generate.py": FINE, "requirements.txt": "torch[opt]>=2\n"},
        "requirements.txt:1",
        "one plain clause",
    ),
}


def write_repo(folder: Path, files: dict[str, str]) -> Path:
    code = folder / "custom_generate"
    for name, text in files.items():
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text(text)
    return code


@pytest.fixture
def load(tiny_target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """transformers' own loader with a cache of its own, as a function of the repository's folder."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("transformers_modules")}
    (tmp_path / "modules").mkdir()
    yield lambda folder: tiny_target.load_custom_generate(str(folder), trust_remote_code=True)
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.parametrize("case", LOADS)
def test_lint_passes_what_the_loader_loads(case: str, tmp_path: Path, load: Any) -> None:
    check_loader_rules(write_repo(tmp_path / "repo", LOADS[case]))
    assert load(tmp_path / "repo")(model=None) == "generated"


@pytest.mark.parametrize("case", BREAKS)
def test_lint_names_file_and_line_of_what_the_loader_cannot_load(case: str, tmp_path: Path, load: Any) -> None:
    files, place, why = BREAKS[case]
    code = write_repo(tmp_path / "repo", files)
    with pytest.raises(ValueError, match="could not load") as refusal:
        check_loader_rules(code)
    where, _, what = str(refusal.value).splitlines()[1].partition(": ")
    assert where == str(code / place.partition(":")[0]) + ":" + place.partition(":")[2]
    assert why in what
    with pytest.raises((ImportError, OSError, KeyError)):
        load(tmp_path / "repo")


def test_clone_of_this_repository_loads_the_installed_package(load: Any) -> None:
    assert load(ROOT) is importlib.import_module("talon_hf.generate").generate


def test_lint_refuses_a_package_that_only_this_machine_has(tmp_path: Path) -> None:
    code = write_repo(tmp_path, {"generate.py": "import pytest\n" + FINE})
    with pytest.raises(ValueError, match=r"generate\.py:1: `pytest` would have to be installed"):
        check_loader_rules(code)


def test_lint_lists_every_breach(tmp_path: Path) -> None:
    code = write_repo(tmp_path, {"generate.py": "from . import a\n", "b.py": "import talon_hf\nfrom ..c import d\n"})
    with pytest.raises(ValueError, match="could not load") as refusal:
        check_loader_rules(code)
    assert [line.split("custom_generate")[1].split(": ")[0] for line in str(refusal.value).splitlines()[1:]] == [
        f"{os.sep}b.py:1",
        f"{os.sep}b.py:2",
        f"{os.sep}generate.py:1",
    ]


# --- publish, against a Hub on loopback ---


@pytest.fixture(scope="module", autouse=True)
def xet_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """hf_xet reads these once a process: chunks that the stand-in can read, and a cache outside the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_XET_XORB_COMPRESSION_POLICY", "none")
        patch.setenv("HF_XET_CACHE", str(tmp_path_factory.mktemp("xet")))
        yield


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStandIn]:
    with serve_hub() as stand_in:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", stand_in.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
        yield stand_in


def run_command(*words: str) -> None:
    parser = argparse.ArgumentParser(prog="talon-hf")
    add_commands(parser.add_subparsers(required=True))
    args = parser.parse_args(words)
    args.run(args)


@pytest.mark.parametrize("transport", ["lfs", "xet"])
def test_publish_sends_every_file_byte_for_byte(
    transport: str, hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", transport == "lfs")
    url = publish("me/mine")
    bundle(tmp_path / "expected", repo_id="me/mine")
    assert url == f"{hub.url}/me/mine"
    assert hub.repos["me/mine"].files == files_of(tmp_path / "expected")
    assert hub.repos["me/mine"].commits == ["Publish TALON"]
    assert not hub.repos["me/mine"].private
    assert hub.transports == {transport}


def test_publish_command_prints_the_url_and_can_make_it_private(
    hub: HubStandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command("publish", "org/talon", "--private")
    assert capsys.readouterr().out == f"{hub.url}/org/talon\n"
    assert hub.repos["org/talon"].private


def test_publish_again_replaces_the_code_and_keeps_other_files(hub: HubStandIn) -> None:
    old = {"custom_generate/gone.py": b"", "custom_generate/generate.py": b"old", "notes.md": b"mine"}
    hub.repos["org/talon"] = StandInRepo(files=dict(old))
    publish("org/talon")
    files = hub.repos["org/talon"].files
    assert "custom_generate/gone.py" not in files
    assert files["custom_generate/generate.py"] == (PACKAGE / "generate.py").read_bytes()
    assert files["notes.md"] == b"mine"


def test_private_never_uploads_to_a_repository_that_is_public(hub: HubStandIn) -> None:
    hub.repos["org/talon"] = StandInRepo()
    with pytest.raises(ValueError, match="'org/talon' exists and is public, so nothing was uploaded"):
        publish("org/talon", private=True)
    assert hub.repos["org/talon"].files == {}


def test_dry_run_lists_files_and_sizes_and_contacts_nothing(
    hub: HubStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_network(*_: object) -> None:
        raise AssertionError("a dry run opened a connection")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.delenv("HF_TOKEN")
    run_command("publish", "me/mine", "--dry-run")
    *rows, total = capsys.readouterr().out.splitlines()
    bundle(tmp_path / "expected", repo_id="me/mine")
    sizes = {name: len(content) for name, content in files_of(tmp_path / "expected").items()}
    assert {row.split()[1]: int(row.split()[0].replace(",", "")) for row in rows} == sizes
    assert total.split()[0] == f"{sum(sizes.values()):,}"
    assert total.endswith("would go to me/mine")
    assert hub.requests == []


@pytest.mark.parametrize(("token", "status"), [("hf_wrong", 401), (READ_TOKEN, 403)])
def test_refused_token_says_what_to_do_and_creates_nothing(token: str, status: int, hub: HubStandIn) -> None:
    with pytest.raises(PermissionError, match=rf"write to 'org/talon' \(HTTP {status}\): run `hf auth login`"):
        publish("org/talon", token=token)
    assert hub.repos == {}


def test_token_that_may_only_read_is_refused_on_an_existing_repository(hub: HubStandIn) -> None:
    hub.repos["org/talon"] = StandInRepo()
    with pytest.raises(PermissionError, match=r"HTTP 403.*may write to 'org'"):
        publish("org/talon", token=READ_TOKEN)
    assert hub.repos["org/talon"].files == {}


def test_missing_token_is_reported_before_anything_is_asked(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PermissionError, match="run `hf auth login`, or set HF_TOKEN"):
        publish("org/talon")
    assert hub.requests == []


@pytest.mark.parametrize(
    "repo_id", ["talon", "org/talon/x", "/talon", "org/", "org/ta lon", "org/-t", "org/a--b", "org/t.git", ""]
)
def test_malformed_repo_id_is_refused_with_the_form_it_needs(repo_id: str, hub: HubStandIn) -> None:
    with pytest.raises(ValueError, match='must be "org/name"') as refusal:
        publish(repo_id)
    assert repr(repo_id) in str(refusal.value)
    assert hub.requests == []


@pytest.mark.parametrize("repo_id", ["org/talon", "My_Org/talon-hf.v2", "a/b"])
def test_repo_ids_that_the_hub_accepts_are_accepted(repo_id: str) -> None:
    huggingface_hub.utils.validate_repo_id(repo_id)
    assert repo_id in publish(repo_id, dry_run=True)


def test_bundle_command_prints_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_command("bundle", str(tmp_path / "out"))
    printed = capsys.readouterr().out.splitlines()
    assert {Path(line).relative_to(tmp_path / "out").as_posix() for line in printed} == set(files_of(tmp_path / "out"))


# --- a Hub user without talon_hf ---

HUB_USER = """
import json, os, sys, urllib.request

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "talon_hf":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Refuse())
import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin, LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)  # tiny models
target, head = sys.argv[1:]
ids = torch.tensor([[5, 9, 17, 3, 44, 21]])
options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
by_name = {"custom_generate": "org/talon", "trust_remote_code": True, "talon_check": False, **options}
widths = []  # tokens in each of the target's forwards

def watch(model):
    model.register_forward_pre_hook(lambda _, args, kw: widths.append(kw["input_ids"].shape[1]), with_kwargs=True)
    return model

def compare(model, *outputs):
    assert "talon_hf" not in sys.modules
    widest = max(widths[1:])  # without the prefill
    plain = GenerationMixin.generate(model, ids, **options)
    widths.clear()
    print(json.dumps({"plain": plain.tolist(), "talon": [out.tolist() for out in outputs], "widest": widest}))
"""
BY_NAME = """
model = watch(LlamaForCausalLM.from_pretrained(target, use_kernels=False))
keyword = model.generate(input_ids=ids, assistant_model=head, **by_name)
positional = model.generate(ids, assistant_model=head, **by_name)
compare(model, keyword, positional)
"""
# The card's own code blocks, on a model of the demo target's shape with random weights and few, thin layers.
CARD = """
torch.manual_seed(0)
sizes = {"hidden_size": 576, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 9}
config = LlamaConfig(vocab_size=49152, num_key_value_heads=3, tie_word_embeddings=True, initializer_range=0.2, **sizes)
model = watch(LlamaForCausalLM(config).eval())
model.generation_config.update(eos_token_id=None, pad_token_id=0)

class Tokenizer:
    def apply_chat_template(self, chat, **how):
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def decode(self, tokens, **how):
        return f"{len(tokens)} tokens"

AutoTokenizer.from_pretrained = lambda name: Tokenizer()
AutoModelForCausalLM.from_pretrained = lambda name: model
folder = snapshot_download("org/talon")
blocks = open(folder + "/README.md").read().split("```python")[1:]
outputs = []
for block in blocks:
    code = block.split("```")[0].replace("COMMIT", os.path.basename(folder))
    exec(code.replace("max_new_tokens=64", "max_new_tokens=16"))  # the vocabulary makes each token slow
    outputs.append(out)
assert len(outputs) == 2
compare(model, *outputs)
"""
# Between what docs/hub.md counts, a request that nobody else makes.
FIVE_CALLS = """
model = watch(LlamaForCausalLM.from_pretrained(target, use_kernels=False))
mark = lambda: urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/org/talon/resolve/main/README.md")
outputs = []
for pin in ({}, {}, {"revision": os.environ["COMMIT"]}, {"revision": os.environ["COMMIT"]}):
    outputs.append(model.generate(ids, assistant_model=head, **by_name, **pin))
    mark()
talon = model.load_custom_generate("org/talon", trust_remote_code=True)
mark()
compare(model, *outputs, talon(model=model, input_ids=ids, assistant_model=head, **options))
"""
OVERRIDDEN = """
for source in target.split(","):
    model = watch(AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True, use_kernels=False))
    assert model.generate.func.__module__.startswith("transformers_modules.")
    keyword = model.generate(input_ids=ids, assistant_model=head, **options)
    positional = model.generate(ids, assistant_model=head, **options)
    compare(model, keyword, positional)
"""


def save_tiny_head(folder: Path) -> None:
    """A random EAGLE-3 head in the official layout for `tiny_target`, with half its vocabulary."""
    torch.manual_seed(1)
    hidden, inner, vocab = 32, 64, 32
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (hidden, 2 * hidden),
        "midlayer.self_attn.k_proj": (hidden // 2, 2 * hidden),
        "midlayer.self_attn.v_proj": (hidden // 2, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, hidden),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (vocab, hidden),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors = {f"{name}.weight": torch.randn(shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    tensors["d2t"] = torch.arange(vocab)  # draft id i is target id 2 i
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "vocab_size": 64,
        "draft_vocab_size": vocab,
        "max_position_embeddings": 2048,
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def saved(tiny_target: LlamaForCausalLM, bundled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target`, `head`, and `pair`: the target with our custom_generate/ beside its weights."""
    folder = tmp_path_factory.mktemp("saved")
    tiny_target.save_pretrained(folder / "target")
    tiny_target.save_pretrained(folder / "pair")
    shutil.copytree(bundled / "custom_generate", folder / "pair" / "custom_generate")
    save_tiny_head(folder / "head")
    return folder


def run_hub_user(script: str, target: Path | str, head: Path, hf_home: Path, **env: str) -> list[dict[str, Any]]:
    """Runs `script` in an isolated process that cannot import talon_hf, and returns what its `compare`s report."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    settings = {"HF_HOME": str(hf_home), "HF_MODULES_CACHE": str(hf_home / "modules"), **env}
    elsewhere = hf_home / "elsewhere"
    elsewhere.mkdir(parents=True)
    command = [sys.executable, "-I", "-c", HUB_USER + script, str(target), str(head)]
    done = subprocess.run(
        command, cwd=elsewhere, env=inherited | settings, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture
def serving(bundled: Path) -> Iterator[HubStandIn]:
    """A Hub that holds the bundle as org/talon."""
    with serve_hub() as stand_in:
        stand_in.repos["org/talon"] = StandInRepo(files=files_of(bundled))
        yield stand_in


def assert_generated_like_plain(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert len(set(report["plain"][0])) > 12, "the target's text is too dull to compare"
        assert report["talon"] == [report["plain"]] * len(report["talon"])
        assert report["widest"] > 6, "no draft tree was checked, so the loop did not run"


def test_bundle_and_the_code_on_its_card_work_offline_from_the_hub_cache(
    serving: HubStandIn, saved: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    huggingface_hub.snapshot_download("org/talon", endpoint=serving.url, cache_dir=home / "hub")
    serving.requests.clear()
    reports = run_hub_user(
        BY_NAME + CARD, saved / "target", saved / "head", home, HF_HUB_OFFLINE="1", HF_ENDPOINT=serving.url
    )
    assert len(reports) == 2
    assert_generated_like_plain(reports)
    assert serving.requests == []
    assert requests_by_the_page("5.17.0 and newer")[-1] == in_words(serving.requests)


def requests_by_the_page(column: str) -> list[str]:
    """What docs/hub.md says that each kind of call asks of the Hub, from the table's rows, top down."""
    table = (ROOT / "docs" / "hub.md").read_text().split("## What a call costs")[1].split("\n\n")[2]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [row[head.index(column)] for row in rows]


def in_words(requests: list[str]) -> str:
    """Requests in the words of docs/hub.md's table."""
    heads, gets = (sum(request.startswith(method) for request in requests) for method in ("HEAD", "GET"))
    if not gets:
        return f"{heads} HEAD" if heads else "none"
    assert len(requests) == heads + gets
    return f"{gets} GET, {heads} HEAD"


def test_bundle_works_from_the_hub_with_the_requests_that_the_page_lists(
    serving: HubStandIn, saved: Path, tmp_path: Path
) -> None:
    home, url, commit = tmp_path / "home", serving.url, serving.repos["org/talon"].sha
    assert_generated_like_plain(
        run_hub_user(FIVE_CALLS, saved / "target", saved / "head", home, HF_ENDPOINT=url, COMMIT=commit)
    )
    asked = [request for request in serving.requests if "/org/talon/" in request]
    ends = [i for i, request in enumerate(asked) if request.endswith("README.md")]
    first, later, _, pinned, loading, loaded = (
        asked[begin + 1 : end] for begin, end in zip([-1, *ends], [*ends, len(asked)], strict=True)
    )
    fetched = [request.split("/")[-1] for request in first if request.startswith("GET")]
    files = {*(path.name for path in shipped_modules()), "requirements.txt"}
    assert sorted(fetched) == sorted(files), "code only, and each file once"
    counts = in_words(first).replace(f"{len(files)} GET, {len(files)} HEAD", "a GET and a HEAD for each file")
    counts = counts.replace(f"{len(files)} GET, {len(files) + 1} HEAD", "a GET and a HEAD for each file, 1 HEAD more")
    is_new = Version(transformers.__version__) >= Version("5.17")
    column = "5.17.0 and newer" if is_new else "transformers 4.57.6, 5.0.0"
    assert [counts, *map(in_words, (later, pinned, loading, loaded))] == requests_by_the_page(column)[:-1]


@pytest.mark.slow
@pytest.mark.sweep
def test_repository_with_our_code_beside_its_weights_overrides_generate(
    serving: HubStandIn, saved: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    serving.repos["org/pair"] = StandInRepo(files=files_of(saved / "pair"))
    huggingface_hub.snapshot_download("org/pair", endpoint=serving.url, cache_dir=home / "hub")
    sources = ["org/pair", str(saved / "pair")]
    reports = run_hub_user(OVERRIDDEN, ",".join(sources), saved / "head", home, HF_HUB_OFFLINE="1")
    assert len(reports) == len(sources)
    assert_generated_like_plain(reports)

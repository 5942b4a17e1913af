"""Memory: a long prompt and a wide batch cost at most what docs/performance.md states, as a process's peak."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MIB = 2**20

# Runs one call in a process of its own; prints its peak resident memory above that of the loaded models, in bytes.
CHILD = """
import json, resource, sys
sys.path[:0] = [{tests!r}, {root!r}]
import torch
torch.set_num_threads(1)
from talon_hf import generate
spec = json.loads(sys.argv[1])
if spec["pair"]:
    from talon_hf.pair import load_draft, load_target
    model, head = load_target(dtype=torch.float32)[0], load_draft(dtype=torch.float32)
else:
    from models import random_head, tiny_model
    model = tiny_model("llama", dtype=torch.float32, vocab_size=spec["vocabulary"], max_position_embeddings=8192)
    head = random_head(model)
torch.manual_seed(0)
ids = torch.randint(3, 1000, (spec["rows"], spec["length"]))
options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=spec["new"], do_sample=False, eos_token_id=None)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
if spec["talon"]:
    out = generate(ids, model=model, assistant_model=head, talon_node_budget=60, **options)
else:
    out = model.generate(ids, **options)
print(json.dumps({{"peak": peak() - before, "text": out.tolist()}}))
"""


def run(talon: bool, **spec: object) -> dict:
    code = CHILD.format(tests=str(HERE), root=str(HERE.parent))
    asked = json.dumps({"talon": talon, **spec})
    done = subprocess.run([sys.executable, "-c", code, asked], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def stated(row: str, **sizes: int) -> int:
    """The bytes that docs/performance.md allows over plain `generate`: a formula in float32 values, and MiB on top."""
    page = (HERE.parent / "docs" / "performance.md").read_text(encoding="utf-8")
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {row} |"))
    _, _, formula, top, _ = line.split("|")
    return 4 * eval(formula.strip(" `"), {}, sizes) + int(top.split()[0]) * MIB


@pytest.mark.slow
def test_a_prompt_of_four_thousand_tokens_costs_plain_generates_memory_and_the_stated_part() -> None:
    length = 4096
    spec = {"pair": True, "rows": 1, "length": length, "new": 4}
    plain, talon = run(False, **spec), run(True, **spec)
    assert talon["text"] == plain["text"]
    bound = stated("a long prompt", L=length, n=30, k=192, h=576, m=1536)
    assert talon["peak"] <= plain["peak"] + bound


@pytest.mark.slow
def test_a_batch_of_sixteen_trees_of_sixty_nodes_stays_within_the_stated_bound() -> None:
    rows, vocabulary = 16, 32000
    spec = {"pair": False, "rows": rows, "length": 32, "new": 8, "vocabulary": vocabulary}
    plain, talon = run(False, **spec), run(True, **spec)
    assert talon["text"] == plain["text"]
    assert talon["peak"] <= plain["peak"] + stated("a wide batch", B=rows, N=60, V=vocabulary)


def test_a_text_beyond_the_heads_positions_is_right_and_warns_once() -> None:
    import torch
    from calls import NEW, plain, sequences, talon
    from models import random_head, tiny_model

    model = tiny_model("llama", eos_token_id=None)
    head = random_head(model, seed=3)
    object.__setattr__(head.config, "max_position_embeddings", 16)
    ids = torch.arange(3, 17).unsqueeze(0)
    want = plain(model, ids, max_new_tokens=NEW)
    with pytest.warns(UserWarning, match="16 positions") as caught:
        out = talon(model, ids, head, max_new_tokens=NEW)
    assert sequences(out) == want.tolist()
    assert len([w for w in caught if "16 positions" in str(w.message)]) == 1

"""The law: output never depends on drafter, policy or budget. In fp64 it is plain `generate`'s, to the token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import FAMILIES, drafter_zoo, seed_cpu, tiny_model

from talon_hf import generate

pytestmark = pytest.mark.conformance

NEW_TOKENS = 16
PROMPT = torch.tensor([[7, 11, 3, 42, 5, 9, 23]])
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "temperature": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "top_k": {"do_sample": True, "top_k": 5},
    "top_p": {"do_sample": True, "top_k": 0, "top_p": 0.8},
    "min_p": {"do_sample": True, "top_k": 0, "min_p": 0.1},
    "penalties": {"do_sample": True, "temperature": 1.3, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "greedy_penalties": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}
SHAPES = [(policy, budget) for policy in ("talon", "eagle", "chain") for budget in (2, 7, 60)]


def plain(model: Any, ids: torch.Tensor, seed: int, **options: Any) -> torch.Tensor:
    seed_cpu(seed)
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, **options)


def talon(model: Any, ids: torch.Tensor, seed: int, drafter: Any, **options: Any) -> Any:
    seed_cpu(seed)
    return generate(
        ids,
        model=model,
        assistant_model=drafter,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        **options,
    )


# The whole cross is slow. The default tier has some shapes of it: on Llama greedy, with more of them than two of the
# modes that only change how a token is picked, and greedy on the other families, which differ in masks alone.
SOME = [("talon", 60), ("talon", 7), ("eagle", 60), ("chain", 7)]
FEW = [("talon", 60), ("chain", 7)]
BRIEF = ("temperature", "penalties")
QUICK = {
    (family, mode): SOME if (family, mode) == ("llama", "greedy") else FEW
    for family in FAMILIES
    for mode in MODES
    if mode == "greedy" or (family == "llama" and mode in BRIEF)
}
CROSS = [pytest.param(*case, shapes, id="-".join(case)) for case, shapes in QUICK.items()]
CROSS += [
    pytest.param(
        family,
        mode,
        [shape for shape in SHAPES if shape not in QUICK.get((family, mode), [])],
        id=f"{family}-{mode}-rest",
        marks=pytest.mark.slow,
    )
    for family in FAMILIES
    for mode in MODES
]


@pytest.mark.parametrize(("family", "mode", "shapes"), CROSS)
def test_output_does_not_depend_on_the_drafter_the_policy_or_the_budget(
    family: str, mode: str, shapes: list[tuple[str, int]]
) -> None:
    # Without an EOS every text runs its full length, past the sliding windows of 12.
    model = tiny_model(family, eos_token_id=None)
    want = plain(model, PROMPT, seed=1, **MODES[mode])
    zoo = drafter_zoo(want.tolist(), model)
    for name, drafter in zoo.items():
        for policy, budget in shapes:
            got = talon(model, PROMPT, 1, drafter, talon_policy=policy, talon_node_budget=budget, **MODES[mode])
            assert got.sequences.tolist() == want.tolist(), (name, policy, budget)
    assert want.shape[1] == PROMPT.shape[1] + NEW_TOKENS


@pytest.mark.parametrize("mode", MODES)
def test_residual_acceptance_of_a_greedy_call_is_the_same_text(mode: str, llama: Any) -> None:
    options = {**MODES[mode], "do_sample": False}
    want = plain(llama, PROMPT, seed=1, **options)
    for drafter in drafter_zoo(want.tolist(), llama).values():
        assert (
            talon(llama, PROMPT, 1, drafter, talon_acceptance="residual", **options).sequences.tolist()
            == want.tolist()
        )


def test_a_perfect_drafter_is_accepted_and_an_adversarial_one_is_not() -> None:
    """The law holds for both; this shows that the zoo drives the paths that it claims to drive."""
    llama = tiny_model("llama", eos_token_id=None)
    want = plain(llama, PROMPT, seed=1, do_sample=False)
    zoo = drafter_zoo(want.tolist(), llama)
    perfect = talon(llama, PROMPT, 1, zoo["perfect"], do_sample=False).talon_stats
    adversarial = talon(llama, PROMPT, 1, zoo["adversarial"], do_sample=False).talon_stats
    good = talon(llama, PROMPT, 1, zoo["good"], do_sample=False).talon_stats
    assert perfect.rounds == 1
    assert perfect.tau == NEW_TOKENS - 1
    assert adversarial.tau == 1.0
    assert 1.0 < good.tau <= perfect.tau


@pytest.mark.parametrize(
    "family", [f if f in ("llama", "mistral") else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_left_padded_rows_equal_their_solo_runs(family: str) -> None:
    model = tiny_model(family)
    prompts = [[7, 11, 3, 42, 5, 9, 23, 8, 14, 31, 6, 12, 19, 27], [5, 9, 23], [33, 4, 18, 21, 40, 10]]
    solo = [plain(model, torch.tensor([p]), seed=1, do_sample=False)[0].tolist() for p in prompts]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    for name, drafter in drafter_zoo(solo, model).items():
        got = generate(
            ids, model=model, assistant_model=drafter, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False
        )
        for row, (prompt, want) in enumerate(zip(prompts, solo, strict=True)):
            new = want[len(prompt) :]
            assert got[row, longest : longest + len(new)].tolist() == new, (name, row)
            assert set(got[row, longest + len(new) :].tolist()) <= {0}


@pytest.mark.parametrize(
    ("rows", "mode"), [(1, "greedy"), (1, "temperature"), (1, "top_p"), (1, "penalties"), (3, "greedy")]
)
def test_processing_all_nodes_at_once_gives_the_text_of_one_after_the_other(
    rows: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerators process every node at once; the CPU, where the tests run, takes only the accepted ones."""
    model = tiny_model("llama", eos_token_id=None)
    ids = PROMPT.repeat(rows, 1)
    ids[-1, 2] += 1
    want = plain(model, ids, seed=1, **MODES[mode]).tolist()
    monkeypatch.setattr("talon_hf.acceptance._at_once", lambda _: True)
    for drafter in drafter_zoo(want, model).values():
        out = talon(model, ids, 1, drafter, output_scores=True, output_logits=True, **MODES[mode])
        assert out.sequences.tolist() == want
        assert len(out.scores) == len(out.logits) == NEW_TOKENS
        if mode == "greedy":
            assert all(torch.equal(scores, raw) for scores, raw in zip(out.scores, out.logits, strict=True))
